"""The list scheduler's loop for `eager`, and `zero_bubble` in limited memory, with one stage on each rank.

The rules are those of `schedule/kernel.py`, to the tick, with what these cases do not need left out: no windows, a
backward is ready when its gradient is there, and where memory is limited every encoder unit has one consumer. A test
holds both together.

Price: 40 to 70 ns per operation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner.eager_memory import (
    AMOUNT,
    BACKWARD_ROUTE,
    BASE,
    FORWARD_ROUTE,
    HELD,
    LATEST,
    NUM_HELD,
    NUM_UNITS,
    OLDEST,
    OPEN,
    READY,
    STARTED,
    UNFINISHED,
    UNITS,
    UNSTARTED,
    UNSTARTED_AMOUNT,
    advance,
    amount_of,
    forward_that_fits,
    release,
)
from entrain_opt.assigner.pipeline_columns import FIRST_STAGE, NUM_STAGES
from entrain_opt.compiled import borrowing, compiled, inlined
from entrain_opt.schedule.columns import HAS_BACKWARD, LIMIT, NONE
from entrain_opt.schedule.heap import pop, push
from entrain_opt.schedule.kernel import NEVER
from entrain_opt.schedule.memory import kept_amount

IntArray = NDArray[np.int64]
ByteArray = NDArray[np.uint8]

# What a rank runs: 3 * unit + kind.
_FORWARD, _BACKWARD, _WEIGHT = range(3)
# To the neighbour, between encoder and language model, nowhere.
_NEXT, _EXIT, _END = range(3)


@compiled
def play_eager(
    ticks: IntArray, splits: bool, stages: IntArray, encoders: IntArray, first_llm: int, num_llm: int,
    llm_amount: IntArray, unit_first: IntArray, unit_amount: IntArray, pair_first: IntArray, pair_llm: IntArray,
    source_first: IntArray, sources: IntArray,
) -> int:  # fmt: skip
    """Run everything; returns the last tick, or -1 where something could not run.

    Args:
        ticks: [4, S, units] forward, backward (of inputs only where it is split), transfer and weight gradients of
            every unit on every stage.
        splits: whether weight gradients may run on their own, when nothing else can.
        stages, encoders: as in `iteration_ticks`.
        first_llm: the first language-model stage.
        num_llm: language-model units.
        llm_amount: [num_llm] tokens.
        unit_first: [E + 1] first unit of each encoder.
        unit_amount: [units] patches.
        pair_first, pair_llm: [units + 1] and [pairs] who consumes each unit.
        source_first, sources: [num_llm + 1] and [pairs] the units that a language-model unit waits for.
    """
    num_stages, width = ticks.shape[1], ticks.shape[2]
    routes = np.zeros((num_stages, 4), dtype=np.int64)
    state = np.zeros((2, num_stages, width), dtype=np.uint8)
    # Ready units of either kind and the lowest that may be ready.
    num_ready, lowest = np.zeros((2, num_stages), dtype=np.int64), np.zeros((2, num_stages), dtype=np.int64)
    held, turns = np.zeros((num_stages, 5), dtype=np.int64), np.zeros((first_llm, num_llm, 5), dtype=np.int64)
    expected = _prepare(
        stages, encoders, first_llm, num_llm, unit_first, unit_amount, pair_first, pair_llm, routes, state, num_ready,
        held, turns,
    )  # fmt: skip
    missing = np.empty(num_llm, dtype=np.int64)
    for unit in range(num_llm):
        missing[unit] = source_first[unit + 1] - source_first[unit]
        if missing[unit] == 0:
            state[0, first_llm, unit] = READY
            num_ready[0, first_llm] += 1
    # Split backwards whose weight gradients have not run, of each stage in order, and the first and the end of them.
    pending, queue = np.empty((num_stages, width), dtype=np.int64), np.zeros((num_stages, 2), dtype=np.int64)
    running, finish = np.full(num_stages, NONE, dtype=np.int64), np.full(num_stages, NEVER, dtype=np.int64)
    was_backward = np.zeros(num_stages, dtype=np.uint8)
    # Ranks that may have something to start.
    is_touched, touched = np.ones(num_stages, dtype=np.uint8), np.arange(num_stages)
    arrivals = np.empty((2 * num_stages * width + 2 * len(pair_llm) + 1, 2), dtype=np.int64)
    return _run(
        ticks, splits, stages, encoders, routes, state, num_ready, lowest, held, turns, missing, pending, queue,
        running, finish, was_backward, is_touched, touched, arrivals, first_llm, llm_amount, unit_first, unit_amount,
        pair_first, pair_llm, source_first, sources, expected,
    )  # fmt: skip


@borrowing
def _run(
    ticks: IntArray, splits: bool, stages: IntArray, encoders: IntArray, routes: IntArray, state: ByteArray,
    num_ready: IntArray, lowest: IntArray, held: IntArray, turns: IntArray, missing: IntArray, pending: IntArray,
    queue: IntArray, running: IntArray, finish: IntArray, was_backward: ByteArray, is_touched: ByteArray,
    touched: IntArray, arrivals: IntArray, first_llm: int, llm_amount: IntArray, unit_first: IntArray,
    unit_amount: IntArray, pair_first: IntArray, pair_llm: IntArray, source_first: IntArray, sources: IntArray,
    expected: int,
) -> int:  # fmt: skip
    """The loop over time; `expected` operations in all."""
    num_stages, width = ticks.shape[1], ticks.shape[2]
    num_touched, num_arrivals = num_stages, 0
    now = 0
    while True:
        for i in range(num_touched):
            stage = touched[i]
            is_touched[stage] = 0
            kind, unit = _BACKWARD, NONE
            if num_ready[1, stage] == 0 or was_backward[stage]:
                if num_ready[0, stage]:
                    unit = _forward(
                        stages, state, num_ready, lowest, held, turns, routes, first_llm, llm_amount, unit_amount,
                        pair_first, pair_llm, source_first, sources, stage,
                    )  # fmt: skip
                kind = _FORWARD if unit != NONE else _BACKWARD
            if unit == NONE and num_ready[1, stage]:
                unit = lowest[1, stage]
                while state[1, stage, unit] != READY:
                    unit += 1
                lowest[1, stage] = unit
            if unit != NONE:
                state[kind, stage, unit] = STARTED
                num_ready[kind, stage] -= 1
                was_backward[stage] = kind
                running[stage] = 3 * unit + kind
                finish[stage] = now + ticks[kind, stage, unit]
                if splits and kind == _BACKWARD:
                    kept = kept_amount(amount_of(routes, first_llm, llm_amount, unit_amount, stage, unit))
                    limit = stages[stage, LIMIT]
                    if (limit == NONE or held[stage, AMOUNT] + kept <= limit) and _returns_gradients(
                        stages, encoders, routes, unit_first, source_first, sources, stage, unit
                    ):
                        held[stage, AMOUNT] += kept
                        pending[stage, queue[stage, 1]] = unit
                        queue[stage, 1] += 1
                    else:
                        finish[stage] += ticks[3, stage, unit]
            elif queue[stage, 0] < queue[stage, 1]:
                unit = pending[stage, queue[stage, 0]]
                queue[stage, 0] += 1
                running[stage] = 3 * unit + _WEIGHT
                finish[stage] = now + ticks[3, stage, unit]
        num_touched = 0
        following = NEVER
        for stage in range(num_stages):
            following = min(following, finish[stage])
        if num_arrivals:
            following = min(following, arrivals[0, 0])
        if following == NEVER:
            break
        now = following
        for stage in range(num_stages):
            if finish[stage] != now:
                continue
            unit, kind = running[stage] // 3, running[stage] % 3
            running[stage], finish[stage] = NONE, NEVER
            num_touched = _touch(running, is_touched, touched, num_touched, stage)
            is_limited = stages[stage, LIMIT] != NONE
            if kind == _WEIGHT:
                if is_limited:
                    held[stage, AMOUNT] -= kept_amount(
                        amount_of(routes, first_llm, llm_amount, unit_amount, stage, unit)
                    )
                    release(held, turns, routes, first_llm, llm_amount, unit_amount, pair_first, pair_llm, stage, unit)
                continue
            expected -= 1
            if kind == _FORWARD:
                route, late = routes[stage, FORWARD_ROUTE], ticks[2, stage, unit]
                if route == _EXIT:
                    for i in range(pair_first[routes[stage, BASE] + unit], pair_first[routes[stage, BASE] + unit + 1]):
                        target = pair_llm[i]
                        if late:
                            num_arrivals = push(arrivals, num_arrivals, now + late, (first_llm * width + target) * 2)
                        else:
                            missing[target] -= 1
                            if missing[target] == 0:
                                _ready(state, num_ready, lowest, 0, first_llm, target)
                                num_touched = _touch(running, is_touched, touched, num_touched, first_llm)
                elif route == _NEXT:
                    if late:
                        operation = ((stage + 1) * width + unit) * 2
                        num_arrivals = push(arrivals, num_arrivals, now + late, operation)
                    else:
                        _ready(state, num_ready, lowest, 0, stage + 1, unit)
                        num_touched = _touch(running, is_touched, touched, num_touched, stage + 1)
                elif stages[stage, HAS_BACKWARD]:
                    _ready(state, num_ready, lowest, 1, stage, unit)
                continue
            if is_limited:
                if stage < first_llm:
                    turns[stage, pair_llm[pair_first[routes[stage, BASE] + unit]], UNFINISHED] -= 1
                    advance(turns, held, stage, OLDEST, UNFINISHED)
                last = queue[stage, 1] - 1
                if last < queue[stage, 0] or pending[stage, last] != unit:  # Its weight gradients are done as well.
                    release(held, turns, routes, first_llm, llm_amount, unit_amount, pair_first, pair_llm, stage, unit)
            route = routes[stage, BACKWARD_ROUTE]
            if route == _EXIT:
                for i in range(source_first[unit], source_first[unit + 1]):
                    encoder = 0
                    while sources[i] >= unit_first[encoder + 1]:
                        encoder += 1
                    last = encoders[encoder, FIRST_STAGE] + encoders[encoder, NUM_STAGES] - 1
                    if stages[last, HAS_BACKWARD]:
                        target = sources[i] - unit_first[encoder]
                        late = ticks[2, last, target]
                        if late:
                            operation = (last * width + target) * 2 + 1
                            num_arrivals = push(arrivals, num_arrivals, now + late, operation)
                        else:
                            _ready(state, num_ready, lowest, 1, last, target)
                            num_touched = _touch(running, is_touched, touched, num_touched, last)
            elif route == _NEXT:
                late = ticks[2, stage - 1, unit]
                if late:
                    operation = ((stage - 1) * width + unit) * 2 + 1
                    num_arrivals = push(arrivals, num_arrivals, now + late, operation)
                else:
                    _ready(state, num_ready, lowest, 1, stage - 1, unit)
                    num_touched = _touch(running, is_touched, touched, num_touched, stage - 1)
        while num_arrivals and arrivals[0, 0] == now:
            operation = arrivals[0, 1]
            num_arrivals = pop(arrivals, num_arrivals)
            kind, place = operation & 1, operation >> 1
            stage, unit = place // width, place % width
            if kind == 0 and stage == first_llm:
                missing[unit] -= 1
                if missing[unit]:
                    continue
            _ready(state, num_ready, lowest, kind, stage, unit)
            num_touched = _touch(running, is_touched, touched, num_touched, stage)
    return now if expected == 0 else -1


@borrowing
def _prepare(
    stages: IntArray, encoders: IntArray, first_llm: int, num_llm: int, unit_first: IntArray, unit_amount: IntArray,
    pair_first: IntArray, pair_llm: IntArray, routes: IntArray, state: ByteArray, num_ready: IntArray, held: IntArray,
    turns: IntArray,
) -> int:  # fmt: skip
    """Fill what describes the stages before anything ran; returns how many operations there are."""
    num_stages = len(stages)
    for stage in range(first_llm, num_stages):
        routes[stage, NUM_UNITS] = num_llm
        routes[stage, FORWARD_ROUTE] = _NEXT if stage + 1 < num_stages else _END
        routes[stage, BACKWARD_ROUTE] = _EXIT if stage == first_llm else _NEXT
    for encoder in range(len(encoders)):
        first, base = encoders[encoder, FIRST_STAGE], unit_first[encoder]
        last = first + encoders[encoder, NUM_STAGES] - 1
        for stage in range(first, last + 1):
            routes[stage, BASE], routes[stage, NUM_UNITS] = base, unit_first[encoder + 1] - base
            routes[stage, FORWARD_ROUTE] = _EXIT if stage == last else _NEXT
            routes[stage, BACKWARD_ROUTE] = _END if stage == first else _NEXT
            held[stage, LATEST] = NONE
            if stages[stage, LIMIT] == NONE:
                continue
            for unit in range(base, unit_first[encoder + 1]):
                turn = pair_llm[pair_first[unit]]
                turns[stage, turn, UNSTARTED] += 1
                turns[stage, turn, UNFINISHED] += 1
                turns[stage, turn, UNSTARTED_AMOUNT] += unit_amount[unit]
            advance(turns, held, stage, OLDEST, UNFINISHED)
            advance(turns, held, stage, OPEN, UNSTARTED)
        num_ready[0, first] = routes[first, NUM_UNITS]
        state[0, first, : routes[first, NUM_UNITS]] = READY
    expected = 0
    for stage in range(num_stages):
        if routes[stage, BACKWARD_ROUTE] == _NEXT and not stages[stage - 1, HAS_BACKWARD]:
            routes[stage, BACKWARD_ROUTE] = _END
        expected += routes[stage, NUM_UNITS] * (1 + stages[stage, HAS_BACKWARD])
    return expected


@inlined
def _ready(state: ByteArray, num_ready: IntArray, lowest: IntArray, kind: int, stage: int, unit: int) -> None:
    state[kind, stage, unit] = READY
    num_ready[kind, stage] += 1
    lowest[kind, stage] = min(lowest[kind, stage], unit)


@inlined
def _touch(running: IntArray, is_touched: ByteArray, touched: IntArray, num_touched: int, stage: int) -> int:
    if running[stage] != NONE or is_touched[stage]:
        return num_touched
    is_touched[stage] = 1
    touched[num_touched] = stage
    return num_touched + 1


@inlined
def _forward(
    stages: IntArray, state: ByteArray, num_ready: IntArray, lowest: IntArray, held: IntArray, turns: IntArray,
    routes: IntArray, first_llm: int, llm_amount: IntArray, unit_amount: IntArray, pair_first: IntArray,
    pair_llm: IntArray, source_first: IntArray, sources: IntArray, stage: int,
) -> int:  # fmt: skip
    """The next forward of a stage with ready ones, its memory taken; NONE if none may start."""
    unit = lowest[0, stage]
    while state[0, stage, unit] != READY:
        unit += 1
    lowest[0, stage] = unit
    limit = stages[stage, LIMIT]
    if limit == NONE:
        return unit
    if stage >= first_llm:
        if held[stage, UNITS] and held[stage, AMOUNT] + llm_amount[unit] > limit:
            return NONE
        held[stage, AMOUNT] += llm_amount[unit]
        held[stage, UNITS] += 1
        return unit
    base = routes[stage, BASE]
    unit = forward_that_fits(
        stages, state, held, turns, unit_amount, pair_first, pair_llm, source_first, sources, base,
        routes[stage, NUM_UNITS], stage, unit,
    )  # fmt: skip
    if unit == NONE:
        return NONE
    turn, amount = pair_llm[pair_first[base + unit]], unit_amount[base + unit]
    turns[stage, turn, UNSTARTED] -= 1
    turns[stage, turn, UNSTARTED_AMOUNT] -= amount
    turns[stage, turn, HELD] += amount
    turns[stage, turn, NUM_HELD] += 1
    held[stage, AMOUNT] += amount
    held[stage, UNITS] += 1
    held[stage, LATEST] = max(held[stage, LATEST], turn)
    advance(turns, held, stage, OPEN, UNSTARTED)
    return unit


@inlined
def _returns_gradients(
    stages: IntArray, encoders: IntArray, routes: IntArray, unit_first: IntArray, source_first: IntArray,
    sources: IntArray, stage: int, unit: int,
) -> bool:  # fmt: skip
    """Whether a unit's backward hands gradients on; only then are there weight gradients apart from them."""
    if routes[stage, BACKWARD_ROUTE] != _EXIT:
        return routes[stage, BACKWARD_ROUTE] == _NEXT
    found = False
    for i in range(source_first[unit], source_first[unit + 1]):
        encoder = 0
        while sources[i] >= unit_first[encoder + 1]:
            encoder += 1
        last = encoders[encoder, FIRST_STAGE] + encoders[encoder, NUM_STAGES] - 1
        found = found or stages[last, HAS_BACKWARD] != 0
    return found
