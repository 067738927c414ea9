"""One replica played through: its operations, their durations and their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assignment import Assignment, BatchCosts, StageCosts
from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule.durations import SlotSeconds, slot_seconds
from entrain_opt.schedule.graph import WorkGraph, split_slots, work_graph
from entrain_opt.schedule.orders import FIXED_ORDERS, ReplicaSchedule, fixed_order, schedule_replica
from entrain_opt.schedule.replay import Replay, replay
from entrain_opt.schedule.work import replica_work

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRun:
    """What one replica ran and when.

    Attributes:
        graph: its work.
        orders: per rank, its operations in order.
        split: slots whose weight gradients ran on their own.
        seconds: durations of the slots.
        times: when each operation ran.
    """

    graph: WorkGraph
    orders: list[list[int]]
    split: set[int]
    seconds: SlotSeconds
    times: Replay


def run_replica(
    costs: BatchCosts,
    assignment: Assignment,
    shape: PipelineShape,
    replica: int,
    *,
    schedule: str | ReplicaSchedule,
    stages: StageCosts,
) -> ReplicaRun:
    """Play one replica through.

    Args:
        costs: of the global batch.
        assignment: which sample in which microbatch.
        shape: the stages of a replica.
        replica: which one.
        schedule: the name of an order, or a schedule made before from the same work.
        stages: `costs.stage_costs(shape)`.
    """
    work = replica_work(costs, assignment, shape, replica)
    graph = work_graph(work, shape)
    seconds = slot_seconds(graph, costs, stages)
    if isinstance(schedule, str) and schedule in FIXED_ORDERS:
        orders = fixed_order(graph, schedule, costs, seconds)
    else:
        if isinstance(schedule, str):
            schedule = schedule_replica(work, shape, order=schedule, costs=costs)
        orders = graph.operations(schedule.compute)
    split = split_slots(orders, graph.num_slots)
    times = replay(graph, orders, seconds.operations(split), seconds.transfer)
    return ReplicaRun(graph=graph, orders=orders, split=split, seconds=seconds, times=times)


def schedules_of_replicas(
    schedule: str | ReplicaSchedule | Sequence[ReplicaSchedule], num_replicas: int
) -> list[str | ReplicaSchedule]:
    """One schedule for each replica.

    Raises:
        ScheduleError: as many schedules as replicas were expected.
    """
    if isinstance(schedule, str):
        return [schedule] * num_replicas
    schedules: list[str | ReplicaSchedule] = [schedule] if isinstance(schedule, ReplicaSchedule) else list(schedule)
    if len(schedules) != num_replicas:
        raise ScheduleError(
            f"schedule: expected the name of an order or one schedule for each of {num_replicas} replicas, found "
            f"{len(schedules)}."
        )
    return schedules


def forward_edges(graph: WorkGraph) -> tuple[IntArray, IntArray]:
    """Source and target slots of every forward dependency, by source."""
    return graph.forward_targets.row_of_value, graph.forward_targets.values


def produced_seconds(run: ReplicaRun) -> FloatArray:
    """[3 * slots] when the last input of each operation had been computed, before any transfer."""
    graph, count = run.graph, run.graph.num_slots
    end = run.times.end
    source, target = forward_edges(graph)
    has_backward = np.asarray(graph.shape.has_backward, dtype=bool)[np.asarray(graph.slot_stage, dtype=np.int64)]
    produced = np.zeros(3 * count)
    np.maximum.at(produced, target, end[source])
    produced[count : 2 * count] = end[:count]
    returns = has_backward[source]
    np.maximum.at(produced, count + source[returns], end[count + target[returns]])
    produced[2 * count :] = end[count : 2 * count]
    return produced
