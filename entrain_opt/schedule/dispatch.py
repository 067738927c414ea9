"""A list scheduler that plays the pipeline forward in time and writes down what each rank runs.

Whenever a rank is free it starts the first operation, by the rule's priorities, whose inputs are there and which
memory and windows (`admission.py`) admit. No rank ever waits for one particular operation, so the result can always be
replayed: the order it wrote down is one that has run.

The loop over time is compiled (`kernel.py`); here its arrays are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule import columns
from entrain_opt.schedule.admission import Rule, check_limits, guarded_stages, module_turns
from entrain_opt.schedule.columns import NONE, Pipeline
from entrain_opt.schedule.graph import WorkGraph
from entrain_opt.schedule.kernel import IntArray, run_pipeline
from entrain_opt.schedule.links import Links, Rows

_FIRST = {"alternate": columns.ALTERNATE, "backward": columns.BACKWARD_FIRST, "forward": columns.FORWARD_FIRST}


def dispatch(
    graph: WorkGraph,
    rule: Rule,
    *,
    durations: IntArray,
    transfer: IntArray,
    limits: list[int | None],
    amounts: list[int],
) -> list[list[int]]:
    """Operations of each rank in the order they start.

    Args:
        graph: the work.
        rule: priorities and windows.
        durations: [4 * slots] ticks, see `run_pipeline`.
        transfer: [slots] ticks of its output (and of the gradient back) to another rank.
        limits: per stage, the amount it may hold; None is unlimited.
        amounts: [slots] what each slot holds while in flight.

    Raises:
        ScheduleError: the sources of one language-model microbatch do not fit into the limit together.
    """
    check_limits(graph, limits, amounts)
    pipe = pipeline_arrays(graph, rule, limits, amounts)
    orders, first, _, _ = run_pipeline(pipe, durations, transfer)
    # How many backwards were split is the scheduler's choice.
    returns = pipe.stages[pipe.slots[:, columns.STAGE], columns.HAS_BACKWARD]
    expected, ran = graph.num_slots + int(returns.sum()), orders < 2 * graph.num_slots
    if int(ran.sum()) != expected:
        raise ScheduleError(
            f"schedule: only {int(ran.sum())} of {expected} passes could run. This is a defect of the list scheduler; "
            f"please report it with the assignment."
        )
    operations, bounds = orders.tolist(), first.tolist()
    return [operations[bounds[rank] : bounds[rank + 1]] for rank in range(graph.shape.num_ranks)]


def pipeline_arrays(graph: WorkGraph, rule: Rule, limits: list[int | None], amounts: list[int]) -> Pipeline:
    """The work and the rule as the kernel reads them."""
    shape = graph.shape
    encoders = [shape.encoder_of_stage(stage) for stage in range(shape.num_stages)]
    modules = [
        module_turns(order, list(graph.encoder_consumers[e]), rule.llm_order)
        for e, order in enumerate(rule.encoder_orders)
    ]
    modules.append(module_turns(rule.llm_order, [(u,) for u in range(graph.num_llm_units)], rule.llm_order))
    per_stage = [modules[-1] if e is None else modules[e] for e in encoders]
    turn_first = [0, *accumulate(len(module.units) for module in per_stage)]

    slots = np.zeros((graph.num_slots, columns.SLOT_COLUMNS), dtype=np.int64)
    turns = np.zeros((turn_first[-1], columns.TURN_COLUMNS), dtype=np.int64)
    turn_of_llm = np.full((shape.num_stages, graph.num_llm_units), NONE, dtype=np.int64)
    of_slot: list[Rows] = []
    of_turn: list[Rows] = []
    rows = {id(module): (Rows.of(module.units), Rows.of(module.turns)) for module in modules}
    for stage, module in enumerate(per_stage):
        first_slot, first_turn = graph.stage_first[stage], turn_first[stage]
        position = _array(module.position)
        slots[first_slot : first_slot + len(position), columns.POSITION] = position
        slots[first_slot + position, columns.SEQUENCE] = first_slot + np.arange(len(position))
        turns[first_turn : turn_first[stage + 1], columns.REACH] = module.reach
        units, unit_turns = rows[id(module)]
        of_turn.append(units.plus(first_slot))
        of_slot.append(unit_turns.plus(first_turn))
        turn_of_llm[stage, list(module.turn_of_llm)] = first_turn + _array(list(module.turn_of_llm.values()))
    links = Links()
    slots[:, columns.FORWARD], slots[:, columns.FORWARD_END] = links.add(graph.forward_targets)
    slots[:, columns.BACKWARD], slots[:, columns.BACKWARD_END] = links.add(graph.backward_targets)
    slots[:, columns.TURNS], slots[:, columns.TURNS_END] = links.add(Rows.join(of_slot))
    turns[:, columns.SLOTS], turns[:, columns.SLOTS_END] = links.add(Rows.join(of_turn))
    slots[:, columns.STAGE] = graph.slot_stage
    slots[:, columns.AMOUNT] = amounts
    slots[:, columns.SPLIT] = rule.split
    slots[:, columns.FORWARD_KEY] = rule.forward_key
    slots[:, columns.BACKWARD_KEY] = rule.backward_key
    return Pipeline(
        rules=_rules(shape, rule, limits),
        stages=_stages(graph, rule, limits, encoders, turn_first),
        slots=slots,
        turns=turns,
        links=links.joined(),
        turn_of_llm=turn_of_llm,
    )


def _rules(shape: PipelineShape, rule: Rule, limits: list[int | None]) -> IntArray:
    rules = np.zeros(columns.NUM_RULES, dtype=np.int64)
    rules[columns.FIRST] = _FIRST[rule.first]
    rules[columns.WEIGHT_LIMIT] = NONE if rule.weight_limit is None else rule.weight_limit
    rules[columns.SPLIT_FOR_WAITING] = rule.split_for_waiting
    rules[columns.PHASES] = rule.phases and all(limit is None for limit in limits)
    rules[columns.FIRST_LLM_STAGE] = shape.num_encoder_stages
    rules[columns.NUM_RANKS] = shape.num_ranks
    return rules


def _stages(
    graph: WorkGraph, rule: Rule, limits: list[int | None], encoders: list[int | None], turn_first: list[int]
) -> IntArray:
    shape = graph.shape
    groups = list(zip(shape.ranks_of_stages, encoders, strict=True))
    stages = np.zeros((shape.num_stages, columns.STAGE_COLUMNS), dtype=np.int64)
    stages[:, columns.RANK] = shape.ranks_of_stages
    stages[:, columns.SLOT_FIRST], stages[:, columns.SLOT_END] = graph.stage_first[:-1], graph.stage_first[1:]
    stages[:, columns.HAS_BACKWARD] = shape.has_backward
    stages[:, columns.LIMIT] = _optional(limits)
    stages[:, columns.DEPTH] = _optional(rule.depth)
    stages[:, columns.ENTRY_LIMIT] = _optional(rule.entry_limit)
    stages[:, columns.GROUP] = [groups.index(group) for group in groups]
    stages[:, columns.GUARDED] = guarded_stages(shape, limits)
    stages[:, columns.TURN_FIRST], stages[:, columns.TURN_END] = turn_first[:-1], turn_first[1:]
    return stages


def _array(values: Sequence[int]) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def _optional(values: Sequence[int | None]) -> IntArray:
    return _array([NONE if value is None else value for value in values])
