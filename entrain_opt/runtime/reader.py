"""Content of chat samples: media through the model's own processors, ids through its tokenizer.

Image processors and feature extractors are loaded from the model folder each alone, because a combined processor may
need packages that no sample needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from entrain_opt.errors import FAMILY_GUIDE, RuntimeConfigError, WorkloadError
from entrain_opt.runtime.families import Family, read_family
from entrain_opt.workload.chat import ChatEncoder, EncodedSample
from entrain_opt.workload.conversation import ChatSample, MediaItem
from entrain_opt.workload.dataset import ChatDataset
from entrain_opt.workload.images import open_image
from entrain_opt.workload.measure import media_forms
from entrain_opt.workload.media import Expansion, MediaRule, media_rule
from entrain_opt.workload.samples import SampleTable
from entrain_opt.workload.video import read_frames, read_video_length
from entrain_opt.workload.waveform import read_waveform


@dataclass(frozen=True, kw_only=True)
class ChatReader:
    """Reads the samples of a chat dataset by their row in the sample table."""

    dataset: ChatDataset
    samples: SampleTable
    encoder: ChatEncoder
    family: Family
    rule: MediaRule
    model_folder: Path

    @classmethod
    def open(
        cls,
        dataset: str | Path,
        samples: SampleTable,
        model_folder: str | Path,
        *,
        cache_dir: str | Path = "runs/cache",
    ) -> ChatReader:
        """Open a dataset with the tokenizer and processors of a model folder.

        Args:
            dataset: a file, folder or pattern; see `entrain_opt.workload.formats`.
            samples: its table.
            model_folder: in Hugging Face format.
            cache_dir: where Parquet files are unpacked, so that single rows are cheap to read.

        Raises:
            RuntimeConfigError: the folder lacks what the samples' media need.
        """
        reader = cls(
            dataset=ChatDataset(dataset, cache_dir=cache_dir),
            samples=samples,
            encoder=ChatEncoder.from_pretrained(model_folder),
            family=read_family(model_folder),
            rule=media_rule(model_folder),
            model_folder=Path(model_folder),
        )
        # Loaded now, so that a broken folder fails before training and workers inherit it.
        if "image" in reader.rule.kinds:
            reader.image_processor  # noqa: B018
        if "audio" in reader.rule.kinds:
            reader.feature_extractor  # noqa: B018
        return reader

    @cached_property
    def image_processor(self) -> Any:
        """The folder's image processor."""
        from transformers import AutoImageProcessor

        return self._load(AutoImageProcessor, "an image processor")

    @cached_property
    def feature_extractor(self) -> Any:
        """The folder's audio feature extractor."""
        from transformers import AutoFeatureExtractor

        return self._load(AutoFeatureExtractor, "a feature extractor")

    def _load(self, auto_class: Any, what: str) -> Any:
        try:
            return auto_class.from_pretrained(str(self.model_folder), local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise RuntimeConfigError(f"{self.model_folder}: expected {what}: {error}") from error

    def _sample(self, row: int) -> ChatSample:
        return self.dataset[self.dataset.row_of(str(self.samples.sample_ids[row]))]

    def pixels(self, row: int, item: int) -> Tensor:
        """What the encoder takes of one media item: tiles or patches of an image or video, mel frames of a clip.

        Raises:
            WorkloadError: the file is missing or broken, or a video, which the family does not execute; names sample,
                file and reason.
            RuntimeConfigError: a package that reads the file is missing.
        """
        sample = self._sample(row)
        media = sample.media[item]
        try:
            if media.kind == "image":
                alone = sum(other.kind == "image" for other in sample.media) == 1
                return self._image(media, alone=alone)
            return self._clip(media) if media.kind == "audio" else self._video(media)
        except WorkloadError as error:
            raise WorkloadError(f"sample {sample.id}: {error}") from error

    def _image(self, media: MediaItem, *, alone: bool) -> Tensor:
        image = open_image(media)
        if not alone and type(self.image_processor).__name__.startswith("LlavaOnevision"):
            # It makes tiles of a sample's only image; of several, each is one square.
            batch = self.image_processor(images=[[image, image.resize((1, 1))]], return_tensors="pt")
            pixels = batch["pixel_values"].flatten(0, -5)[0]
            return pixels if pixels.dim() == 4 else pixels[None]
        made = self.image_processor(images=[image], return_tensors="pt", **self.family.image_settings())
        pixels = made["pixel_values"]
        return self.family.arrange(pixels.flatten(0, 1) if pixels.dim() == 5 else pixels)

    def _clip(self, media: MediaItem) -> Tensor:
        rate = self.feature_extractor.sampling_rate
        features: Tensor = self.feature_extractor(
            read_waveform(media, rate), sampling_rate=rate, padding="max_length", return_tensors="pt"
        )["input_features"]
        return features

    def _video(self, media: MediaItem) -> Tensor:
        if not self.family.executes_videos:
            raise WorkloadError(
                f"{media.path}: training on videos is not supported for {self.family.config.model_type}. Leave the "
                f"sample out, or write `video_rows` in {type(self.family).__module__.replace('.', '/')}.py: see "
                f"{FAMILY_GUIDE}."
            )
        length = read_video_length(media)
        chosen = self.rule.video_frames(length.num_frames, length.width, length.height, length.fps)
        resample = self.image_processor.resample if chosen.values is None else chosen.values.resample
        frames = read_frames(media, chosen.indices)
        for size in (chosen.first_size, chosen.size):
            frames = frames if size is None else [frame.resize(size, resample) for frame in frames]
        return self.family.video_rows(frames, self.image_processor, chosen.values)

    def shapes(self, row: int) -> list[tuple[int, ...]]:
        """Shape of each media item, from its header; see `MediaRule.image_shape`."""
        return [form.shape for form in media_forms(self._sample(row), self.rule)]

    def text(self, row: int) -> EncodedSample:
        """Ids, labels and placeholder positions of one sample."""
        sample = self._sample(row)
        return self.encoder.encode(sample, self._expansions(row, sample))

    def _expansions(self, row: int, sample: ChatSample) -> Sequence[int | Expansion]:
        """Numbers of features from the table; only where a processor writes text around them, headers are read."""
        media = slice(self.samples.media_offsets[row], self.samples.media_offsets[row + 1])
        columns = (self.samples.media_patches, self.samples.media_segments, self.samples.media_tokens)
        sizes = list(zip(*(column[media].tolist() for column in columns), strict=True))
        if all(self.family.features(*size) == size[2] for size in sizes):
            return [size[2] for size in sizes]
        return [form.expansion for form in media_forms(sample, self.rule)]
