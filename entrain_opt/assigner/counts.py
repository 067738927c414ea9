"""How many microbatches, where the caller leaves it open.

The policy is run at a few counts from one to eight microbatches per pipeline rank, and the answer with the least
estimated iteration time is kept (ties: the fewest microbatches):

    T = sum of all stages' mean seconds + sum over microbatches of the slowest rank's seconds - the mean of that

which is the paper's Eq. 2 (all stages once, plus K - 1 times the slowest stage) with microbatches that differ, and
never less than the largest microbatch takes through all stages. It serves to rank counts: on one batch each of three
traces and one synthetic set (8 stages, 8 to 64 microbatches, three policies) it was within about 20 % of the simulated
`eager` schedule, too low and too high; `1f1b` suffers more from uneven microbatches than it says.

More microbatches shorten the first part, but pay the fixed seconds of each stage more often and balance worse. Where a
memory cap admits fewer microbatches in flight than a stage needs to stay busy, the second part is stretched by that
ratio.
Price: one call of the policy per count, six or fewer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from entrain_opt.assigner.work import Placement, SampleWork
from entrain_opt.assignment import FloatArray, IntArray

#: Counts that are tried, as multiples of the pipeline ranks.
_MULTIPLES = (1, 2, 3, 4, 6, 8)


def choose_placement(work: SampleWork, place: Callable[[SampleWork, int], Placement]) -> Placement:
    """The best placement that a policy finds over several counts of microbatches.

    Args:
        work: N >= 1 samples of one replica.
        place: a policy for one replica and a given count.
    """
    ranks, fewest = work.shape.num_ranks, work.fewest_microbatches()
    counts = sorted({min(max(ranks * multiple, fewest), work.num_samples) for multiple in _MULTIPLES})
    placements = []
    for count in counts:
        placements.append(place(work, count))
        if placements[-1].num_microbatches < count:
            break  # the policy has no use for more
    seconds = [estimate_iteration_seconds(work, placement) for placement in placements]
    return placements[int(np.argmin(seconds))]


def estimate_iteration_seconds(work: SampleWork, placement: Placement) -> float:
    """Iteration time of one replica by the closed form above; no schedule is simulated."""
    shape, costs, count = work.shape, work.costs.stage_costs(work.shape), placement.num_microbatches
    encoder = work.media_stage_seconds @ _one_hot(placement.encoder_microbatch, count)
    llm = work.llm_stage_seconds @ _one_hot(placement.llm_microbatch, count)
    fixed = (
        np.array(costs.forward_fixed_seconds) + np.array(costs.backward_fixed_seconds) + 2 * costs.send_fixed_seconds
    )
    stage_seconds = np.concatenate([encoder, llm]) + fixed[:, None]  # [stages, K]
    rank_seconds = np.zeros((shape.num_ranks, count))
    np.add.at(rank_seconds, np.array(shape.ranks_of_stages), stage_seconds)
    slowest = rank_seconds.max(axis=0)
    fill = stage_seconds.mean(axis=1).sum() - slowest.mean()
    latency = stage_seconds.sum(axis=0).max()
    return float(max(max(fill, 0.0) + slowest.sum() * _stretch(work, count), latency))


def _stretch(work: SampleWork, count: int) -> float:
    """How much longer the steady phase takes because memory admits too few microbatches in flight."""
    shape = work.shape
    stretch = 1.0
    needs = [(work.tokens, shape.tokens_limit, shape.llm_stages)]
    if shape.any_encoder_has_backward:
        needs.append((work.patches, shape.patches_limit, max(shape.encoder_stage_counts) + shape.llm_stages))
    for amounts, limit, depth in needs:
        if limit and amounts.any():
            in_flight = max(limit * count / float(amounts.sum()), 1.0)
            stretch = max(stretch, min(depth, count) / in_flight)
    return stretch


def _one_hot(microbatch: IntArray, count: int) -> FloatArray:
    """[items, K]; items at -1 have a row of zeros."""
    return (microbatch[:, None] == np.arange(count)).astype(np.float64)
