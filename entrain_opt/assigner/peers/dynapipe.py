"""`dynapipe`: sorted samples cut by dynamic programming, after DynaPipe (arXiv 2311.10418).

1. Sort by length. With one backbone and padding that is the sequence length; here total work is what a sample takes.
2. Cut the sorted samples into consecutive microbatches that minimise (S - 1) * t_max + sum of t_i, where t_i are the
   forward and backward seconds of microbatch i on a stage and S the pipeline ranks. A first attempt gives a microbatch
   1/S of the memory caps, a second one all of it.
3. Group the microbatches by forward and backward time (k-means, 3 groups), try every order of the groups in an estimate
   of 1F1B, and keep the fastest. The original goes on to execute them on its own memory-aware schedule; the schedule is
   chosen apart here.

Packing has no padding, so t is a sum over samples plus the fixed seconds per microbatch, and the sum of all t is a
constant plus a fixed amount per microbatch. The program for a given t_max then needs the fewest microbatches that keep
it, which longest extensions give, and the best t_max for each number of microbatches is found by bisection: the same
optimum as the table, without the table. t is the mean over ranks, as the original knows one balanced backbone.

The number of microbatches is part of the answer, at most K unless the caps need more. Without fixed seconds more
microbatches never cost anything in this objective, so K are used. Of equally good cuts the one whose heavier
microbatches are smaller is taken. Replicas are split by Karmarkar-Karp; the original splits microbatches made from the
global batch, here each replica's samples are cut by themselves.

Promise: the optimum of 2; the same answer however the batch lists the samples. Price: 10 ms for 128 samples in 32
microbatches, 50 ms in up to 96 with fixed seconds, where every number of microbatches is tried.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import permutations

import numpy as np

from entrain_opt.assigner.peers.common import RankSeconds, rank_seconds
from entrain_opt.assigner.peers.one_f_one_b import OneForwardOneBackward
from entrain_opt.assigner.work import Placement, SampleWork, place_samples
from entrain_opt.assignment import FloatArray, IntArray

#: Seconds become whole ticks, so that sums are exact and bisection ends: the total is about this many.
_TICKS = 2**50

_NUM_GROUPS = 3
_KMEANS_ROUNDS = 10


def place_dynapipe(work: SampleWork, num_microbatches: int) -> Placement:
    """The cut and the order of the module docstring for one replica's samples."""
    seconds = rank_seconds(work)
    per_sample = (seconds.forward + seconds.backward).mean(axis=0)
    fixed = float((seconds.forward_fixed + seconds.backward_fixed).mean())
    order = np.lexsort((work.patches, work.tokens, work.llm_seconds, work.encoder_seconds, per_sample))
    ends = cut_sorted(work, order, per_sample[order], fixed, num_microbatches)
    microbatch = np.empty(work.num_samples, dtype=np.int64)
    microbatch[order] = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    position = np.empty(len(ends), dtype=np.int64)
    position[fastest_group_order(seconds, microbatch, len(ends))] = np.arange(len(ends))
    return place_samples(work, position[microbatch], position[microbatch])


def cut_sorted(
    work: SampleWork, order: IntArray, seconds: FloatArray, fixed_seconds: float, num_microbatches: int
) -> list[int]:
    """Ends of consecutive microbatches that minimise (S - 1) * t_max + sum of t.

    Args:
        work: N samples.
        order: [N] the samples by position.
        seconds: [N] per-stage seconds of each position.
        fixed_seconds: added to t of each microbatch.
        num_microbatches: the most, unless the memory caps need more.

    Returns:
        The position after each microbatch's last sample; the last is N.
    """
    num_ranks, num_samples = work.shape.num_ranks, work.num_samples
    most = min(num_microbatches, num_samples)
    cuts = _Cuts(work, order, seconds, fixed_seconds, memory_share=1.0)
    careful = _Cuts(work, order, seconds, fixed_seconds, memory_share=1 / num_ranks)
    fewest = len(cuts.longest(cuts.total))
    if careful.every_sample_fits and (count := len(careful.longest(careful.total))) <= most:
        cuts, fewest = careful, count
    most = max(most, fewest)
    best_cost, best = None, (most, 0)
    largest = 0
    for count in range(most, (fewest if cuts.fixed_ticks else most) - 1, -1):
        largest = cuts.smallest_largest(count, at_least=largest)
        cost = (num_ranks - 1) * largest + count * cuts.fixed_ticks
        if best_cost is None or cost < best_cost:
            best_cost, best = cost, (count, largest)
        if (num_ranks - 1) * largest + fewest * cuts.fixed_ticks >= best_cost:
            break  # fewer microbatches have a larger t_max, and save no more than this
    count, largest = best
    longest = cuts.longest(largest) + [num_samples] * count
    ends = [num_samples]
    for index in range(count - 2, -1, -1):
        ends.append(min(longest[index], ends[-1] - 1))
    return ends[::-1]


