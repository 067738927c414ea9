"""Subsets whose sum comes closest to a target, within a size limit.

Values are rounded to 1/1024 of half the largest target and a table over all rounded sums is filled item by item. It
keeps, for each rounded sum, the subset of least size and its exact sum, so the answer is judged on exact sums. Promise:
with n values, no further from the target than the best subset by more than n rounding units. Price: O(n * 4096) for any
number of targets; 25 us per value.
"""

from __future__ import annotations

import numpy as np

from entrain_opt.assignment import FloatArray, IntArray

_STEPS = 4096


class SubsetSums:
    """All rounded sums of subsets of some values, up to twice the largest target of interest.

    Args:
        values: [n] at least 0.
        sizes: [n] at least 0: what a subset takes of the receiver's room.
        largest_target: sums above twice of this are never closer to a target than the empty subset.
    """

    def __init__(self, values: FloatArray, sizes: FloatArray | IntArray, largest_target: float) -> None:
        self.unit = 2 * largest_target / _STEPS
        self._num_values = len(values)
        least_size = np.full(_STEPS + 1, np.inf)
        exact_sum = np.zeros(_STEPS + 1)
        least_size[0] = 0.0
        self._taken = np.zeros((len(values), _STEPS + 1), dtype=bool)
        # Halves and more go up, so a value is 0 steps only if it hardly matters; such values stay where they are.
        self._steps = np.floor(values / self.unit + 0.5) if self.unit > 0 else np.zeros(len(values))
        for item, step in enumerate(np.minimum(self._steps, _STEPS + 1).astype(np.int64).tolist()):
            if step == 0 or step > _STEPS:
                continue
            size = least_size[:-step] + sizes[item]
            better = size < least_size[step:]
            self._taken[item, step:] = better
            exact_sum[step:][better] = (exact_sum[:-step] + values[item])[better]
            least_size[step:][better] = size[better]
        self._positions = np.flatnonzero(np.isfinite(least_size))
        self._sums = exact_sum[self._positions]
        self._sizes = least_size[self._positions]

    def closest(self, targets: FloatArray, limits: FloatArray) -> tuple[FloatArray, IntArray]:
        """Exact sum and name of the best subset for each target; of two equally close ones the smaller sum.

        Args:
            targets: [J] at least 0.
            limits: [J] largest allowed size, at least 0.

        Returns:
            [J] sums and [J] names for `members`.
        """
        distance = np.abs(self._sums[None, :] - targets[:, None])
        distance[self._sizes[None, :] > limits[:, None]] = np.inf
        # Beyond twice the target the receiver would end above where the giver started.
        distance[self._sums[None, :] > 2 * targets[:, None]] = np.inf
        best = distance.argmin(axis=1)
        return self._sums[best], self._positions[best]

    def members(self, name: int) -> IntArray:
        """Ascending indices of the values in a subset that `closest` named."""
        chosen = []
        for item in range(self._num_values - 1, -1, -1):
            if self._taken[item, name]:
                chosen.append(item)
                name -= int(self._steps[item])
        return np.array(chosen[::-1], dtype=np.int64)
