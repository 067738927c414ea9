"""A loader that works one global batch ahead.

With loader processes PyTorch prefetches by itself. Without any, the next batch (its assignment is the longest part) is
made by one background thread while the current one trains; the compiled search runs without the interpreter's lock.
An error of the thread is raised where its batch would have come.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from torch.utils.data import DataLoader

Batch = TypeVar("Batch")
_END = object()


class AheadLoader(DataLoader[Batch]):
    """A `DataLoader` whose next batch is already being made."""

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        batches = super().__iter__()
        return batches if self.num_workers > 0 else one_ahead(batches)


def one_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same items in the same order, each begun when the one before it is handed out."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="next-batch") as pool:
        following: Future[Any] = pool.submit(next, batches, _END)
        while (item := following.result()) is not _END:
            following = pool.submit(next, batches, _END)
            yield item
