"""Who runs what in which order: the named orders.

- `1f1b`: a ready backward goes first, but not twice in a row while a forward may run; a stage holds as many
  microbatches as stages follow it in its path (itself included), so an encoder's depth counts the language model's.
  Uniform: the textbook order, (K + P - 1)(f + b).
- `gpipe`: every forward of a rank, then its backwards. With memory limits, backwards start where memory ends.
- `eager`: like 1f1b, but as many forwards ahead as the memory in tokens and patches allows.
- `eager_split`: like eager, and a backward is split where its gradients go to a rank that has no other backward to run.
  Most of what zero_bubble gains with a part of its splits, for splitting a backward costs time.
- `interleaved`: for several stages (chunks) of a rank; microbatches enter in groups of one per rank, all chunks of a
  group before the next group. Uniform: K(f + b) + (P - 1)(f + b) / chunks.
- `zero_bubble`: the backward is split, and weight gradients fill the time in which a rank would wait. Uniform with
  equal forward, input and weight parts: 3 K f + (P - 1) f; no stage holds more microbatches than the first in 1f1b.
  Where memory is limited, it goes as far ahead as memory allows instead, and a backward is split only where there is
  room for the gradients that this keeps.
- `search`: the list scheduler's priorities improved by a search (search.py); never slower than the others.

All come from one list scheduler (dispatch.py) and differ in priorities and limits only. `eager`, `eager_split` and
`zero_bubble` follow the predicted durations when costs are given; the others count a microbatch as equally long on
every rank (`even_ticks`), so their orders do not depend on the costs (only the memory limits do).

Promise: every action once, dependencies and memory limits kept, no deadlock, same inputs, same answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assignment import BatchCosts
from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule.actions import Compute
from entrain_opt.schedule.admission import Rule
from entrain_opt.schedule.dispatch import dispatch
from entrain_opt.schedule.durations import SlotSeconds, slot_seconds, to_ticks
from entrain_opt.schedule.graph import WorkGraph, slot_amounts, work_graph
from entrain_opt.schedule.work import ReplicaWork

IntArray = NDArray[np.int64]

FIXED_ORDERS = ("1f1b", "gpipe", "eager", "eager_split", "interleaved", "zero_bubble")
ORDERS = (*FIXED_ORDERS, "search")
#: Orders that run weight gradients on their own.
SPLITTING_ORDERS = ("eager_split", "zero_bubble")
#: Orders that follow the predicted durations.
TIMED_ORDERS = ("eager", *SPLITTING_ORDERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSchedule:
    """What each pipeline rank of one replica computes, in order.

    Attributes:
        compute: per rank, its compute actions.
        order: the name of the order that made it.
        best_fixed_order: for `search`, the best of the fixed orders.
        gain: for `search`, the part of that order's makespan that the search saved.
    """

    compute: tuple[tuple[Compute, ...], ...]
    order: str
    best_fixed_order: str = ""
    gain: float = 0.0


def schedule_replica(
    work: ReplicaWork, shape: PipelineShape, *, order: str, costs: BatchCosts | None = None
) -> ReplicaSchedule:
    """The order in which each rank of a replica runs its actions.

    Args:
        work: the units of one replica.
        shape: its stages.
        order: one of `ORDERS`.
        costs: of the global batch; needed for memory limits and for `search`.

    Raises:
        ScheduleError: an unknown order, missing costs, or a memory limit that makes progress impossible.
    """
    if order not in ORDERS:
        raise ScheduleError(f"order: expected one of {list(ORDERS)}, found {order!r}.")
    if order == "search":
        from entrain_opt.schedule.search import search_schedule

        return search_schedule(work, shape, costs=costs)
    graph = work_graph(work, shape)
    return ReplicaSchedule(compute=graph.actions(fixed_order(graph, order, costs)), order=order)


def fixed_order(
    graph: WorkGraph, order: str, costs: BatchCosts | None, seconds: SlotSeconds | None = None
) -> list[list[int]]:
    """Operations of each rank under one of `FIXED_ORDERS`; `seconds` saves computing them from the costs again."""
    rule = fixed_rule(graph, order)
    limits, amounts = memory_limits(graph, costs)
    if order in TIMED_ORDERS and (seconds is not None or costs is not None):
        durations, transfer = timed_ticks(seconds or slot_seconds(graph, costs))  # type: ignore[arg-type]
    else:
        even = np.array(even_ticks(graph.shape))[graph.slot_stage]
        durations = np.concatenate([even, 2 * even if order in SPLITTING_ORDERS else even, even, even])
        transfer = np.zeros(graph.num_slots, dtype=np.int64)
    return dispatch(graph, rule, durations=durations, transfer=transfer, limits=limits, amounts=amounts)


def timed_ticks(seconds: SlotSeconds) -> tuple[IntArray, IntArray]:
    """Ticks of each operation and transfer for the list scheduler."""
    operations = seconds.choices()
    longest = float(max(operations.max(initial=0.0), seconds.transfer.max(initial=0.0)))
    return to_ticks(operations, longest), to_ticks(seconds.transfer, longest)


def memory_limits(graph: WorkGraph, costs: BatchCosts | None) -> tuple[list[int | None], list[int]]:
    """Per stage, what it may hold (None: unlimited, or it holds nothing for a backward); per slot, what it holds.

    Raises:
        ScheduleError: the shape has limits but there are no costs to count patches and tokens.
    """
    shape = graph.shape
    limits = [limit if has else None for limit, has in zip(shape.stage_limits, shape.has_backward, strict=True)]
    if all(limit is None for limit in limits):
        return limits, [1] * graph.num_slots
    if costs is None:
        raise ScheduleError(
            "costs: expected the batch costs, because the shape limits patches_in_flight or tokens_in_flight and only "
            "the costs say how many a microbatch has; found None."
        )
    return limits, slot_amounts(graph, costs)


def even_ticks(shape: PipelineShape) -> list[int]:
    """Per stage, ticks of an operation where no rank takes longer for a microbatch than one with a single stage.

    Counted as equally long, the operations of a rank with several stages would seem to hold up all others, which then
    would hold too few microbatches.
    """
    passes = [0] * shape.num_ranks
    for rank, has_backward in zip(shape.ranks_of_stages, shape.has_backward, strict=True):
        passes[rank] += 1 + has_backward
    common = math.lcm(*(max(count, 2) for count in passes))
    return [common // max(passes[rank], 2) for rank in shape.ranks_of_stages]


def stage_depths(shape: PipelineShape) -> list[int]:
    """Per stage: stages from it to the end of its path, itself included."""
    depths = [0] * shape.num_stages
    for encoder in range(shape.num_encoders):
        stages = shape.stages_of_encoder(encoder)
        for stage in stages:
            depths[stage] = stages[-1] - stage + 1 + shape.llm_stages
    for stage in shape.stages_of_llm:
        depths[stage] = shape.num_stages - stage
    return depths


def default_turns(graph: WorkGraph) -> IntArray:
    """[slots] place of each slot's microbatch among all microbatches that have any unit."""
    return np.unique(np.array(graph.slot_microbatch, dtype=np.int64), return_inverse=True)[1]


