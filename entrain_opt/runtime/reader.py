"""Content of chat samples: pixels through the model's own image processor, ids through its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.chat import ChatEncoder, EncodedSample
from entrain_opt.workload.dataset import ChatDataset
from entrain_opt.workload.images import open_image
from entrain_opt.workload.samples import SampleTable


@dataclass(frozen=True, slots=True)
class ChatReader:
    """Reads the samples of a chat dataset by their row in the sample table."""

    dataset: ChatDataset
    samples: SampleTable
    encoder: ChatEncoder
    image_processor: Any

    @classmethod
    def open(
        cls,
        dataset: str | Path,
        samples: SampleTable,
        model_folder: str | Path,
        *,
        cache_dir: str | Path = "runs/cache",
    ) -> ChatReader:
        """Open a dataset with the tokenizer and image processor of a model folder.

        Args:
            dataset: a file, folder or pattern; see `entrain_opt.workload.formats`.
            samples: its table.
            model_folder: in Hugging Face format.
            cache_dir: where Parquet files are unpacked, so that single rows are cheap to read.
        """
        from transformers import AutoImageProcessor

        return cls(
            ChatDataset(dataset, cache_dir=cache_dir),
            samples,
            ChatEncoder.from_pretrained(model_folder),
            AutoImageProcessor.from_pretrained(model_folder),
        )

    def _sample(self, row: int) -> Any:
        return self.dataset[self.dataset.row_of(str(self.samples.sample_ids[row]))]

    def pixels(self, row: int, item: int) -> Tensor:
        """[tiles, channels, height, width] of one image.

        Raises:
            WorkloadError: the file is missing or broken; names sample, file and reason.
        """
        sample = self._sample(row)
        media = sample.media[item]
        try:
            image = open_image(media)
        except WorkloadError as error:
            raise WorkloadError(f"sample {sample.id}: {error}") from error
        return self.image_processor(images=[image], return_tensors="pt")["pixel_values"]

    def text(self, row: int) -> EncodedSample:
        """Ids, labels and placeholder positions of one sample."""
        first, end = self.samples.media_offsets[row], self.samples.media_offsets[row + 1]
        return self.encoder.encode(self._sample(row), self.samples.media_tokens[first:end].tolist())
