"""A schedule searched for one replica: the order in which microbatches enter, and what a free rank prefers.

1. Evaluate every fixed order, by playing it through with the predicted durations.
2. Evaluate the list scheduler under a few *styles* (backward or forward first, windowed or as far ahead as memory
   allows, split backward or not), then the better styles with a few microbatch orders: as given, small or large ones
   first, small ones at both ends (they fill and drain the pipeline fastest).
3. From the best, improve the order of the language-model microbatches by moves and swaps; a worse one is accepted now
   and then (simulated annealing), so that the search leaves local optima. Encoder units follow their consumers.

After the schedule searches of DIP/PipeWeaver (arXiv 2504.14145), with list scheduling as they use it, but an annealed
permutation in place of their tree search.

Promise: never slower than the best fixed order under the same predicted durations; memory limits kept; deterministic.
Price: `evaluations` runs of the list scheduler and the replay, about 12 us per action each; a count, never a clock.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np

from entrain_opt.assignment import BatchCosts
from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule.admission import Rule
from entrain_opt.schedule.dispatch import dispatch
from entrain_opt.schedule.durations import SlotSeconds, slot_seconds
from entrain_opt.schedule.graph import WorkGraph, split_slots, work_graph
from entrain_opt.schedule.orders import (
    FIXED_ORDERS,
    SPLITTING_ORDERS,
    ReplicaSchedule,
    fixed_order,
    memory_limits,
    sort_places,
    stage_depths,
    timed_ticks,
)
from entrain_opt.schedule.replay import replay
from entrain_opt.schedule.work import ReplicaWork

#: Start temperature of the annealing, as a part of the makespan; it falls to nothing by the end of the budget.
START_TEMPERATURE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class _Style:
    """What a free rank prefers."""

    first: str
    split: bool
    windowed: bool


def search_schedule(
    work: ReplicaWork,
    shape: PipelineShape,
    *,
    costs: BatchCosts | None,
    evaluations: int = 200,
    seed: int = 0,
    split_backward: bool = True,
) -> ReplicaSchedule:
    """Search for a faster order than the fixed ones.

    Args:
        work: the units of one replica.
        shape: its stages.
        costs: of the global batch.
        evaluations: how many schedules are made and played through, the fixed ones included (those always are).
        seed: of the random moves.
        split_backward: whether weight gradients may run on their own.

    Returns:
        The best schedule found, with the fixed order that came closest and the part of its makespan that was saved.

    Raises:
        ScheduleError: no costs, or a memory limit that makes progress impossible.
    """
    if costs is None:
        raise ScheduleError("costs: order 'search' needs the batch costs to compare schedules, found None.")
    graph = work_graph(work, shape)
    search = _Search(graph, costs, slot_seconds(graph, costs), evaluations, random.Random(seed))
    names = [name for name in FIXED_ORDERS if split_backward or name not in SPLITTING_ORDERS]
    spans = [search.try_orders(fixed_order(graph, name, costs, search.seconds)) for name in names]
    best_fixed = min(range(len(names)), key=spans.__getitem__)
    if graph.num_llm_units:
        search.improve(split_backward)
    before = spans[best_fixed]
    return ReplicaSchedule(
        compute=graph.actions(search.best_orders),
        order="search",
        best_fixed_order=names[best_fixed],
        gain=(before - search.best_span) / before if before > 0 else 0.0,
    )


class _Search:
    def __init__(
        self, graph: WorkGraph, costs: BatchCosts, seconds: SlotSeconds, evaluations: int, chance: random.Random
    ) -> None:
        self.graph, self.seconds, self.left, self.chance = graph, seconds, evaluations, chance
        self.limits, self.amounts = memory_limits(graph, costs)
        self.best_span = math.inf
        self.best_orders: list[list[int]] = []
        work = (seconds.forward + seconds.backward).tolist()
        self.size = [0.0] * graph.num_llm_units
        for stage in range(graph.shape.num_stages):
            encoder = graph.shape.encoder_of_stage(stage)
            for unit, slot in enumerate(graph.slots_of_stage(stage)):
                consumer = unit if encoder is None else graph.encoder_consumers[encoder][unit][0]
                self.size[consumer] += work[slot]

    def try_orders(self, orders: list[list[int]]) -> float:
        """Makespan of explicit orders, kept if the best so far."""
        self.left -= 1
        split = split_slots(orders, self.graph.num_slots)
        span = replay(self.graph, orders, self.seconds.operations(split), self.seconds.transfer).makespan_seconds
        if span < self.best_span:
            self.best_span, self.best_orders = span, orders
        return span

    def try_rule(self, style: _Style, llm_order: list[int]) -> float:
        rule = search_rule(self.graph, llm_order, first=style.first, split=style.split, windowed=style.windowed)
        durations, transfer = timed_ticks(self.seconds)
        orders = dispatch(
            self.graph, rule, durations=durations, transfer=transfer, limits=self.limits, amounts=self.amounts
        )
        return self.try_orders(orders)

    def improve(self, split_backward: bool) -> None:
        given = list(range(self.graph.num_llm_units))
        styles = [
            _Style(first=first, split=split, windowed=windowed)
            for split in ((False, True) if split_backward else (False,))
            for windowed in (False, True)
            for first in ("backward", "alternate", "forward")
        ]
        tried: list[tuple[float, int, _Style, list[int]]] = []

        def attempt(style: _Style, order: list[int]) -> None:
            if self.left > 0:
                tried.append((self.try_rule(style, order), len(tried), style, order))

        for style in styles:
            attempt(style, given)
        better = [style for _, _, style, _ in sorted(tried, key=lambda entry: entry[:2])[:2]]
        ascending = sorted(given, key=lambda unit: (self.size[unit], unit))
        ends_small = ascending[::2] + ascending[1::2][::-1]
        for order in (ascending, ascending[::-1], ends_small):
            for style in better:
                attempt(style, order)
        if tried:
            span, _, style, order = min(tried, key=lambda entry: entry[:2])
            self._anneal(style, order, span)

    def _anneal(self, style: _Style, order: list[int], span: float) -> None:
        budget = self.left
        while self.left > 0 and len(order) > 1:
            candidate = self._neighbour(order)
            temperature = START_TEMPERATURE * self.best_span * self.left / budget
            found = self.try_rule(style, candidate)
            if found <= span or self.chance.random() < math.exp((span - found) / max(temperature, 1e-300)):
                order, span = candidate, found

    def _neighbour(self, order: list[int]) -> list[int]:
        candidate = list(order)
        i, j = self.chance.sample(range(len(order)), 2)
        if self.chance.random() < 0.5:
            candidate[i], candidate[j] = candidate[j], candidate[i]
        else:
            candidate.insert(j, candidate.pop(i))
        return candidate


def search_rule(graph: WorkGraph, llm_order: list[int], *, first: str, split: bool, windowed: bool) -> Rule:
    """Priorities for a given order of the language-model microbatches; encoder units follow their first consumer."""
    shape = graph.shape
    turn_of_llm = [0] * len(llm_order)
    for turn, unit in enumerate(llm_order):
        turn_of_llm[unit] = turn
    encoder_turns = [[min(turn_of_llm[c] for c in row) for row in rows] for rows in graph.encoder_consumers]
    turns: list[int] = []
    for stage in range(shape.num_stages):
        encoder = shape.encoder_of_stage(stage)
        turns += turn_of_llm if encoder is None else encoder_turns[encoder]
    key = sort_places(np.array(turns, dtype=np.int64), -np.array(graph.slot_stage, dtype=np.int64))
    depths = stage_depths(shape)
    unlimited: list[int | None] = [None] * shape.num_stages
    return Rule(
        llm_order=llm_order,
        encoder_orders=[[unit for _, unit in sorted(zip(row, range(len(row)), strict=True))] for row in encoder_turns],
        forward_key=key,
        backward_key=key,
        depth=[*depths] if windowed else unlimited,
        entry_limit=unlimited,
        split=(split & (graph.backward_targets.sizes > 0)).tolist(),
        weight_limit=max(depths) if split and windowed else None,
        first=first,
    )
