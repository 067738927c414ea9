"""The list scheduler's loop for `eager`, `eager_split`, and `zero_bubble` in limited memory.

The rules are those of `schedule/kernel.py`, to the tick, with what these cases do not need left out: no windows, a
backward is ready when its gradient is there, and where memory is limited every encoder unit has one consumer. A test
holds both together.

Stages of one rank take turns: the earliest microbatch goes first, among equals the stage nearer to the loss.

Price: 40 to 70 ns per operation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner.eager_choice import forward_that_may, lowest_ready, stage_that_goes_first
from entrain_opt.assigner.eager_memory import (
    AMOUNT,
    BACKWARD_ROUTE,
    BASE,
    FORWARD_ROUTE,
    LATEST,
    MICROBATCH,
    NUM_UNITS,
    OLDEST,
    OPEN,
    READY,
    STARTED,
    UNFINISHED,
    UNSTARTED,
    UNSTARTED_AMOUNT,
    advance,
    amount_of,
    release,
    take,
)
from entrain_opt.assigner.pipeline_columns import FIRST_STAGE, NUM_STAGES
from entrain_opt.compiled import borrowing, compiled, inlined
from entrain_opt.schedule.columns import HAS_BACKWARD, LIMIT, NONE, RANK
from entrain_opt.schedule.heap import pop, push
from entrain_opt.schedule.kernel import NEVER
from entrain_opt.schedule.memory import kept_amount

IntArray = NDArray[np.int64]
ByteArray = NDArray[np.uint8]

# What a rank runs: 3 * unit + kind.
_FORWARD, _BACKWARD, _WEIGHT = range(3)
# To the neighbour, between encoder and language model, nowhere.
_NEXT, _EXIT, _NOWHERE = range(3)


@compiled
def play_eager(
    ticks: IntArray, splits: bool, splits_for_waiting: bool, stages: IntArray, encoders: IntArray, first_llm: int,
    microbatch: IntArray, llm_amount: IntArray, unit_first: IntArray, unit_amount: IntArray, pair_first: IntArray,
    pair_llm: IntArray, source_first: IntArray, sources: IntArray,
) -> int:  # fmt: skip
    """Run everything; returns the last tick, or -1 where something could not run.

    Args:
        ticks: [5, S, units] forward, whole backward, transfer, weight gradients and backward without these of every
            unit on every stage.
        splits: whether weight gradients may run on their own, when nothing else can.
        splits_for_waiting: only of backwards whose gradients go to a rank without another to run.
        stages, encoders: as in `iteration_ticks`.
        first_llm: the first language-model stage.
        microbatch: [units + num_llm] of each encoder unit and each language-model unit.
        llm_amount: [num_llm] tokens.
        unit_first: [E + 1] first unit of each encoder.
        unit_amount: [units] patches.
        pair_first, pair_llm: [units + 1] and [pairs] who consumes each unit.
        source_first, sources: [num_llm + 1] and [pairs] the units that a language-model unit waits for.
    """
    num_stages, width, num_llm = ticks.shape[1], ticks.shape[2], len(llm_amount)
    routes = np.zeros((num_stages, 5), dtype=np.int64)
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
    rank_of, num_ranks = np.empty(num_stages, dtype=np.int64), 0
    for stage in range(num_stages):
        rank_of[stage] = stages[stage, RANK]
        num_ranks = max(num_ranks, rank_of[stage] + 1)
    # The stages of a rank are a chain.
    first_stage, next_stage = np.full(num_ranks, NONE, dtype=np.int64), np.empty(num_stages, dtype=np.int64)
    for stage in range(num_stages - 1, -1, -1):
        next_stage[stage] = first_stage[rank_of[stage]]
        first_stage[rank_of[stage]] = stage
    # Split backwards of each rank whose weight gradients have not run, in order, and the first and the end of them.
    pending = np.empty((num_stages * width if splits else 0, 2), dtype=np.int64)
    queue, row = np.zeros((num_ranks, 2), dtype=np.int64), 0
    for rank in range(num_ranks):
        queue[rank, 0] = queue[rank, 1] = row
        stage = first_stage[rank]
        while stage != NONE:
            row += width
            stage = next_stage[stage]
    running, running_stage = np.full(num_ranks, NONE, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    finish, was_backward = np.full(num_ranks, NEVER, dtype=np.int64), np.zeros(num_ranks, dtype=np.uint8)
    # Ranks that may have something to start.
    is_touched = np.ones(num_ranks, dtype=np.uint8)
    arrivals = np.empty((2 * num_stages * width + 2 * len(pair_llm) + 1, 2), dtype=np.int64)
    return _run(
        ticks, splits, splits_for_waiting, stages, encoders, routes, state, num_ready, lowest, held, turns, missing,
        rank_of, first_stage, next_stage, pending, queue, running, running_stage, finish, was_backward, is_touched,
        arrivals, first_llm, microbatch, llm_amount, unit_first, unit_amount, pair_first, pair_llm, source_first,
        sources, expected,
    )  # fmt: skip


@borrowing
def _run(
    ticks: IntArray, splits: bool, splits_for_waiting: bool, stages: IntArray, encoders: IntArray, routes: IntArray,
    state: ByteArray, num_ready: IntArray, lowest: IntArray, held: IntArray, turns: IntArray, missing: IntArray,
    rank_of: IntArray, first_stage: IntArray, next_stage: IntArray, pending: IntArray, queue: IntArray,
    running: IntArray, running_stage: IntArray, finish: IntArray, was_backward: ByteArray, is_touched: ByteArray,
    arrivals: IntArray, first_llm: int, microbatch: IntArray, llm_amount: IntArray, unit_first: IntArray,
    unit_amount: IntArray, pair_first: IntArray, pair_llm: IntArray, source_first: IntArray, sources: IntArray,
    expected: int,
) -> int:  # fmt: skip
    """The loop over time; `expected` operations in all."""
    num_ranks, width = len(finish), ticks.shape[2]
    num_arrivals = 0
    now = 0
    while True:
        for rank in range(num_ranks):
            if not is_touched[rank] or running[rank] != NONE:
                continue
            is_touched[rank] = 0
            kind, unit, stage = _BACKWARD, NONE, first_stage[rank]
            if next_stage[stage] != NONE:
                stage = stage_that_goes_first(
                    stages, state, num_ready, lowest, held, turns, routes, first_llm, microbatch, llm_amount,
                    unit_amount, pair_first, pair_llm, source_first, sources, next_stage, stage, was_backward[rank],
                )  # fmt: skip
            if num_ready[1, stage] == 0 or was_backward[rank]:
                if num_ready[0, stage]:
                    unit = forward_that_may(
                        stages, state, lowest, held, turns, routes, first_llm, llm_amount, unit_amount, pair_first,
                        pair_llm, source_first, sources, stage,
                    )  # fmt: skip
                if unit != NONE:
                    kind = _FORWARD
                    if stages[stage, LIMIT] != NONE:
                        take(held, turns, routes, first_llm, llm_amount, unit_amount, pair_first, pair_llm, stage, unit)
            if unit == NONE and num_ready[1, stage]:
                unit = lowest_ready(state, lowest, 1, stage)
            if unit != NONE:
                state[kind, stage, unit] = STARTED
                num_ready[kind, stage] -= 1
                was_backward[rank] = kind
                running[rank], running_stage[rank] = 3 * unit + kind, stage
                finish[rank] = now + ticks[kind, stage, unit]
                if splits and kind == _BACKWARD and ticks[4, stage, unit] < ticks[1, stage, unit]:
                    kept = kept_amount(amount_of(routes, first_llm, llm_amount, unit_amount, stage, unit))
                    limit = stages[stage, LIMIT]
                    if (limit == NONE or held[stage, AMOUNT] + kept <= limit) and _is_worth_splitting(
                        splits_for_waiting, stages, encoders, routes, num_ready, rank_of, first_stage, next_stage,
                        unit_first, source_first, sources, stage, unit,
                    ):  # fmt: skip
                        finish[rank] = now + ticks[4, stage, unit]
                        held[stage, AMOUNT] += kept
                        pending[queue[rank, 1], 0], pending[queue[rank, 1], 1] = stage, unit
                        queue[rank, 1] += 1
            elif queue[rank, 0] < queue[rank, 1]:
                stage, unit = pending[queue[rank, 0], 0], pending[queue[rank, 0], 1]
                queue[rank, 0] += 1
                running[rank], running_stage[rank] = 3 * unit + _WEIGHT, stage
                finish[rank] = now + ticks[3, stage, unit]
        following = NEVER
        for rank in range(num_ranks):
            following = min(following, finish[rank])
        if num_arrivals:
            following = min(following, arrivals[0, 0])
        if following == NEVER:
            break
        now = following
        for rank in range(num_ranks):
            if finish[rank] != now:
                continue
            stage, unit, kind = running_stage[rank], running[rank] // 3, running[rank] % 3
            running[rank], finish[rank] = NONE, NEVER
            is_touched[rank] = 1
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
                                is_touched[rank_of[first_llm]] = 1
                elif route == _NEXT:
                    if late:
                        operation = ((stage + 1) * width + unit) * 2
                        num_arrivals = push(arrivals, num_arrivals, now + late, operation)
                    else:
                        _ready(state, num_ready, lowest, 0, stage + 1, unit)
                        is_touched[rank_of[stage + 1]] = 1
                elif stages[stage, HAS_BACKWARD]:
                    _ready(state, num_ready, lowest, 1, stage, unit)
                continue
            if is_limited:
                if stage < first_llm:
                    turns[stage, pair_llm[pair_first[routes[stage, BASE] + unit]], UNFINISHED] -= 1
                    advance(turns, held, stage, OLDEST, UNFINISHED)
                last = queue[rank, 1] - 1
                if last < queue[rank, 0] or pending[last, 0] != stage or pending[last, 1] != unit:
                    # Its weight gradients are done as well.
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
                            is_touched[rank_of[last]] = 1
            elif route == _NEXT:
                late = ticks[2, stage - 1, unit]
                if late:
                    operation = ((stage - 1) * width + unit) * 2 + 1
                    num_arrivals = push(arrivals, num_arrivals, now + late, operation)
                else:
                    _ready(state, num_ready, lowest, 1, stage - 1, unit)
                    is_touched[rank_of[stage - 1]] = 1
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
            is_touched[rank_of[stage]] = 1
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
        routes[stage, NUM_UNITS], routes[stage, MICROBATCH] = num_llm, len(unit_amount)
        routes[stage, FORWARD_ROUTE] = _NEXT if stage + 1 < num_stages else _NOWHERE
        routes[stage, BACKWARD_ROUTE] = _EXIT if stage == first_llm else _NEXT
    for encoder in range(len(encoders)):
        first, base = encoders[encoder, FIRST_STAGE], unit_first[encoder]
        last = first + encoders[encoder, NUM_STAGES] - 1
        for stage in range(first, last + 1):
            routes[stage, BASE] = routes[stage, MICROBATCH] = base
            routes[stage, NUM_UNITS] = unit_first[encoder + 1] - base
            routes[stage, FORWARD_ROUTE] = _EXIT if stage == last else _NEXT
            routes[stage, BACKWARD_ROUTE] = _NOWHERE if stage == first else _NEXT
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
            routes[stage, BACKWARD_ROUTE] = _NOWHERE
        expected += routes[stage, NUM_UNITS] * (1 + stages[stage, HAS_BACKWARD])
    return expected


@inlined
def _ready(state: ByteArray, num_ready: IntArray, lowest: IntArray, kind: int, stage: int, unit: int) -> None:
    state[kind, stage, unit] = READY
    num_ready[kind, stage] += 1
    lowest[kind, stage] = min(lowest[kind, stage], unit)


@borrowing
def _is_worth_splitting(
    splits_for_waiting: bool, stages: IntArray, encoders: IntArray, routes: IntArray, num_ready: IntArray,
    rank_of: IntArray, first_stage: IntArray, next_stage: IntArray, unit_first: IntArray, source_first: IntArray,
    sources: IntArray, stage: int, unit: int,
) -> bool:  # fmt: skip
    """Whether a unit's backward hands gradients on, to a rank that waits for them if only these are to be split."""
    if routes[stage, BACKWARD_ROUTE] != _EXIT:
        if routes[stage, BACKWARD_ROUTE] != _NEXT:
            return False
        return not splits_for_waiting or _waits(num_ready, rank_of, first_stage, next_stage, stage, stage - 1)
    for i in range(source_first[unit], source_first[unit + 1]):
        encoder = 0
        while sources[i] >= unit_first[encoder + 1]:
            encoder += 1
        last = encoders[encoder, FIRST_STAGE] + encoders[encoder, NUM_STAGES] - 1
        if stages[last, HAS_BACKWARD] and (
            not splits_for_waiting or _waits(num_ready, rank_of, first_stage, next_stage, stage, last)
        ):
            return True
    return False


@borrowing
def _waits(
    num_ready: IntArray, rank_of: IntArray, first_stage: IntArray, next_stage: IntArray, stage: int, upstream: int
) -> bool:
    """Whether the rank of a stage before this one is another and has no backward to run."""
    rank = rank_of[upstream]
    if rank == rank_of[stage]:
        return False
    other = first_stage[rank]
    while other != NONE:
        if num_ready[1, other]:
            return False
        other = next_stage[other]
    return True
