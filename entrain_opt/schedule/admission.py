"""What may start: how far a stage may work ahead, and what its memory holds.

- *Window*: a language-model stage has at most `depth` microbatches in flight. An encoder stage runs forwards only for
  its `depth` oldest unfinished language-model microbatches, and for units that stand before those in its order. The
  units of the oldest one are always inside, so deferral, which makes a microbatch wait for a later encoder forward,
  cannot lock the pipeline as a fixed warm-up count would.
- *Chunks*: where a rank holds several stages of a module, a limit on what is in flight in all of them is asked at the
  first one only; what has entered may go on.
- *Memory*: a stage never holds more than its limit, except for one unit alone. At the first trained stage of an
  encoder a unit is admitted only if, afterwards, the unfinished language-model microbatches can still be completed one
  after the other in order (the banker's algorithm); later stages of that encoder hold a subset of what it holds.
  A language-model stage needs no such care: what it holds always runs on to the loss and comes back.

Price: O(1) per question, O(microbatches in flight) where an encoder has a memory limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrain_opt.errors import ScheduleError
from entrain_opt.schedule.graph import WorkGraph

ADMITTED, OUTSIDE_WINDOW, NO_MEMORY = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Who goes first, and how far ahead.

    Attributes:
        llm_order: language-model units (by position) in the order they should run.
        encoder_orders: per encoder, its units (by position) in the order they should run.
        forward_key, backward_key: [slots] among what is ready on a rank, the lowest key runs first. Within a stage
            `forward_key` follows the orders above.
        depth: per stage, the language-model microbatches it may work ahead; None is unlimited.
        entry_limit: per stage, units of its module in flight on its rank above which none may enter this stage; None
            is unlimited. Only for the first stage of a module on a rank.
        split: [slots] whose weight gradients run on their own, when nothing else can.
        weight_limit: units per stage in flight until their weight gradients are done; None is unlimited.
        first: of a ready backward and a ready forward, which goes first: "backward", "forward", or "alternate" (a
            backward, unless the rank ran one last).
        phases: no backward on a rank before all of its forwards (only without memory limits).
    """

    llm_order: list[int]
    encoder_orders: list[list[int]]
    forward_key: list[int]
    backward_key: list[int]
    depth: list[int | None]
    entry_limit: list[int | None]
    split: list[bool]
    weight_limit: int | None = None
    first: str = "alternate"
    phases: bool = False


