"""Which part of a parameter a device of a tensor group holds.

A part is some ranges along one dimension, joined: the rows of its heads, or three ranges of a matrix in which queries,
keys and values lie below each other. The whole is what checkpoints and model folders hold, so a part can be read from
them by name under any degree. Where replicas share out the optimizer's state, each has some rows of such a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A part of a tensor.

    Attributes:
        shape: of the whole.
        dim: along which it is divided.
        ranges: [start, end) along `dim` that this part holds, in order.
        across: (dimension, start, end) of another dimension that is divided as well.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    across: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, shape: tuple[int, ...], dim: int, *, place: int, size: int, blocks: int = 1) -> Shard:
        """The part of one of `size` devices.

        Args:
            shape: of the whole.
            dim: along which it is divided.
            place: of the device.
            size: devices.
            blocks: equal parts that follow each other along `dim`, each of which is divided.
        """
        length = shape[dim] // blocks
        start, end = place * length // size, (place + 1) * length // size
        ranges = tuple((block * length + start, block * length + end) for block in range(blocks))
        return cls(shape=tuple(shape), dim=dim, ranges=ranges)

    def rows(self, dim: int, start: int, end: int) -> Shard:
        """Rows `start` to `end - 1` of this part, counted in it."""
        if dim != self.dim:
            return replace(self, across=(dim, start, end))
        ranges, before = [], 0
        for first, last in self.ranges:
            low, high = max(start - before, 0), min(end - before, last - first)
            if low < high:
                ranges.append((first + low, first + high))
            before += last - first
        return replace(self, ranges=tuple(ranges))

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of this part."""
        length = sum(end - start for start, end in self.ranges)
        return tuple(length if dim == self.dim else end - start for dim, (start, end) in enumerate(self._box(0, 0)))

    def cut(self, whole: Tensor) -> Tensor:
        """This part of the whole, in memory of its own."""
        return torch.cat([whole[self.index(start, end)] for start, end in self.ranges], dim=self.dim)

    def index(self, start: int, end: int) -> tuple[slice, ...]:
        """What selects a range of the whole."""
        return tuple(slice(*ends) for ends in self._box(start, end))

    def chunks(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """(offsets in the whole, sizes, where it begins in this part along `dim`) of each range."""
        own = 0
        for start, end in self.ranges:
            box = self._box(start, end)
            yield tuple(low for low, _ in box), tuple(high - low for low, high in box), own
            own += end - start

    def _box(self, start: int, end: int) -> list[tuple[int, int]]:
        """[start, end) of a range in every dimension of the whole."""
        box = [(0, size) for size in self.shape]
        box[self.dim] = (start, end)
        if self.across is not None:
            dim, *ends = self.across
            box[dim] = (ends[0], ends[1])
        return box
