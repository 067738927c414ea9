"""SampleTable: what every sample costs, as columns.

One row per sample, one flat array per media attribute with offsets, so that 100 million samples stay in a memory map
and a rank touches only the rows of the current global batch. Written and read as Parquet.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entrain_opt.errors import WorkloadError

#: Integer code of a media kind in `media_kind`.
MEDIA_KINDS = ("image", "audio", "video")

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTable:
    """Columns of N samples with M media items in all; item j belongs to sample i if offsets[i] <= j < offsets[i+1].

    Attributes:
        sample_ids: [N] unique strings.
        text_tokens: [N] tokens of the packed sequence that are not media placeholders.
        label_tokens: [N] tokens that count in the loss (after the shift by one).
        media_offsets: [N + 1] into the media columns.
        media_kind: [M] index into `MEDIA_KINDS`.
        media_patches: [M] what the encoder computes on.
        media_segments: [M] parts of equal size that no attention crosses (pictures, tiles, frames, clips).
        media_tokens: [M] what the language model sees after merging.
    """

    sample_ids: NDArray[np.str_]
    text_tokens: IntArray
    label_tokens: IntArray
    media_offsets: IntArray
    media_kind: IntArray
    media_patches: IntArray
    media_segments: IntArray
    media_tokens: IntArray

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def num_media(self) -> int:
        return len(self.media_kind)

    @property
    def media_counts(self) -> IntArray:
        """[N] media items of each sample."""
        return np.diff(self.media_offsets)

    @property
    def media_sample(self) -> IntArray:
        """[M] the sample that each media item belongs to."""
        return np.repeat(np.arange(len(self)), self.media_counts)

    def sum_media(self, values: ArrayLike) -> NDArray[np.float64]:
        """[N] sums of a media column over each sample's items; 0 without media."""
        return np.bincount(self.media_sample, weights=np.asarray(values, dtype=np.float64), minlength=len(self)).astype(
            np.float64
        )

    @property
    def total_tokens(self) -> IntArray:
        """[N] length of the packed sequence: text and media tokens."""
        return self.text_tokens + self.sum_media(self.media_tokens).astype(np.int64)

    def take(self, rows: ArrayLike) -> SampleTable:
        """The given rows (numbers, or a boolean per row), in the given order; a row may repeat."""
        rows = np.asarray(rows)
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        rows = np.where(rows < 0, rows + len(self), rows)
        counts = self.media_offsets[rows + 1] - self.media_offsets[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        media_rows = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - self.media_offsets[rows], counts)
        return SampleTable(
            sample_ids=self.sample_ids[rows],
            text_tokens=self.text_tokens[rows],
            label_tokens=self.label_tokens[rows],
            media_offsets=offsets,
            media_kind=self.media_kind[media_rows],
            media_patches=self.media_patches[media_rows],
            media_segments=self.media_segments[media_rows],
            media_tokens=self.media_tokens[media_rows],
        )

    def check(self) -> None:
        """Raise WorkloadError if the columns disagree in length or hold impossible values."""
        num_samples = len(self)
        for name in ("text_tokens", "label_tokens"):
            if getattr(self, name).shape != (num_samples,):
                raise WorkloadError(f"{name}: expected {num_samples} values, found {getattr(self, name).shape}.")
        if self.media_offsets.shape != (num_samples + 1,) or (np.diff(self.media_offsets) < 0).any():
            raise WorkloadError("media_offsets: expected one non-decreasing offset per sample and one more.")
        for field in fields(self):
            if field.name.startswith("media_") and field.name != "media_offsets":
                found = getattr(self, field.name)
                if found.shape != (self.media_offsets[-1],):
                    raise WorkloadError(f"{field.name}: expected {self.media_offsets[-1]} values, found {found.shape}.")
                if len(found) and found.min() < (0 if field.name == "media_kind" else 1):
                    raise WorkloadError(f"{field.name}: expected positive values, found {found.min()}.")
        if len(np.unique(self.sample_ids)) != num_samples:
            raise WorkloadError("sample_ids: expected unique ids, found repeated ones.")

    def write(self, path: str | Path) -> None:
        """Write one Parquet file, whole or not at all."""
        from entrain_opt.workload.parquet import write_sample_table

        write_sample_table(self, Path(path))

    @classmethod
    def read(cls, path: str | Path) -> SampleTable:
        """Read a file that `write` or `entrain index` made, memory-mapped.

        Raises:
            WorkloadError: the file is missing or is not a sample table.
        """
        from entrain_opt.workload.parquet import read_sample_table

        return read_sample_table(Path(path))
