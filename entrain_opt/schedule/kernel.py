"""The list scheduler's inner loop, compiled: whenever a rank is free it starts the best operation that may start.

`dispatch.py` says what the rules mean and makes the arrays; here is only the loop over time, on flat integer arrays, so
that a search can play thousands of schedules a second. What may start (memory and windows) follows `admission.py`'s
description.

Times are integer ticks, so equal costs give exactly equal times. Price: about 0.1 us per operation; compiling takes
seconds, once per installation (the result is cached on disk).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.compiled import borrowing, compiled, inlined
from entrain_opt.schedule.columns import (
    ALTERNATE,
    AMOUNT,
    BACKWARD,
    BACKWARD_END,
    BACKWARD_FIRST,
    BACKWARD_KEY,
    FIRST,
    FIRST_LLM_STAGE,
    FIRST_OF_RANK,
    FORWARD,
    FORWARD_END,
    FORWARD_KEY,
    FORWARDS_LEFT,
    HAS_BACKWARD,
    LAST_WAS_BACKWARD,
    LOWEST,
    MISSING_BACKWARD,
    MISSING_FORWARD,
    NEXT_OF_RANK,
    NONE,
    NUM_RANKS,
    NUM_READY,
    NUM_READY_BACKWARD,
    OLDEST,
    PHASES,
    PLACE,
    RANK,
    RANK_COLUMNS,
    RUNNING,
    SEQUENCE,
    SLOT_END,
    SLOT_FIRST,
    SLOTS,
    SLOTS_END,
    SPLIT,
    SPLIT_FOR_WAITING,
    SPLITS,
    STAGE,
    STAGE_COLUMNS,
    STARTED,
    TOUCHED,
    TURN_COLUMNS,
    TURN_END,
    TURN_FIRST,
    UNFINISHED,
    UNSTARTED,
    UNSTARTED_AMOUNT,
    WEIGHT_HEAD,
    WEIGHT_TAIL,
    WEIGHTS_LEFT,
    WHOLE,
    Pipeline,
)
from entrain_opt.schedule.heap import pop, push
from entrain_opt.schedule.memory import (
    finish,
    fits,
    inside_window,
    is_waited_for,
    keep_gradients,
    leave_window,
    move_oldest,
    release,
    release_gradients,
    take,
)

IntArray = NDArray[np.int64]

#: Later than any tick.
NEVER = 1 << 62


def run_pipeline(
    pipe: Pipeline, durations: IntArray, transfer: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Run everything.

    Args:
        pipe: work and rules; not changed.
        durations: [4 * n] ticks of forwards, whole backwards, weight gradients, and backwards without these.
        transfer: [n] ticks of a slot's output (and of the gradient back) to another rank.

    Returns:
        Operations rank after rank in the order they start, [ranks + 1] offsets into them, [3 * n] start and [3 * n] end
        ticks (-1 for what did not run).
    """
    return play(
        pipe.rules, pipe.stages.copy(), pipe.slots.copy(), pipe.turns.copy(), pipe.links, pipe.turn_of_llm, durations,
        transfer,
    )  # fmt: skip


