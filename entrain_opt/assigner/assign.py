"""From the costs of a global batch to an `Assignment`: split over replicas, then place each replica's samples.

A rank that needs its own replica only calls `split_replicas` and `place_replica`; the result is the same.
"""

from __future__ import annotations

import numpy as np

from entrain_opt.assigner.counts import choose_placement
from entrain_opt.assigner.registry import find_policy
from entrain_opt.assigner.settings import SearchSettings
from entrain_opt.assigner.work import Placement, SampleWork, sample_work
from entrain_opt.assignment import Assignment, BatchCosts, IntArray
from entrain_opt.errors import AssignmentError
from entrain_opt.plan import PipelineShape


def assign_microbatches(
    costs: BatchCosts,
    shape: PipelineShape,
    *,
    num_replicas: int = 1,
    num_microbatches: int | None = None,
    policy: str = "auto",
    schedule: str = "eager",
    effort: str = "default",
    seed: int = 0,
) -> Assignment:
    """Assign every sample of a global batch to a replica and a microbatch. Same inputs, same answer, on every rank.

    Args:
        costs: N samples with their media items.
        shape: the stages of one replica and its memory caps.
        num_replicas: data-parallel replicas. With fewer samples than replicas some get no microbatch.
        num_microbatches: the most per replica, unless the memory caps need more; fewer are used where there are fewer
            samples, by `pairwise` where one sample would dominate, and by `token_budget`, `dynapipe` and `dip` where
            that is their answer. None: chosen by estimated iteration time.
        policy: one of `POLICIES`: `auto` searches, `joint` levels both modules' loads, `pairwise` is Entrain's
            (arXiv 2605.27918, Algorithm 3); the others are for comparison, and each says in its module under `peers/`
            where it comes from.
        schedule: the order that will run the microbatches; policies that search play placements through under it.
        effort: how long they search: `fast`, `default` or `thorough`.
        seed: of their random moves.

    Returns:
        The assignment, checked: every microbatch of a replica has at least one sample.

    Raises:
        AssignmentError: unknown policy, schedule or effort, counts below 1, costs that do not match the shape, or a
            sample that alone exceeds a memory cap.
    """
    settings = SearchSettings(schedule=schedule, effort=effort, seed=seed)
    work = sample_work(costs, shape)
    replica = split_replicas(work, num_replicas=num_replicas, policy=policy)
    encoder_microbatch = np.full(costs.num_media, -1, dtype=np.int64)
    llm_microbatch = np.zeros(costs.num_samples, dtype=np.int64)
    counts = np.zeros(num_replicas, dtype=np.int64)
    replica_of_media = replica[costs.media_sample]
    for index in range(num_replicas):
        rows = np.flatnonzero(replica == index)
        if len(rows):
            placement = place_replica(
                work.take(rows), num_microbatches=num_microbatches, policy=policy, settings=settings
            )
            encoder_microbatch[replica_of_media == index] = placement.encoder_microbatch
            llm_microbatch[rows] = placement.llm_microbatch
            counts[index] = placement.num_microbatches
    assignment = Assignment(
        replica=replica,
        encoder_microbatch=encoder_microbatch,
        llm_microbatch=llm_microbatch,
        num_microbatches=counts,
        policy=policy,
    )
    assignment.check(costs, shape)
    return assignment


def split_replicas(work: SampleWork, *, num_replicas: int, policy: str) -> IntArray:
    """[N] replica of each sample of a global batch, after checking that every sample fits in memory."""
    chosen = find_policy(policy)
    _check_count("num_replicas", num_replicas)
    work.check()
    return chosen.split(work, num_replicas)


def place_replica(
    work: SampleWork, *, num_microbatches: int | None, policy: str, settings: SearchSettings | None = None
) -> Placement:
    """The placement of at least one sample of one replica; `settings` are for policies that search."""
    chosen, settings = find_policy(policy), settings or SearchSettings()
    settings.check()
    if num_microbatches is not None:
        _check_count("num_microbatches", num_microbatches)
    if chosen.search is not None:
        return chosen.search(work, num_microbatches, settings)
    assert chosen.place is not None
    if num_microbatches is None:
        return choose_placement(work, chosen.place)
    return chosen.place(work, num_microbatches)


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise AssignmentError(f"{name}: expected a whole number of at least 1, found {value!r}.")