def check_limits(graph: WorkGraph, limits: list[int | None], amounts: list[int]) -> None:
    """Raise ScheduleError if a limit makes progress impossible, naming the least that would do."""
    for encoder in range(graph.shape.num_encoders):
        for stage in graph.shape.stages_of_encoder(encoder):
            limit = limits[stage]
            if limit is None:
                continue
            least, worst = limit, -1
            for llm, sources in enumerate(graph.llm_sources):
                mine = [amounts[graph.stage_first[stage] + unit] for e, unit in sources if e == encoder]
                if len(mine) > 1 and sum(mine) > least:
                    least, worst = sum(mine), llm
            if worst >= 0:
                microbatch = graph.slot_microbatch[graph.stage_first[-2] + worst]
                raise ScheduleError(
                    f"patches_in_flight: stage {stage} may hold {limit} patches, but language-model microbatch "
                    f"{microbatch} needs several encoder units in flight together. Allow at least {least} patches, or "
                    f"defer less into one microbatch."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Module:
    """The units of one encoder (or of the language model) in the order they should run.

    A *turn* is a language-model microbatch that needs this module, counted in running order.
    """

    position: list[int]
    """Per unit: its place in the order."""
    turns: list[list[int]]
    """Per unit: the turns that need it."""
    units: list[list[int]]
    """Per turn: the units it needs."""
    reach: list[int]
    """Per turn: the highest position that must run to serve it and all turns before."""
    turn_of_llm: dict[int, int]


def _module(order: list[int], consumers: list[tuple[int, ...]], llm_order: list[int]) -> _Module:
    position = [0] * len(order)
    for place, unit in enumerate(order):
        position[unit] = place
    present = {c for row in consumers for c in row}
    turn_of_llm = {llm: turn for turn, llm in enumerate(llm for llm in llm_order if llm in present)}
    turns = [sorted(turn_of_llm[c] for c in row) for row in consumers]
    units: list[list[int]] = [[] for _ in turn_of_llm]
    for unit in order:
        for turn in turns[unit]:
            units[turn].append(unit)
    reach, highest = [], -1
    for row in units:
        highest = max(highest, max(position[unit] for unit in row))
        reach.append(highest)
    return _Module(position=position, turns=turns, units=units, reach=reach, turn_of_llm=turn_of_llm)


class Admission:
    """Mutable state of one run of the list scheduler."""

    def __init__(self, graph: WorkGraph, rule: Rule, limits: list[int | None], amounts: list[int]) -> None:
        shape = graph.shape
        check_limits(graph, limits, amounts)
        self.rule, self.limits, self.amounts, self.first = rule, limits, amounts, graph.stage_first
        modules = [
            _module(order, list(graph.encoder_consumers[e]), rule.llm_order)
            for e, order in enumerate(rule.encoder_orders)
        ]
        modules.append(_module(rule.llm_order, [(u,) for u in range(graph.num_llm_units)], rule.llm_order))
        encoders = [shape.encoder_of_stage(stage) for stage in range(shape.num_stages)]
        self.modules = [modules[-1] if e is None else modules[e] for e in encoders]
        self.first_llm = shape.num_encoder_stages
        groups = list(zip(shape.ranks_of_stages, encoders, strict=True))
        self.group = [groups.index(group) for group in groups]
        stages = range(shape.num_stages)
        self.untrained_encoder_stages = [
            stage for stage in range(shape.num_encoder_stages) if not shape.has_backward[stage]
        ]
        self.guarded = [False] * shape.num_stages
        for encoder in range(shape.num_encoders):
            trained = [s for s in shape.stages_of_encoder(encoder) if shape.has_backward[s]]
            if trained:
                self.guarded[trained[0]] = limits[trained[0]] is not None
        self.unfinished = [[len(units) for units in self.modules[s].units] for s in stages]
        self.oldest = [0] * shape.num_stages
        self.unstarted = [list(row) for row in self.unfinished]
        self.unstarted_amount = [
            [sum(amounts[self.first[s] + unit] for unit in units) for units in self.modules[s].units] for s in stages
        ]
        self.held_of_turn = [[0] * len(row) for row in self.unfinished]
        self.num_held_of_turn = [[0] * len(row) for row in self.unfinished]
        self.held = [0] * shape.num_stages
        self.num_held = [0] * shape.num_stages
        self.weights_left = [0] * shape.num_stages
        self.in_flight = [0] * shape.num_stages
        self.group_in_flight = [0] * shape.num_stages

    def ask(self, stage: int, slot: int) -> int:
        """Whether the forward of a slot may start now: ADMITTED, OUTSIDE_WINDOW or NO_MEMORY."""
        rule = self.rule
        depth, entry_limit = rule.depth[stage], rule.entry_limit[stage]
        full = entry_limit is not None and self.group_in_flight[self.group[stage]] >= entry_limit
        if stage >= self.first_llm:
            if full or (depth is not None and self.in_flight[stage] >= depth):
                return OUTSIDE_WINDOW
        else:
            module, oldest = self.modules[stage], self.oldest[stage]
            reach = module.reach
            position = module.position[slot - self.first[stage]]
            ahead = oldest < len(reach) and position > reach[oldest]
            if ahead and (full or (depth is not None and position > reach[min(oldest + depth, len(reach)) - 1])):
                return OUTSIDE_WINDOW
        if rule.weight_limit is not None and self.weights_left[stage] and self.num_held[stage] >= rule.weight_limit:
            return OUTSIDE_WINDOW
        limit = self.limits[stage]
        if limit is None:
            return ADMITTED
        held = self.held[stage]
        if self.num_held[stage] and held + self.amounts[slot] > limit:
            return NO_MEMORY
        if self.guarded[stage] and not self._stays_safe(stage, slot, limit):
            return NO_MEMORY
        return ADMITTED

    def units_of_oldest(self, stage: int) -> list[int]:
        """Slots of the stage that its oldest unfinished language-model microbatch needs."""
        oldest, units = self.oldest[stage], self.modules[stage].units
        return [self.first[stage] + unit for unit in units[oldest]] if oldest < len(units) else []

    def _stays_safe(self, stage: int, slot: int, limit: int) -> bool:
        amount = self.amounts[slot]
        mine = self.modules[stage].turns[slot - self.first[stage]][0]
        held = self.held[stage] + amount
        num_held = self.num_held[stage] + 1
        unstarted, amounts, held_of_turn = self.unstarted[stage], self.unstarted_amount[stage], self.held_of_turn[stage]
        for turn in range(self.oldest[stage], len(unstarted)):
            own = turn == mine
            count = unstarted[turn] - own
            if count and held + amounts[turn] - amount * own > limit and (num_held or count > 1):
                return False
            held -= held_of_turn[turn] + amount * own
            num_held -= self.num_held_of_turn[stage][turn] + own
            if num_held <= 0:
                return True
        return True

    def start(self, stage: int, slot: int) -> None:
        """A forward starts: its memory is taken (if a backward will give it back)."""
        amount = self.amounts[slot]
        self.held[stage] += amount
        self.num_held[stage] += 1
        self.in_flight[stage] += 1
        self.group_in_flight[self.group[stage]] += 1
        if self.guarded[stage]:
            turn = self.modules[stage].turns[slot - self.first[stage]][0]
            self.unstarted[stage][turn] -= 1
            self.unstarted_amount[stage][turn] -= amount
            self.held_of_turn[stage][turn] += amount
            self.num_held_of_turn[stage][turn] += 1

    def leave(self, stage: int) -> None:
        """A unit is no longer in flight: its input gradients are done, or it has none."""
        self.in_flight[stage] -= 1
        self.group_in_flight[self.group[stage]] -= 1

    def finish(self, stage: int, slot: int) -> None:
        """The microbatches that need the slot have got what they wait for on this stage."""
        for turn in self.modules[stage].turns[slot - self.first[stage]]:
            self._serve(stage, turn)

    def finish_without_gradients(self, llm_unit: int) -> list[int]:
        """A language-model microbatch has entered the model; returns the untrained encoder stages that may go on."""
        served = []
        for stage in self.untrained_encoder_stages:
            turn = self.modules[stage].turn_of_llm.get(llm_unit)
            if turn is not None:
                self.unfinished[stage][turn] = 1
                self._serve(stage, turn)
                served.append(stage)
        return served

    def _serve(self, stage: int, turn: int) -> None:
        unfinished, oldest = self.unfinished[stage], self.oldest[stage]
        unfinished[turn] -= 1
        while oldest < len(unfinished) and unfinished[oldest] == 0:
            oldest += 1
        self.oldest[stage] = oldest

    def release(self, stage: int, slot: int) -> None:
        """The activations of the slot are gone."""
        amount = self.amounts[slot]
        self.held[stage] -= amount
        self.num_held[stage] -= 1
        if self.guarded[stage]:
            turn = self.modules[stage].turns[slot - self.first[stage]][0]
            self.held_of_turn[stage][turn] -= amount
            self.num_held_of_turn[stage][turn] -= 1
