"""Lists of integers laid end to end, as compiled code reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Links:
    """Lists of integers laid end to end."""

    def __init__(self) -> None:
        self._values: list[int] = []

    def add(self, rows: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
        """Where each row starts and ends."""
        ends = len(self._values) + np.cumsum([len(row) for row in rows], dtype=np.int64)
        starts = ends - np.array([len(row) for row in rows], dtype=np.int64)
        self._values += [value for row in rows for value in row]
        return starts, ends

    def joined(self) -> IntArray:
        return np.array(self._values, dtype=np.int64)