class _Cuts:
    """Consecutive microbatches of sorted samples under memory caps, in whole ticks."""

    def __init__(
        self, work: SampleWork, order: IntArray, seconds: FloatArray, fixed_seconds: float, *, memory_share: float
    ) -> None:
        unit = max(float(seconds.sum()), fixed_seconds) / _TICKS
        ticks = np.rint(seconds / unit).astype(np.int64) if unit > 0 else np.zeros(len(seconds), dtype=np.int64)
        self._largest_sample = int(ticks.max())
        self.fixed_ticks = round(fixed_seconds / unit) if unit > 0 else 0
        self._sums: list[int] = [0, *np.cumsum(ticks).tolist()]
        self.total = self._sums[-1]
        self._num_samples = len(ticks)
        self._furthest = np.full(self._num_samples, self._num_samples, dtype=np.int64)
        for amounts, limit in ((work.patches, work.patches_limit), (work.tokens, work.tokens_limit)):
            if np.isfinite(limit):
                sums = np.concatenate([[0], np.cumsum(amounts[order])])
                room = int(limit * memory_share)
                self._furthest = np.minimum(self._furthest, np.searchsorted(sums, sums[:-1] + room, side="right") - 1)
        self.every_sample_fits = bool((self._furthest > np.arange(self._num_samples)).all())
        self._furthest_list: list[int] = self._furthest.tolist()

    def longest(self, largest: int) -> list[int]:
        """Ends of the fewest microbatches of at most that many ticks, which every sample must keep."""
        ends, start, sums = [], 0, self._sums
        while start < self._num_samples:
            start = min(bisect_right(sums, sums[start] + largest) - 1, self._furthest_list[start])
            ends.append(start)
        return ends

    def smallest_largest(self, count: int, *, at_least: int) -> int:
        """The smallest t_max in ticks, fixed part aside, that `count` microbatches can keep."""
        low, high = max(at_least, self._largest_sample, -(-self.total // count)), self.total
        while low < high:
            middle = (low + high) // 2
            if len(self.longest(middle)) <= count:
                high = middle
            else:
                low = middle + 1
        return high


def fastest_group_order(seconds: RankSeconds, microbatch: IntArray, count: int) -> IntArray:
    """[K] microbatches in the order of groups of similar time that finishes first; ties: the first order tried."""
    forward, backward = seconds.of_microbatches(microbatch, count)
    group = _group(np.column_stack([forward.mean(axis=0), backward.mean(axis=0)]))
    members = [np.flatnonzero(group == g) for g in np.unique(group)]
    columns = list(zip(forward.T.tolist(), backward.T.tolist(), strict=True))
    orders = [np.concatenate(groups) for groups in permutations(members)]
    finished = []
    for order in orders:
        pipeline = OneForwardOneBackward(len(forward))
        for index in order.tolist():
            pipeline.append(*columns[index])
        finished.append(pipeline.finish())
    return orders[int(np.argmin(finished))]


def _group(points: FloatArray) -> IntArray:
    """[K] k-means groups of [K, 2] points; it starts from quantiles of their sums, so nothing is random."""
    ranked = np.argsort(points.sum(axis=1), kind="stable")
    starts = [(2 * g + 1) * len(points) // (2 * _NUM_GROUPS) for g in range(_NUM_GROUPS)]
    centres = points[ranked[starts]]
    group = np.zeros(len(points), dtype=np.int64)
    for _ in range(_KMEANS_ROUNDS):
        group = ((points[:, None, :] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
        for g in np.unique(group):
            centres[g] = points[group == g].mean(axis=0)
    return group
