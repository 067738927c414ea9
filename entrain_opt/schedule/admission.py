"""What may start: how far a stage may work ahead, and what its memory holds.

- *Window*: a language-model stage has at most `depth` microbatches in flight. An encoder stage runs forwards only for
  its `depth` oldest unfinished language-model microbatches, and for units that stand before those in its order. The
  units of the oldest one are always inside, so deferral, which makes a microbatch wait for a later encoder forward,
  cannot lock the pipeline as a fixed warm-up count would.
- *Chunks*: where a rank holds several stages of a module, a limit on what is in flight in all of them is asked at the
  first one only; what has entered may go on.
- *Memory*: a stage never holds more than its limit, except for one unit alone. At the first trained stage of an
  encoder, and at later ones with a smaller limit, a unit is admitted only if, afterwards, the unfinished language-model
  microbatches can still be completed one after the other in order (the banker's algorithm); the other stages of that
  encoder hold a subset of what one of these holds.
  A language-model stage needs no such care: what it holds always runs on to the loss and comes back.
- *Split backwards*: until its weight gradients are done, a unit holds its activations and the gradients they need
  (`columns.KEPT_PERCENT`). Where those do not fit, its backward runs whole; so it does where its weight gradients take
  no longer than splitting costs. Weight gradients wait for nothing, so what they hold can always be let go.
- *No overtaking*: a ready unit that memory refuses is not overtaken by later ones of its stage, except by those that
  the oldest unfinished microbatch waits for. Small units that slip past a giant would keep it waiting for ever new
  ones; where a search orders the microbatches, iterations are 5 % shorter this way on heavy-tailed data.

Price: O(1) per question, O(microbatches in flight) where an encoder has a memory limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule.graph import WorkGraph
from entrain_opt.schedule.links import Rows


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
        split: [slots] whose weight gradients may run on their own, when nothing else can.
        split_for_waiting: only those backwards are split whose gradients go to a rank without another backward to run.
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
    split_for_waiting: bool = False
    weight_limit: int | None = None
    first: str = "alternate"
    phases: bool = False


def guarded_stages(shape: PipelineShape, limits: list[int | None]) -> list[bool]:
    """Per stage, whether it asks the banker's algorithm: where a limit is below those before it in its encoder."""
    guarded = [False] * shape.num_stages
    for encoder in range(shape.num_encoders):
        smallest = math.inf
        for stage in shape.stages_of_encoder(encoder):
            limit = limits[stage]
            if limit is not None and limit < smallest:
                guarded[stage], smallest = True, limit
    return guarded


def check_limits(graph: WorkGraph, limits: list[int | None], amounts: list[int]) -> None:
    """Raise ScheduleError if a limit makes progress impossible, naming the least that would do."""
    for encoder in range(graph.shape.num_encoders):
        consumers = Rows.of(graph.encoder_consumers[encoder])
        for stage in graph.shape.stages_of_encoder(encoder):
            limit = limits[stage]
            if limit is None:
                continue
            slots = graph.slots_of_stage(stage)
            held = np.array(amounts[slots.start : slots.stop], dtype=np.int64)
            units = consumers.row_of_value
            needed = np.bincount(consumers.values, held[units], graph.num_llm_units)
            needed[np.bincount(consumers.values, minlength=graph.num_llm_units) < 2] = 0
            worst = int(needed.argmax()) if len(needed) else -1
            if worst >= 0 and needed[worst] > limit:
                least = int(needed[worst])
                microbatch = graph.slot_microbatch[graph.stage_first[-2] + worst]
                raise ScheduleError(
                    f"patches_in_flight: stage {stage} may hold {limit} patches, but language-model microbatch "
                    f"{microbatch} needs several encoder units in flight together. Allow at least {least} patches, or "
                    f"defer less into one microbatch."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleTurns:
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


def module_turns(order: list[int], consumers: list[tuple[int, ...]], llm_order: list[int]) -> ModuleTurns:
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
    return ModuleTurns(position=position, turns=turns, units=units, reach=reach, turn_of_llm=turn_of_llm)
