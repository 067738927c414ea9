"""Largest differencing method (Karmarkar and Karp 1982) for k sets, as used by RLHF trainers to level total work.

Every value starts as a partial answer of its own. The two partial answers with the largest spread (heaviest minus
lightest set) are merged, heaviest set onto lightest, until one is left. Promise: every set gets a value if there are
enough values. Price: O(N (log N + k log k)); 50 ms for 4,096 values in 32 sets. It knows one load only: encoder and
language-model work are added up, so either can stay uneven.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from entrain_opt.assignment import FloatArray, IntArray

# A set of values as a tree: a leaf is an index, a pair is a union. Merging is then O(1), not a list copy.
_Tree = Any


def largest_differencing(values: FloatArray, num_sets: int) -> IntArray:
    """[N] set of each value; sets are numbered by falling sum.

    Args:
        values: [N], at least 0.
        num_sets: with fewer values than sets the last sets stay empty.
    """
    labels = np.zeros(len(values), dtype=np.int64)
    if not len(values):
        return labels
    # (minus spread, age, non-empty sets as (sum, tree) by falling sum); age makes ties deterministic.
    heap: list[tuple[float, int, list[tuple[float, _Tree]]]] = [
        (-value if num_sets > 1 else 0.0, index, [(value, index)]) for index, value in enumerate(values.tolist())
    ]
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        # Heaviest onto lightest; sets beyond a list's end are empty, so only the overlap adds up.
        overlap = max(0, len(first) + len(second) - num_sets)
        kept = len(first) - overlap
        merged = first[:kept] + second[: len(second) - overlap]
        merged += [
            (a[0] + b[0], (a[1], b[1]))
            for a, b in zip(first[kept:], reversed(second[len(second) - overlap :]), strict=True)
        ]
        merged.sort(key=_falling_sum)
        lightest = merged[-1][0] if len(merged) == num_sets else 0.0
        heapq.heappush(heap, (lightest - merged[0][0], age, merged))
        age += 1
    for label, (_, tree) in enumerate(heap[0][2]):
        stack = [tree]
        while stack:
            node = stack.pop()
            if isinstance(node, tuple):
                stack.extend(node)
            else:
                labels[node] = label
    return labels


def _falling_sum(item: tuple[float, _Tree]) -> float:
    return -item[0]
