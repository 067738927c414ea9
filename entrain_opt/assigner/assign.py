"""From the costs of a global batch to an `Assignment`: split over replicas, then place each replica's samples.

A rank that needs its own replica only calls `assign_replica`; the result is the same, in a part of the time.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        effort: how long they search, one of `EFFORTS`.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaAssignment:
    """One replica's part of a global batch.

    Attributes:
        replica: [N] replica of every sample of the global batch.
        samples: positions in the global batch of this replica's samples, ascending; may be empty.
        costs: of these samples.
        assignment: of these samples, as a batch of one replica.
    """

    replica: IntArray
    samples: IntArray
    costs: BatchCosts
    assignment: Assignment


def assign_replica(
    costs: BatchCosts,
    shape: PipelineShape,
    *,
    replica: int,
    num_replicas: int,
    num_microbatches: int | None = None,
    policy: str = "auto",
    settings: SearchSettings | None = None,
) -> ReplicaAssignment:
    """Split a global batch over replicas, then place the samples of one of them only.

    Args:
        costs: of the global batch.
        shape: the stages of one replica and its memory caps.
        replica: which one, 0 to `num_replicas` - 1.
        num_replicas, num_microbatches, policy: see `assign_microbatches`, whose answer for this replica is the same.
        settings: of policies that search.

    Raises:
        AssignmentError: see `assign_microbatches`.
    """
    settings = settings or SearchSettings()
    settings.check()
    work = sample_work(costs, shape)
    split = split_replicas(work, num_replicas=num_replicas, policy=policy)
    samples = np.flatnonzero(split == replica)
    mine = costs.take(samples)
    encoder_microbatch = np.full(mine.num_media, -1, dtype=np.int64)
    llm_microbatch = np.zeros(len(samples), dtype=np.int64)
    count = 0
    if len(samples):
        placement = place_replica(
            work.take(samples), num_microbatches=num_microbatches, policy=policy, settings=settings
        )
        encoder_microbatch, llm_microbatch = placement.encoder_microbatch, placement.llm_microbatch
        count = placement.num_microbatches
    assignment = Assignment(
        replica=np.zeros(len(samples), dtype=np.int64),
        encoder_microbatch=encoder_microbatch,
        llm_microbatch=llm_microbatch,
        num_microbatches=np.array([count], dtype=np.int64),
        policy=policy,
    )
    assignment.check(mine, shape)
    return ReplicaAssignment(replica=split, samples=samples, costs=mine, assignment=assignment)


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
