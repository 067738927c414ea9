"""From the rows of a global batch to what one rank runs: its replica's samples, units, actions and their seconds.

Torch-free in itself. Every rank splits the global batch over the replicas and then places its own replica only, so the
price does not grow with the number of replicas. `Agreement` holds hashes that ranks compare once per step: of the
split, which all share, and of the placement, which the ranks of one replica share.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner import assign_replica
from entrain_opt.assigner.assign import ReplicaAssignment
from entrain_opt.assigner.settings import SearchSettings
from entrain_opt.assigner.statistics import assignment_statistics
from entrain_opt.assignment import BatchCosts
from entrain_opt.plan import Plan
from entrain_opt.schedule.actions import Action, Compute
from entrain_opt.schedule.messages import with_messages
from entrain_opt.schedule.orders import schedule_replica
from entrain_opt.schedule.work import ReplicaWork, replica_work
from entrain_opt.simulator import Timeline, simulate
from entrain_opt.spec.model import ModelSpec
from entrain_opt.workload.samples import SampleTable

StageUnit = tuple[int, int, int]
"""(stage, microbatch, part)"""


class CostSource(Protocol):
    """What a rank asks of a cost model."""

    @property
    def model(self) -> ModelSpec: ...

    def batch_costs(self, samples: SampleTable, plan: Plan) -> BatchCosts: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Hashes of what ranks must have in common, 48 bits each.

    Attributes:
        split: of samples, plan and their split over the replicas: equal on every rank.
        placement: of the microbatches: equal on the ranks of one replica.
        replica, num_replicas: which replica.
    """

    split: int
    placement: int
    replica: int
    num_replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSeconds:
    """Predicted seconds of what one replica does.

    Attributes:
        compute: of every forward and backward.
        transfer: per unit, of its output to another rank, or of the gradient back.
        reduce, step: per stage, of the gradient reduction and the optimizer step.
    """

    compute: Mapping[Compute, float]
    transfer: Mapping[StageUnit, float]
    reduce: tuple[float, ...]
    step: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """One global batch, as one rank plans it.

    Attributes:
        samples: positions in the global batch of the replica's samples, to which all indices of `work` refer.
        work: the replica's units.
        actions: this rank's schedule with messages.
        seconds: predicted, of the replica's actions.
        predicted_seconds: of the iteration, from this replica's point of view: the slowest replica decides.
        timeline: of this replica as simulated, from which both are.
        num_deferred: samples of this replica whose language-model part waits.
        encoder_imbalance, llm_imbalance: largest over mean microbatch seconds of this replica.
        assigner_seconds: time spent to assign, schedule and predict.
        agreement: to be compared between ranks.
    """

    samples: NDArray[np.int64]
    work: ReplicaWork
    actions: tuple[Action, ...]
    seconds: ActionSeconds
    predicted_seconds: float
    timeline: Timeline
    num_deferred: int
    encoder_imbalance: float
    llm_imbalance: float
    assigner_seconds: float
    agreement: Agreement


def plan_rank(table: SampleTable, costs: CostSource, plan: Plan, *, replica: int, pipeline_rank: int) -> RankWork:
    """Assign, schedule and predict the part of one rank.

    Args:
        table: the global batch, in the order drawn.
        costs: the same on every rank.
        plan: likewise.
        replica, pipeline_rank: where this rank stands.

    Raises:
        AssignmentError: a sample does not fit in memory.
    """
    started = time.perf_counter()
    shape = plan.pipeline_shape
    mine = assign_replica(
        costs.batch_costs(table, plan),
        shape,
        replica=replica,
        num_replicas=plan.degrees.data,
        num_microbatches=plan.num_microbatches,
        policy=plan.policy,
        settings=SearchSettings(schedule=plan.schedule),
    )
    work = replica_work(mine.costs, mine.assignment, shape, 0)
    schedule = schedule_replica(work, shape, order=plan.schedule, costs=mine.costs)
    actions = with_messages(schedule, work, shape)[pipeline_rank]
    timeline = simulate(mine.costs, mine.assignment, shape, schedule=schedule)
    spread = assignment_statistics(mine.costs, mine.assignment, shape)
    return RankWork(
        samples=mine.samples,
        work=work,
        actions=actions,
        seconds=_action_seconds(timeline, mine.costs),
        predicted_seconds=timeline.makespan_seconds,
        timeline=timeline,
        num_deferred=spread.deferred_samples,
        encoder_imbalance=spread.encoder.max_over_mean,
        llm_imbalance=spread.llm.max_over_mean,
        agreement=_agreement(table, mine, plan, replica),
        assigner_seconds=time.perf_counter() - started,
    )


def _action_seconds(timeline: Timeline, costs: BatchCosts) -> ActionSeconds:
    run, shape = timeline.runs[0], timeline.shape
    graph, stages = run.graph, costs.stage_costs(shape)
    seconds = run.seconds.operations(run.split).tolist()
    units = zip(graph.slot_stage, graph.slot_microbatch, graph.slot_part, strict=True)
    zeros = (0.0,) * shape.num_stages
    return ActionSeconds(
        compute={
            graph.action(operation, split=operation - graph.num_slots in run.split): seconds[operation]
            for order in run.orders
            for operation in order
        },
        transfer=dict(zip(units, run.seconds.transfer.tolist(), strict=True)),
        reduce=tuple(stages.reduce_seconds or zeros),
        step=tuple(stages.step_seconds or zeros),
    )


def _agreement(table: SampleTable, mine: ReplicaAssignment, plan: Plan, replica: int) -> Agreement:
    split = hashlib.sha256(repr((plan, table.sample_ids.tolist())).encode())
    split.update(np.ascontiguousarray(mine.replica, dtype=np.int64).tobytes())
    placement = split.copy()
    for values in (mine.assignment.encoder_microbatch, mine.assignment.llm_microbatch):
        placement.update(np.ascontiguousarray(values, dtype=np.int64).tobytes())
    return Agreement(
        split=int.from_bytes(split.digest()[:6], "little"),
        placement=int.from_bytes(placement.digest()[:6], "little"),
        replica=replica,
        num_replicas=plan.degrees.data,
    )
