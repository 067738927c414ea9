"""Rows of integers laid end to end, as compiled code reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows of integers.

    Attributes:
        sizes: [n] values of each row.
        values: all rows, one after the other.
    """

    sizes: IntArray
    values: IntArray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Rows:
        sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        return cls(sizes=sizes, values=np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(sizes.sum())))

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """The rows of all parts."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(
            sizes=np.concatenate([nothing, *(part.sizes for part in parts)]),
            values=np.concatenate([nothing, *(part.values for part in parts)]),
        )

    def plus(self, number: int) -> Rows:
        """The same rows with a number added to every value."""
        return Rows(sizes=self.sizes, values=self.values + number)

    @cached_property
    def lists(self) -> list[list[int]]:
        values, ends = self.values.tolist(), np.cumsum(self.sizes).tolist()
        return [values[end - size : end] for end, size in zip(ends, self.sizes.tolist(), strict=True)]

    @cached_property
    def row_of_value(self) -> IntArray:
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def __getitem__(self, row: int) -> list[int]:
        return self.lists[row]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.sizes)


class Links:
    """Several sets of rows in one array."""

    def __init__(self) -> None:
        self._parts: list[IntArray] = [np.zeros(0, dtype=np.int64)]
        self._length = 0

    def add(self, rows: Rows) -> tuple[IntArray, IntArray]:
        """Where each row starts and ends."""
        ends = self._length + np.cumsum(rows.sizes)
        self._parts.append(rows.values)
        self._length += len(rows.values)
        return ends - rows.sizes, ends

    def joined(self) -> IntArray:
        return np.concatenate(self._parts)
