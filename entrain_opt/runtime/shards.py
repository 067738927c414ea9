"""Which part of a parameter a device of a tensor group holds.

A part is some ranges along one dimension, joined: the rows of its heads, or three ranges of a matrix in which queries,
keys and values lie below each other. The whole is what checkpoints and model folders hold, so a part can be read from
them by name under any degree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A part of a tensor.

    Attributes:
        shape: of the whole.
        dim: along which it is divided.
        ranges: [start, end) along `dim` that this part holds, in order.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]

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

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of this part."""
        length = sum(end - start for start, end in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def cut(self, whole: Tensor) -> Tensor:
        """This part of the whole, in memory of its own."""
        return torch.cat([whole.narrow(self.dim, start, end - start) for start, end in self.ranges], dim=self.dim)

    def index(self, start: int, end: int) -> tuple[slice, ...]:
        """What selects a range of the whole."""
        return (*(slice(None) for _ in range(self.dim)), slice(start, end))

    def chunks(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """(offsets in the whole, sizes, where it begins in this part along `dim`) of each range."""
        own = 0
        for start, end in self.ranges:
            offsets = tuple(start if dim == self.dim else 0 for dim in range(len(self.shape)))
            sizes = tuple(end - start if dim == self.dim else n for dim, n in enumerate(self.shape))
            yield offsets, sizes, own
            own += end - start
