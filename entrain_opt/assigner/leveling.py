"""Levels two loads over microbatches at once, compiled: greedy placement, then moves and swaps.

Every item has two loads, each in units of its mean over microbatches. The objective is the sum over microbatches of the
squares of both, which falls exactly when items move from loaded to less loaded microbatches in either load; its least
value is where both are even.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner.random_numbers import random_below
from entrain_opt.compiled import compiled

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

#: An improvement smaller than this is rounding.
EPSILON = 1e-12
#: Pairs that a kick swaps: few, so that most of what is good stays.
SWAPS_PER_KICK = 4


@compiled
def place_greedily(
    loads: FloatArray, amounts: FloatArray, order: IntArray, num_microbatches: int, limits: FloatArray
) -> IntArray:
    """[N] microbatch of each item, placed in the given order where the larger of the two loads grows least.

    Args:
        loads: [N, 2] in units of the mean microbatch.
        amounts: [N, 2] of what memory limits.
        order: [N] items in the order they are placed.
        num_microbatches: to fill; an item without room anywhere stays at -1.
        limits: [2] most of each amount in a microbatch.
    """
    sums, held = np.zeros((num_microbatches, 2)), np.zeros((num_microbatches, 2))
    sizes = np.zeros(num_microbatches, dtype=np.int64)
    microbatch = np.full(len(order), -1, dtype=np.int64)
    for item in order:
        best, best_peak, best_sum = -1, np.inf, np.inf
        for m in range(num_microbatches):
            if held[m, 0] + amounts[item, 0] > limits[0] or held[m, 1] + amounts[item, 1] > limits[1]:
                continue
            peak = max(sums[m, 0] + loads[item, 0], sums[m, 1] + loads[item, 1])
            total = sums[m, 0] + sums[m, 1]
            if best >= 0 and peak > best_peak - EPSILON:
                lighter = total < best_sum - EPSILON or (total < best_sum + EPSILON and sizes[m] < sizes[best])
                if peak > best_peak + EPSILON or not lighter:
                    continue
            best, best_peak, best_sum = m, peak, total
        if best >= 0:
            microbatch[item] = best
            sums[best] += loads[item]
            held[best] += amounts[item]
            sizes[best] += 1
    return microbatch


@compiled
def improve_by_swaps(
    loads: FloatArray, amounts: FloatArray, microbatch: IntArray, num_microbatches: int, limits: FloatArray, rounds: int
) -> None:
    """Move items and swap pairs of them, best improvement per item first, while the sum of squares falls.

    Args:
        loads, amounts, limits: as in `place_greedily`.
        microbatch: [N] improved in place.
        num_microbatches: K.
        rounds: passes over all items at most.
    """
    count = len(microbatch)
    sums, held = np.zeros((num_microbatches, 2)), np.zeros((num_microbatches, 2))
    sizes = np.zeros(num_microbatches, dtype=np.int64)
    for item in range(count):
        sums[microbatch[item]] += loads[item]
        held[microbatch[item]] += amounts[item]
        sizes[microbatch[item]] += 1
    for _ in range(rounds):
        improved = False
        for item in range(count):
            here = microbatch[item]
            best, gain = -1, EPSILON
            for other in range(count + num_microbatches):
                # The first entries are partners to swap with, the last are microbatches to move to.
                there = microbatch[other] if other < count else other - count
                if there == here or (other >= count and sizes[here] == 1):
                    continue
                a, b = loads[item, 0], loads[item, 1]
                p, q = amounts[item, 0], amounts[item, 1]
                if other < count:
                    a, b = a - loads[other, 0], b - loads[other, 1]
                    p, q = p - amounts[other, 0], q - amounts[other, 1]
                better = 2 * a * (sums[here, 0] - sums[there, 0] - a) + 2 * b * (sums[here, 1] - sums[there, 1] - b)
                if (
                    better > gain
                    and held[there, 0] + p <= limits[0]
                    and held[there, 1] + q <= limits[1]
                    and held[here, 0] - p <= limits[0]
                    and held[here, 1] - q <= limits[1]
                ):
                    best, gain = other, better
            if best >= 0:
                improved = True
                there = microbatch[best] if best < count else best - count
                for axis in range(2):
                    load, amount = loads[item, axis], amounts[item, axis]
                    if best < count:
                        load, amount = load - loads[best, axis], amount - amounts[best, axis]
                    sums[here, axis] -= load
                    sums[there, axis] += load
                    held[here, axis] -= amount
                    held[there, axis] += amount
                microbatch[item] = there
                if best < count:
                    microbatch[best] = here
                else:
                    sizes[here] -= 1
                    sizes[there] += 1
        if not improved:
            return


@compiled
def improve_from_kicks(
    loads: FloatArray, amounts: FloatArray, microbatch: IntArray, num_microbatches: int, limits: FloatArray,
    rounds: int, kicks: int, state: NDArray[np.uint64],
) -> None:  # fmt: skip
    """Iterated local search: swap a few random pairs, improve by swaps, and keep what is better.

    Args:
        loads, amounts, limits, rounds: as in `improve_by_swaps`.
        microbatch: [N] improved in place.
        num_microbatches: K.
        kicks: how often.
        state: of the random numbers; changed.
    """
    least = _sum_of_squares(loads, microbatch, num_microbatches)
    for _ in range(kicks):
        trial = microbatch.copy()
        for _ in range(SWAPS_PER_KICK):
            i, j = random_below(state, len(trial)), random_below(state, len(trial))
            trial[i], trial[j] = trial[j], trial[i]
        if not _keeps_limits(amounts, trial, num_microbatches, limits):
            continue
        improve_by_swaps(loads, amounts, trial, num_microbatches, limits, rounds)
        found = _sum_of_squares(loads, trial, num_microbatches)
        if found < least - EPSILON:
            least = found
            microbatch[:] = trial


@compiled
def _sum_of_squares(loads: FloatArray, microbatch: IntArray, num_microbatches: int) -> float:
    sums = np.zeros((num_microbatches, 2))
    for item in range(len(microbatch)):
        sums[microbatch[item]] += loads[item]
    return float((sums * sums).sum())


@compiled
def _keeps_limits(amounts: FloatArray, microbatch: IntArray, num_microbatches: int, limits: FloatArray) -> bool:
    held = np.zeros((num_microbatches, 2))
    for item in range(len(microbatch)):
        held[microbatch[item]] += amounts[item]
    fits = True
    for m in range(num_microbatches):
        fits = fits and held[m, 0] <= limits[0] and held[m, 1] <= limits[1]
    return fits


@compiled
def defer_peaks(
    loads: FloatArray, amounts: FloatArray, order: IntArray, microbatch: IntArray, num_microbatches: int, limit: float,
    window: int, tolerance: float,
) -> None:  # fmt: skip
    """Move items to later microbatches within a window, while the sum of squares falls.

    Args:
        loads: [N] in units of the mean microbatch.
        amounts: [N] of what memory limits.
        order: [N] items in the order they are asked.
        microbatch: [N] changed in place; no item moves further than `window` from where it was.
        num_microbatches: K.
        limit: most of the amount in a microbatch.
        window: microbatches that an item may wait.
        tolerance: only microbatches above 1 + tolerance give.
    """
    sums, held = np.zeros(num_microbatches), np.zeros(num_microbatches)
    sizes = np.zeros(num_microbatches, dtype=np.int64)
    for item in range(len(order)):
        sums[microbatch[item]] += loads[item]
        held[microbatch[item]] += amounts[item]
        sizes[microbatch[item]] += 1
    origin = microbatch.copy()
    improved = True
    while improved:
        improved = False
        for item in order:
            here = microbatch[item]
            best, gain = -1, EPSILON
            if sums[here] <= 1 + tolerance or sizes[here] == 1:
                continue
            for there in range(here + 1, min(origin[item] + window, num_microbatches - 1) + 1):
                better = 2 * loads[item] * (sums[here] - sums[there] - loads[item])
                if better > gain and held[there] + amounts[item] <= limit:
                    best, gain = there, better
            if best >= 0:
                sums[here] -= loads[item]
                held[here] -= amounts[item]
                sizes[here] -= 1
                sums[best] += loads[item]
                held[best] += amounts[item]
                sizes[best] += 1
                microbatch[item] = best
                improved = True
