"""Chat samples of a dataset in any format, by row, read lazily.

A dataset is a list of files (`formats.py`), each of which reads its rows as conversations: JSON lines (`shards.py`),
Parquet and Arrow (`columns.py`). Rows are numbered through all files.

Promise: nothing is dropped, and what is wrong with a row is said with file and row; opening keeps no text and no media
in memory, so workers share it. Price: that of the formats; finding a row by id reads all ids once, unless rows are
named by their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.bad_samples import BadSample
from entrain_opt.workload.conversation import ChatSample, MediaItem
from entrain_opt.workload.formats import open_shards
from entrain_opt.workload.shards import Shard

__all__ = ["ChatDataset", "ChatSample", "MediaItem"]

#: A Parquet row group is read from its start for every range of rows in it: no smaller ranges than this.
_MIN_GROUP_ROWS = 256


class ChatDataset:
    """The samples of a dataset, by row.

    Args:
        path: a file, a folder or a pattern; see `formats.py`.
        cache_dir: if given, Parquet files are unpacked there once, so that single rows are cheap to read.

    Raises:
        WorkloadError: the dataset is missing, empty or damaged; on access: a row is not valid (file, row and reason are
            named).
    """

    def __init__(self, path: str | Path, *, cache_dir: str | Path | None = None) -> None:
        self.path = Path(path)
        self.shards: list[Shard] = open_shards(path, cache_dir=None if cache_dir is None else Path(cache_dir))
        lengths = [len(shard) for shard in self.shards]
        self._offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        if not len(self):
            raise WorkloadError(f"dataset: {self.path} holds no sample.")

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __iter__(self) -> Iterator[ChatSample]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> ChatSample:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a dataset of {len(self)} samples")
        shard, inner = self._find(row % len(self))
        return shard.sample(inner)

    def _find(self, row: int) -> tuple[Shard, int]:
        index = int(np.searchsorted(self._offsets, row, side="right")) - 1
        return self.shards[index], row - int(self._offsets[index])

    def location(self, row: int) -> str:
        """File and line (or row) of a row."""
        shard, inner = self._find(row)
        return shard.location(inner)

    def read(self, start: int, end: int) -> Iterator[ChatSample | BadSample]:
        """Rows from `start` up to `end`, in order; rows that are not valid come as `BadSample`."""
        for shard, first, last in self._pieces(start, end):
            yield from shard.read(first, last)

    def state(self, start: int, end: int) -> bytes:
        """What the rows from `start` up to `end` consist of, as a hash."""
        return b"".join(shard.state(first, last) for shard, first, last in self._pieces(start, end))

    def _pieces(self, start: int, end: int) -> Iterator[tuple[Shard, int, int]]:
        for index, shard in enumerate(self.shards):
            first, last = max(start, int(self._offsets[index])), min(end, int(self._offsets[index + 1]))
            if first < last:
                yield shard, first - int(self._offsets[index]), last - int(self._offsets[index])

    def ranges(self, num_rows: int) -> list[tuple[int, int]]:
        """All rows cut into ranges of about `num_rows`, within one file each, at the borders of row groups."""
        found = []
        for offset, shard in zip(self._offsets.tolist(), self.shards, strict=False):
            groups = shard.groups
            start = 0
            while start < len(shard):
                fitting = int(groups[np.searchsorted(groups, start + num_rows, side="right") - 1])
                end = fitting if fitting > start else _split_group(groups, start, num_rows)
                found.append((offset + start, offset + end))
                start = end
        return found

    @cached_property
    def _numbered(self) -> dict[str, tuple[int, int]]:
        """Name -> (first row, rows) of the files whose rows are named by their number."""
        return {
            shard.name: (int(offset), len(shard))
            for offset, shard in zip(self._offsets, self.shards, strict=False)
            if not shard.has_ids
        }

    @cached_property
    def _sorted_ids(self) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
        # A row without a readable id is reported by the index; nobody can ask for it by id.
        found = [
            (sample_id, int(offset) + row)
            for offset, shard in zip(self._offsets, self.shards, strict=False)
            if shard.has_ids
            for row, sample_id in enumerate(shard.find_ids())
            if sample_id is not None
        ]
        ids = np.array([sample_id for sample_id, _ in found], dtype=np.str_)
        order = np.argsort(ids, kind="stable")
        repeated = np.flatnonzero(ids[order][1:] == ids[order][:-1])
        if len(repeated):
            name = ids[order[repeated[0]]]
            first, second = (found[place][1] for place in order[repeated[0] : repeated[0] + 2])
            raise WorkloadError(
                f"id {str(name)!r} appears at {self.location(first)} and {self.location(second)}; make it unique."
            )
        return ids[order], np.array([row for _, row in found], dtype=np.int64)[order]

    def check_ids(self) -> None:
        """Raise WorkloadError if two samples share an id. Reads all ids."""
        _ = self._sorted_ids

    def row_of(self, sample_id: str) -> int:
        """The row of a sample id. The first call reads all ids, unless rows are named by their number.

        Raises:
            WorkloadError: no sample has this id, or two samples share one.
        """
        name, _, number = sample_id.rpartition(":")
        if name in self._numbered and number.isdecimal():
            first, num_rows = self._numbered[name]
            if int(number) < num_rows:
                return first + int(number)
        if len(self._numbered) < len(self.shards):
            ids, order = self._sorted_ids
            position = int(np.searchsorted(ids, sample_id))
            if position < len(ids) and ids[position] == sample_id:
                return int(order[position])
        raise WorkloadError(f"id {sample_id!r}: not in {self.path}. Index the dataset again if it changed.")


def _split_group(groups: NDArray[np.int64], start: int, num_rows: int) -> int:
    """Where a range ends that starts within a group larger than `num_rows`."""
    group_end = int(groups[np.searchsorted(groups, start, side="right")])
    return min(group_end, start + max(num_rows, _MIN_GROUP_ROWS))