@compiled
def play(
    rules: IntArray, stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, turn_of_llm: IntArray,
    durations: IntArray, transfer: IntArray,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:  # fmt: skip
    """`run_pipeline` on matrices that it may change."""
    count, num_ranks = len(slots), rules[NUM_RANKS]
    ranks = np.zeros((num_ranks, RANK_COLUMNS), dtype=np.int64)
    # Ready backwards of each rank, and its weight gradients in the order they became ready.
    queues = np.empty((count, 2), dtype=np.int64)
    _prepare(stages, slots, turns, links, ranks)
    rank_of_started, started = np.empty(3 * count, dtype=np.int64), np.empty(3 * count, dtype=np.int64)
    start, end = np.full(3 * count, -1, dtype=np.int64), np.full(3 * count, -1, dtype=np.int64)
    finish = np.full(num_ranks, NEVER, dtype=np.int64)
    # Every arrival is a link; no more can be on their way.
    arrivals = np.empty((len(links) + 1, 2), dtype=np.int64)
    num_started = _run(
        rules, stages, slots, turns, links, ranks, queues, turn_of_llm, durations, transfer, rank_of_started, started,
        start, end, finish, arrivals,
    )  # fmt: skip
    orders, first = np.empty(num_started, dtype=np.int64), np.zeros(num_ranks + 1, dtype=np.int64)
    for i in range(num_started):
        first[rank_of_started[i] + 1] += 1
    first = first.cumsum()
    place = first.copy()
    for i in range(num_started):
        orders[place[rank_of_started[i]]] = started[i]
        place[rank_of_started[i]] += 1
    return orders, first, start, end


@borrowing
def _run(
    rules: IntArray, stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, ranks: IntArray,
    queues: IntArray, turn_of_llm: IntArray, durations: IntArray, transfer: IntArray, rank_of_started: IntArray,
    started: IntArray, start: IntArray, end: IntArray, finish: IntArray, arrivals: IntArray,
) -> int:  # fmt: skip
    """The loop over time; returns how many operations started."""
    num_ranks, count = rules[NUM_RANKS], len(slots)
    num_started, num_arrivals, now = 0, 0, 0
    while True:
        for rank in range(num_ranks):
            if ranks[rank, TOUCHED] and ranks[rank, RUNNING] == NONE:
                operation = _choose(rules, stages, slots, turns, links, ranks, queues, durations, rank)
                if operation != NONE:
                    ranks[rank, RUNNING] = operation
                    finish[rank] = now + durations[operation]
                    if operation >= count and operation < 2 * count and slots[operation - count, SPLIT] == SPLITS:
                        finish[rank] = now + durations[operation + 2 * count]
                    start[operation] = now
                    end[operation] = finish[rank]
                    rank_of_started[num_started] = rank
                    started[num_started] = operation
                    num_started += 1
            ranks[rank, TOUCHED] = 0
        following = arrivals[0, 0] if num_arrivals else NEVER
        for rank in range(num_ranks):
            following = min(following, finish[rank])
        if following == NEVER:
            break
        now = following
        for rank in range(num_ranks):
            if finish[rank] == now:
                operation = ranks[rank, RUNNING]
                ranks[rank, RUNNING] = NONE
                finish[rank] = NEVER
                num_arrivals = _complete(
                    rules, stages, slots, turns, links, ranks, queues, turn_of_llm, operation, now, transfer, arrivals,
                    num_arrivals,
                )  # fmt: skip
        while num_arrivals and arrivals[0, 0] == now:
            operation = arrivals[0, 1]
            num_arrivals = pop(arrivals, num_arrivals)
            _deliver(stages, slots, ranks, queues, operation)
    return num_started


@compiled
def _prepare(stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, ranks: IntArray) -> None:
    """Fill the columns that change while time goes on."""
    _clear(slots, STARTED, MISSING_BACKWARD + 1)
    for slot in range(len(slots)):
        for i in range(slots[slot, FORWARD], slots[slot, FORWARD_END]):
            slots[links[i], MISSING_FORWARD] += 1
        slots[slot, MISSING_BACKWARD] = 1 + slots[slot, FORWARD_END] - slots[slot, FORWARD]
    _clear(stages, LOWEST, STAGE_COLUMNS)
    ranks[:, RUNNING] = NONE
    ranks[:, TOUCHED] = 1
    ranks[:, FIRST_OF_RANK] = NONE
    for stage in range(len(stages) - 1, -1, -1):
        stages[stage, NEXT_OF_RANK] = ranks[stages[stage, RANK], FIRST_OF_RANK]
        ranks[stages[stage, RANK], FIRST_OF_RANK] = stage
        stages[stage, LOWEST] = stages[stage, SLOT_FIRST]
        stages[stage, OLDEST] = stages[stage, TURN_FIRST]
        ranks[stages[stage, RANK], FORWARDS_LEFT] += stages[stage, SLOT_END] - stages[stage, SLOT_FIRST]
        for slot in range(stages[stage, SLOT_FIRST], stages[stage, SLOT_END]):
            if slots[slot, MISSING_FORWARD] == 0:
                stages[stage, NUM_READY] += 1
    for rank in range(1, len(ranks)):
        ranks[rank, PLACE] = ranks[rank - 1, PLACE] + ranks[rank - 1, FORWARDS_LEFT]
    ranks[:, WEIGHT_HEAD] = ranks[:, PLACE]
    ranks[:, WEIGHT_TAIL] = ranks[:, PLACE]
    _clear(turns, UNFINISHED, TURN_COLUMNS)
    for turn in range(len(turns)):
        turns[turn, UNFINISHED] = turns[turn, UNSTARTED] = turns[turn, SLOTS_END] - turns[turn, SLOTS]
        for i in range(turns[turn, SLOTS], turns[turn, SLOTS_END]):
            turns[turn, UNSTARTED_AMOUNT] += slots[links[i], AMOUNT]


@borrowing
def _clear(matrix: IntArray, first: int, end: int) -> None:
    """Zero some columns; a slice would compile for seconds."""
    for row in range(len(matrix)):
        for column in range(first, end):
            matrix[row, column] = 0


@inlined
def _choose(
    rules: IntArray, stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, ranks: IntArray,
    queues: IntArray, durations: IntArray, rank: int,
) -> int:  # fmt: skip
    """The next operation of a free rank, taken off its list."""
    count = len(slots)
    may = ranks[rank, NUM_READY_BACKWARD] > 0 and not (rules[PHASES] and ranks[rank, FORWARDS_LEFT])
    if may and (rules[FIRST] == BACKWARD_FIRST or (rules[FIRST] == ALTERNATE and not ranks[rank, LAST_WAS_BACKWARD])):
        ranks[rank, LAST_WAS_BACKWARD] = 1
        return count + _take_backward(rules, stages, slots, links, ranks, queues, durations, rank)
    slot = _choose_forward(rules, stages, slots, turns, links, ranks, rank)
    if slot != NONE:
        ranks[rank, LAST_WAS_BACKWARD] = 0
        ranks[rank, FORWARDS_LEFT] -= 1
        take(stages, slots, turns, links, slot)
        return slot
    if may:
        ranks[rank, LAST_WAS_BACKWARD] = 1
        return count + _take_backward(rules, stages, slots, links, ranks, queues, durations, rank)
    if ranks[rank, WEIGHT_HEAD] < ranks[rank, WEIGHT_TAIL]:
        ranks[rank, WEIGHT_HEAD] += 1
        return 2 * count + queues[ranks[rank, WEIGHT_HEAD] - 1, 1]
    return NONE


@inlined
def _take_backward(
    rules: IntArray, stages: IntArray, slots: IntArray, links: IntArray, ranks: IntArray, queues: IntArray,
    durations: IntArray, rank: int,
) -> int:  # fmt: skip
    first, size = ranks[rank, PLACE], ranks[rank, NUM_READY_BACKWARD]
    best = first
    for i in range(first + 1, first + size):
        if slots[queues[i, 0], BACKWARD_KEY] < slots[queues[best, 0], BACKWARD_KEY]:
            best = i
    slot = queues[best, 0]
    queues[best, 0] = queues[first + size - 1, 0]
    ranks[rank, NUM_READY_BACKWARD] -= 1
    if slots[slot, SPLIT] == SPLITS:
        count = len(slots)
        # What it saves the ranks that wait for its gradients.
        saved = durations[count + slot] - durations[3 * count + slot]
        if saved <= 0 or (rules[SPLIT_FOR_WAITING] and not is_waited_for(stages, slots, links, ranks, slot, rank)):
            slots[slot, SPLIT] = WHOLE
        else:
            keep_gradients(stages, slots, slot)
    return slot


@inlined
def _choose_forward(
    rules: IntArray, stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, ranks: IntArray, rank: int
) -> int:
    best, following = NONE, ranks[rank, FIRST_OF_RANK]
    while following != NONE:
        stage, following = following, stages[following, NEXT_OF_RANK]
        if not stages[stage, NUM_READY]:
            continue
        # What has started never comes back, so the search for the first unit that has not goes on where it stopped.
        end = stages[stage, SLOT_END]
        i = stages[stage, LOWEST]
        while i < end and slots[slots[i, SEQUENCE], STARTED]:
            i += 1
        stages[stage, LOWEST] = i
        while i < end and (slots[slots[i, SEQUENCE], STARTED] or slots[slots[i, SEQUENCE], MISSING_FORWARD]):
            i += 1
        slot = slots[i, SEQUENCE]
        if best != NONE and slots[slot, FORWARD_KEY] >= slots[best, FORWARD_KEY]:
            continue
        if not inside_window(rules, stages, slots, turns, stage, slot):
            continue
        if not fits(stages, slots, turns, links, stage, slot):
            slot = _of_oldest(rules, stages, slots, turns, links, stage)
        if slot != NONE and (best == NONE or slots[slot, FORWARD_KEY] < slots[best, FORWARD_KEY]):
            best = slot
    return best


@compiled
def _of_oldest(rules: IntArray, stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, stage: int) -> int:
    """A unit that may start and that the oldest unfinished language-model microbatch waits for."""
    oldest = stages[stage, OLDEST]
    if oldest >= stages[stage, TURN_END]:
        return NONE
    for i in range(turns[oldest, SLOTS], turns[oldest, SLOTS_END]):
        slot = links[i]
        if slots[slot, MISSING_FORWARD] or slots[slot, STARTED]:
            continue
        if inside_window(rules, stages, slots, turns, stage, slot) and fits(stages, slots, turns, links, stage, slot):
            return slot
    return NONE


@inlined
def _complete(
    rules: IntArray, stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, ranks: IntArray,
    queues: IntArray, turn_of_llm: IntArray, operation: int, now: int, transfer: IntArray, arrivals: IntArray,
    num_arrivals: int,
) -> int:  # fmt: skip
    """Hand on what an operation made. Returns how many arrivals are on their way."""
    count = len(slots)
    kind, slot = 0, operation
    while slot >= count:  # No division: this runs for every operation.
        kind, slot = kind + 1, slot - count
    stage = slots[slot, STAGE]
    rank = stages[stage, RANK]
    ranks[rank, TOUCHED] = 1
    if kind == 0:
        for i in range(slots[slot, FORWARD], slots[slot, FORWARD_END]):
            target = links[i]
            if stages[slots[target, STAGE], RANK] != rank and transfer[slot]:
                num_arrivals = push(arrivals, num_arrivals, now + transfer[slot], target)
            else:
                _deliver(stages, slots, ranks, queues, target)
        if stages[stage, HAS_BACKWARD]:
            _deliver(stages, slots, ranks, queues, count + slot)
        else:
            leave_window(stages, stage)
            release(stages, slots, turns, links, slot)
            if stage >= rules[FIRST_LLM_STAGE]:
                finish(stages, slots, turns, links, slot)
        if stage == rules[FIRST_LLM_STAGE]:
            unit = slot - stages[stage, SLOT_FIRST]
            # Untrained encoder stages get no gradients: their part is done when the language model has taken it.
            for encoder_stage in range(rules[FIRST_LLM_STAGE]):
                turn = turn_of_llm[encoder_stage, unit]
                if not stages[encoder_stage, HAS_BACKWARD] and turn != NONE:
                    turns[turn, UNFINISHED] = 0
                    move_oldest(stages, turns, encoder_stage)
                    ranks[stages[encoder_stage, RANK], TOUCHED] = 1
    elif kind == 1:
        for i in range(slots[slot, BACKWARD], slots[slot, BACKWARD_END]):
            target = links[i]
            if stages[slots[target, STAGE], RANK] != rank and transfer[target]:
                num_arrivals = push(arrivals, num_arrivals, now + transfer[target], count + target)
            else:
                _deliver(stages, slots, ranks, queues, count + target)
        leave_window(stages, stage)
        finish(stages, slots, turns, links, slot)
        if slots[slot, SPLIT] == SPLITS:
            stages[stage, WEIGHTS_LEFT] += 1
            queues[ranks[rank, WEIGHT_TAIL], 1] = slot
            ranks[rank, WEIGHT_TAIL] += 1
        else:
            release(stages, slots, turns, links, slot)
    else:
        stages[stage, WEIGHTS_LEFT] -= 1
        release(stages, slots, turns, links, slot)
        release_gradients(stages, slots, slot)
    return num_arrivals


@compiled
def _deliver(stages: IntArray, slots: IntArray, ranks: IntArray, queues: IntArray, operation: int) -> None:
    """One of the inputs of an operation is there."""
    count = len(slots)
    slot, column = operation, MISSING_FORWARD
    if operation >= count:
        slot, column = operation - count, MISSING_BACKWARD
    slots[slot, column] -= 1
    if slots[slot, column]:
        return
    stage = slots[slot, STAGE]
    rank = stages[stage, RANK]
    if operation < count:
        stages[stage, NUM_READY] += 1
    else:
        queues[ranks[rank, PLACE] + ranks[rank, NUM_READY_BACKWARD], 0] = slot
        ranks[rank, NUM_READY_BACKWARD] += 1
    ranks[rank, TOUCHED] = 1
