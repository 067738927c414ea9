"""A binary heap of (time, operation) rows in an array, for compiled code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.compiled import compiled

IntArray = NDArray[np.int64]


@compiled
def push(heap: IntArray, size: int, time: int, operation: int) -> int:
    """Add to a binary heap of (time, operation) rows; returns its new size."""
    child = size
    while child:
        parent = (child - 1) // 2
        if (heap[parent, 0], heap[parent, 1]) <= (time, operation):
            break
        heap[child, 0], heap[child, 1] = heap[parent, 0], heap[parent, 1]
        child = parent
    heap[child, 0], heap[child, 1] = time, operation
    return size + 1


@compiled
def pop(heap: IntArray, size: int) -> int:
    """Drop the first row of a binary heap; returns its new size."""
    size -= 1
    time, operation = heap[size, 0], heap[size, 1]
    parent = 0
    while 2 * parent + 1 < size:
        child = 2 * parent + 1
        if child + 1 < size and (heap[child + 1, 0], heap[child + 1, 1]) < (heap[child, 0], heap[child, 1]):
            child += 1
        if (time, operation) <= (heap[child, 0], heap[child, 1]):
            break
        heap[parent, 0], heap[parent, 1] = heap[child, 0], heap[child, 1]
        parent = child
    if size:
        heap[parent, 0], heap[parent, 1] = time, operation
    return size
