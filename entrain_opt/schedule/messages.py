"""From compute orders to complete schedules: messages between ranks, gradient reduction, optimizer steps.

A `Send` stands right behind the action that produces its message, so a rank sends in the order in which it computes.
The receiver takes its messages from one rank and of one direction (activations or gradients) in just that order: both
ends derive it from the same lists, so nothing is negotiated. A `Receive` stands `lookahead` compute actions before its
message is needed (or earlier, where a message behind it on the same edge is needed sooner), so that the transfer
overlaps compute. Sends and receives are non-blocking; the action that needs a message waits for it.

Each unit of work crosses an edge once, even if several microbatches consume it. Reductions of one rank always run in
the same order, last stage first, on every replica, and must not block either: each replica reaches them when it can.
"""

from __future__ import annotations

from collections.abc import Sequence

from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule.actions import Action, Message, Receive, Reduce, Send, Step
from entrain_opt.schedule.graph import WorkGraph, work_graph
from entrain_opt.schedule.orders import ReplicaSchedule
from entrain_opt.schedule.work import ReplicaWork

Edge = tuple[int, int, bool]


def with_messages(
    schedule: ReplicaSchedule,
    work: ReplicaWork,
    shape: PipelineShape,
    *,
    trained_stages: Sequence[bool] | None = None,
    lookahead: int = 1,
) -> tuple[tuple[Action, ...], ...]:
    """Everything each rank of a replica does in one iteration, in order.

    Args:
        schedule: the compute actions of each rank.
        work: the units of the replica that the schedule was made from.
        shape: its stages.
        trained_stages: which stages hold trained weights; None takes those that run a backward pass.
        lookahead: compute actions between posting a receive and needing it; 0 posts it just in time.

    Raises:
        ScheduleError: the schedule runs something that is not part of the work, or a stage without a backward trains.
    """
    if lookahead < 0:
        raise ScheduleError(f"lookahead: expected at least 0, found {lookahead}.")
    trained = tuple(shape.has_backward if trained_stages is None else trained_stages)
    if len(trained) != shape.num_stages:
        raise ScheduleError(f"trained_stages: expected {shape.num_stages} values, found {len(trained)}.")
    for stage in range(shape.num_stages):
        if trained[stage] and not shape.has_backward[stage]:
            raise ScheduleError(f"trained_stages[{stage}]: expected False, because the stage runs no backward.")
    graph = work_graph(work, shape)
    orders = graph.operations(schedule.compute)
    sends, edges = _sends(graph, orders)
    receives = _receives(graph, orders, edges, lookahead)
    lists: list[tuple[Action, ...]] = []
    for rank, order in enumerate(orders):
        reductions = _reductions(graph, order, shape, rank, trained)
        actions: list[Action] = []
        for place, operation in enumerate(order):
            actions += [Receive(message) for message in receives[rank].get(place, ())]
            actions.append(schedule.compute[rank][place])
            actions += [Send(message) for message in sends.get(operation, ())]
            actions += [Reduce(stage) for stage in reductions.get(place, ())]
        actions += [Reduce(stage) for stage in reductions.get(len(order), ())]
        actions += [Step(stage) for stage in shape.stages_of_rank(rank) if trained[stage]]
        lists.append(tuple(actions))
    return tuple(lists)


def _sends(
    graph: WorkGraph, orders: list[list[int]]
) -> tuple[dict[int, list[Message]], dict[Edge, list[tuple[Message, list[int]]]]]:
    """Messages behind each operation; per edge, in sending order, each message and the operations that need it."""
    count = graph.num_slots
    sends: dict[int, list[Message]] = {}
    edges: dict[Edge, list[tuple[Message, list[int]]]] = {}

    def send(operation: int, source: int, target: int, unit: int, needed_by: list[int]) -> None:
        message = Message(
            source_stage=graph.slot_stage[source],
            target_stage=graph.slot_stage[target],
            microbatch=graph.slot_microbatch[unit],
            part=graph.slot_part[unit],
        )
        edge = (graph.slot_rank[source], graph.slot_rank[target], operation < count)
        sends.setdefault(operation, []).append(message)
        edges.setdefault(edge, []).append((message, needed_by))

    for rank, order in enumerate(orders):
        for operation in order:
            kind, slot = divmod(operation, count)
            targets = graph.forward_targets[slot]
            if kind == 0 and targets and graph.slot_rank[targets[0]] != rank:
                send(operation, slot, targets[0], slot, targets)
            elif kind == 1:
                for target in graph.backward_targets[slot]:
                    if graph.slot_rank[target] != rank:
                        send(operation, slot, target, target, [count + target])
    return sends, edges


def _receives(
    graph: WorkGraph, orders: list[list[int]], edges: dict[Edge, list[tuple[Message, list[int]]]], lookahead: int
) -> list[dict[int, list[Message]]]:
    """Per rank: the messages to post before the compute action at each place."""
    place = {operation: i for order in orders for i, operation in enumerate(order)}
    posted: list[list[tuple[int, int, Edge, int, Message]]] = [[] for _ in orders]
    for edge in sorted(edges):
        queue = edges[edge]
        latest = len(orders[edge[1]])
        for i in range(len(queue) - 1, -1, -1):
            message, needed_by = queue[i]
            use = min(place[operation] for operation in needed_by)
            latest = min(latest, max(0, use - lookahead))
            posted[edge[1]].append((latest, i, edge, use, message))
    receives: list[dict[int, list[Message]]] = []
    for entries in posted:
        at: dict[int, list[Message]] = {}
        for latest, _, _, _, message in sorted(entries, key=lambda entry: entry[:3]):
            at.setdefault(latest, []).append(message)
        receives.append(at)
    return receives


def _reductions(
    graph: WorkGraph, order: list[int], shape: PipelineShape, rank: int, trained: tuple[bool, ...]
) -> dict[int, list[int]]:
    """Place of the compute action behind which each trained stage of a rank is reduced, last stage first."""
    last_place = dict.fromkeys(shape.stages_of_rank(rank), -1)
    for place, operation in enumerate(order):
        if operation >= graph.num_slots:
            last_place[graph.slot_stage[operation % graph.num_slots]] = place
    reductions: dict[int, list[int]] = {}
    reached = -1
    for stage in sorted(last_place, reverse=True):
        if trained[stage]:
            # A stage without work in this replica still takes part; it has nothing to wait for, but must not overtake.
            reached = max(reached, last_place[stage]) if last_place[stage] >= 0 else len(order)
            reductions.setdefault(reached, []).append(stage)
    return reductions