def fixed_rule(graph: WorkGraph, order: str) -> Rule:
    """Priorities and limits of one of `FIXED_ORDERS`."""
    shape = graph.shape
    depths: list[int | None] = [*stage_depths(shape)]
    unlimited: list[int | None] = [None] * shape.num_stages
    turns, stages = default_turns(graph), np.array(graph.slot_stage, dtype=np.int64)
    # Earliest microbatch first; among equals, the stage nearer to the loss.
    forward_key = sort_places(turns, -stages)
    backward_key = forward_key
    entry_limit = [*unlimited]
    if order == "interleaved" and shape.num_ranks < shape.num_stages:
        group = shape.num_ranks
        chunks = [shape.stages_of_rank(shape.ranks_of_stages[s]).index(s) for s in range(shape.num_stages)]
        chunk = np.array(chunks)[stages]
        forward_key = sort_places(turns // group, chunk, turns % group)
        backward_key = sort_places(turns // group, -chunk, turns % group)
        entry_limit = _entry_limits(shape)
    split = order in SPLITTING_ORDERS
    unwindowed = order in ("gpipe", "eager", "eager_split") or (split and None not in shape.stage_limits)
    return Rule(
        llm_order=list(range(graph.num_llm_units)),
        encoder_orders=[list(range(len(rows))) for rows in graph.encoder_consumers],
        forward_key=forward_key,
        backward_key=backward_key,
        depth=unlimited if unwindowed else depths,
        entry_limit=entry_limit,
        split=(split & (graph.backward_targets.sizes > 0)).tolist(),
        split_for_waiting=order == "eager_split",
        weight_limit=max(stage_depths(shape)) if split and not unwindowed else None,
        first="forward" if order == "gpipe" else "alternate",
        phases=order == "gpipe",
    )


def _entry_limits(shape: PipelineShape) -> list[int | None]:
    """Units that the chunks of a module on a rank may hold together: the pipeline's depth and one group per chunk.

    An encoder's chunks also wait for those of the language model on their rank.
    """
    limits: list[int | None] = [None] * shape.num_stages
    for rank in range(shape.num_ranks):
        mine = shape.stages_of_rank(rank)
        for stage in mine:
            encoder = shape.encoder_of_stage(stage)
            chunks = [s for s in mine if shape.encoder_of_stage(s) == encoder]
            following = sum(s in shape.stages_of_llm for s in mine) if encoder is not None else 0
            if stage == chunks[0]:
                limits[stage] = 2 * (shape.num_ranks - rank - 1) + (len(chunks) + following - 1) * shape.num_ranks + 1
    return limits


def sort_places(*keys: IntArray) -> list[int]:
    """Place of each entry when sorted by the first key, then by the next ones; ties keep their order."""
    places = np.empty(len(keys[0]), dtype=np.int64)
    places[np.lexsort(keys[::-1])] = np.arange(len(places))
    return list(places.tolist())
