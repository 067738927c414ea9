"""Proof that a schedule does the work: every action once, dependencies kept, memory limits kept."""

from __future__ import annotations

from collections import Counter

from entrain_opt.assignment import BatchCosts
from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule.actions import Backward, BackwardInput
from entrain_opt.schedule.graph import WorkGraph, split_slots, work_graph
from entrain_opt.schedule.memory import kept_amount
from entrain_opt.schedule.orders import ReplicaSchedule, memory_limits
from entrain_opt.schedule.replay import replay
from entrain_opt.schedule.work import ReplicaWork


def check_schedule(
    schedule: ReplicaSchedule, work: ReplicaWork, shape: PipelineShape, *, costs: BatchCosts | None = None
) -> None:
    """Raise ScheduleError unless the schedule can run and does exactly the work.

    Args:
        schedule: the compute actions of each rank.
        work: the units of the replica.
        shape: its stages.
        costs: of the global batch; needed if the shape has memory limits.
    """
    graph = work_graph(work, shape)
    if len(schedule.compute) != shape.num_ranks:
        raise ScheduleError(f"schedule: expected {shape.num_ranks} ranks, found {len(schedule.compute)}.")
    orders = graph.operations(schedule.compute)
    split = split_slots(orders, graph.num_slots)
    _check_counts(graph, orders, split)
    for actions, order in zip(schedule.compute, orders, strict=True):
        for action, operation in zip(actions, order, strict=True):
            wrong = BackwardInput if operation - graph.num_slots not in split else Backward
            if isinstance(action, wrong):
                raise ScheduleError(
                    f"schedule: found {action}, but its weight gradients {'do not ' if wrong is BackwardInput else ''}"
                    f"run on their own. Use Backward, or BackwardInput with one BackwardWeight."
                )
    replay(graph, orders, [1.0] * (3 * graph.num_slots), [0.0] * graph.num_slots)
    _check_memory(graph, orders, split, costs)


def _check_counts(graph: WorkGraph, orders: list[list[int]], split: set[int]) -> None:
    found = Counter(operation for order in orders for operation in order)
    expected = set(range(graph.num_slots))
    for slot, stage in enumerate(graph.slot_stage):
        if graph.shape.has_backward[stage]:
            expected.add(graph.num_slots + slot)
    expected |= {2 * graph.num_slots + slot for slot in split if graph.num_slots + slot in expected}
    for operation in sorted(expected | set(found)):
        times = int(operation in expected)
        if found[operation] != times:
            raise ScheduleError(
                f"schedule: expected {graph.action(operation)} {times} times, found {found[operation]} times."
            )


def _check_memory(graph: WorkGraph, orders: list[list[int]], split: set[int], costs: BatchCosts | None) -> None:
    limits, amounts = memory_limits(graph, costs)
    count = graph.num_slots
    for order in orders:
        held = dict.fromkeys(range(graph.shape.num_stages), 0)
        units = dict.fromkeys(range(graph.shape.num_stages), 0)
        for operation in order:
            kind, slot = divmod(operation, count)
            stage = graph.slot_stage[slot]
            limit = limits[stage]
            if limit is None:
                continue
            is_split = slot in split
            kept = kept_amount(amounts[slot]) if is_split else 0
            if kind == 0:
                held[stage] += amounts[slot]
                units[stage] += 1
                # One unit alone may exceed the limit, but not to split its backward.
                may_exceed = units[stage] == 1
            elif kind == 1 and is_split:
                held[stage] += kept
                may_exceed = False
            else:
                held[stage] -= amounts[slot] + kept
                units[stage] -= 1
                may_exceed = True
            if held[stage] > limit and not may_exceed:
                name = "patches" if stage < graph.shape.num_encoder_stages else "tokens"
                raise ScheduleError(
                    f"{name}_in_flight: stage {stage} holds {held[stage]} {name} when it starts "
                    f"{graph.action(operation, split=is_split)}, the limit is {limit}."
                )
