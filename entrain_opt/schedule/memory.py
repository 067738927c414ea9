"""What a stage holds, and whether one more unit may start: `admission.py` compiled.

All functions change or read the matrices of `columns.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.compiled import compiled
from entrain_opt.schedule.columns import (
    AMOUNT,
    BACKWARD,
    BACKWARD_END,
    DEPTH,
    ENTRY_LIMIT,
    FIRST_LLM_STAGE,
    GROUP,
    GROUP_IN_FLIGHT,
    GUARDED,
    HELD,
    HELD_OF_TURN,
    IN_FLIGHT,
    KEPT_PERCENT,
    LIMIT,
    NONE,
    NUM_HELD,
    NUM_HELD_OF_TURN,
    NUM_READY,
    NUM_READY_BACKWARD,
    OLDEST,
    POSITION,
    RANK,
    REACH,
    SPLIT,
    STAGE,
    STARTED,
    TURN_END,
    TURNS,
    TURNS_END,
    UNFINISHED,
    UNSTARTED,
    UNSTARTED_AMOUNT,
    WEIGHT_LIMIT,
    WEIGHTS_LEFT,
    WHOLE,
)

IntArray = NDArray[np.int64]


@compiled
def inside_window(rules: IntArray, stages: IntArray, slots: IntArray, turns: IntArray, stage: int, slot: int) -> bool:
    depth, entry_limit = stages[stage, DEPTH], stages[stage, ENTRY_LIMIT]
    full = entry_limit != NONE and stages[stages[stage, GROUP], GROUP_IN_FLIGHT] >= entry_limit
    if stage >= rules[FIRST_LLM_STAGE]:
        if full or (depth != NONE and stages[stage, IN_FLIGHT] >= depth):
            return False
    elif full or depth != NONE:
        oldest, last, position = stages[stage, OLDEST], stages[stage, TURN_END] - 1, slots[slot, POSITION]
        ahead = oldest <= last and position > turns[oldest, REACH]
        if ahead and (full or position > turns[min(oldest + depth - 1, last), REACH]):
            return False
    weights_wait = rules[WEIGHT_LIMIT] != NONE and stages[stage, WEIGHTS_LEFT] > 0
    return not (weights_wait and stages[stage, NUM_HELD] >= rules[WEIGHT_LIMIT])


@compiled
def fits(stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, stage: int, slot: int) -> bool:
    limit = stages[stage, LIMIT]
    if limit == NONE:
        return True
    if stages[stage, NUM_HELD] and stages[stage, HELD] + slots[slot, AMOUNT] > limit:
        return False
    return not stages[stage, GUARDED] or _stays_safe(stages, slots, turns, links, stage, slot, limit)


@compiled
def _stays_safe(
    stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, stage: int, slot: int, limit: int,
) -> bool:  # fmt: skip
    """The banker's algorithm: afterwards the unfinished microbatches can still be completed one after the other."""
    amount = slots[slot, AMOUNT]
    mine = links[slots[slot, TURNS]]
    held, num_held = stages[stage, HELD] + amount, stages[stage, NUM_HELD] + 1
    for turn in range(stages[stage, OLDEST], stages[stage, TURN_END]):
        own = 1 if turn == mine else 0
        count = turns[turn, UNSTARTED] - own
        if count and held + turns[turn, UNSTARTED_AMOUNT] - amount * own > limit and (num_held or count > 1):
            return False
        held -= turns[turn, HELD_OF_TURN] + amount * own
        num_held -= turns[turn, NUM_HELD_OF_TURN] + own
        if num_held <= 0:
            return True
    return True


@compiled
def take(stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, slot: int) -> None:
    stage, amount = slots[slot, STAGE], slots[slot, AMOUNT]
    slots[slot, STARTED] = 1
    stages[stage, NUM_READY] -= 1
    stages[stage, HELD] += amount
    stages[stage, NUM_HELD] += 1
    stages[stage, IN_FLIGHT] += 1
    stages[stages[stage, GROUP], GROUP_IN_FLIGHT] += 1
    if stages[stage, GUARDED]:
        turn = links[slots[slot, TURNS]]
        turns[turn, UNSTARTED] -= 1
        turns[turn, UNSTARTED_AMOUNT] -= amount
        turns[turn, HELD_OF_TURN] += amount
        turns[turn, NUM_HELD_OF_TURN] += 1


@compiled
def release(stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, slot: int) -> None:
    """The activations of a slot are gone."""
    stage, amount = slots[slot, STAGE], slots[slot, AMOUNT]
    stages[stage, HELD] -= amount
    stages[stage, NUM_HELD] -= 1
    if stages[stage, GUARDED]:
        turn = links[slots[slot, TURNS]]
        turns[turn, HELD_OF_TURN] -= amount
        turns[turn, NUM_HELD_OF_TURN] -= 1


@compiled
def keep_gradients(stages: IntArray, slots: IntArray, slot: int) -> None:
    """A split backward starts, if memory has room for what it keeps; else it runs whole."""
    stage = slots[slot, STAGE]
    limit, kept = stages[stage, LIMIT], kept_amount(slots[slot, AMOUNT])
    if limit != NONE and stages[stage, HELD] + kept > limit:
        slots[slot, SPLIT] = WHOLE
    else:
        stages[stage, HELD] += kept


@compiled
def release_gradients(stages: IntArray, slots: IntArray, slot: int) -> None:
    """The weight gradients of a split backward are done."""
    stages[slots[slot, STAGE], HELD] -= kept_amount(slots[slot, AMOUNT])


@compiled
def kept_amount(amount: int) -> int:
    """What a split backward holds beyond the activations, in the same unit."""
    return (amount * KEPT_PERCENT + 99) // 100


@compiled
def finish(stages: IntArray, slots: IntArray, turns: IntArray, links: IntArray, slot: int) -> None:
    """The microbatches that need a slot have got what they wait for on its stage."""
    stage = slots[slot, STAGE]
    for i in range(slots[slot, TURNS], slots[slot, TURNS_END]):
        turns[links[i], UNFINISHED] -= 1
    move_oldest(stages, turns, stage)


@compiled
def move_oldest(stages: IntArray, turns: IntArray, stage: int) -> None:
    oldest = stages[stage, OLDEST]
    while oldest < stages[stage, TURN_END] and turns[oldest, UNFINISHED] == 0:
        oldest += 1
    stages[stage, OLDEST] = oldest


@compiled
def leave_window(stages: IntArray, stage: int) -> None:
    """A unit is no longer in flight: its input gradients are done, or it has none."""
    stages[stage, IN_FLIGHT] -= 1
    stages[stages[stage, GROUP], GROUP_IN_FLIGHT] -= 1


@compiled
def is_waited_for(stages: IntArray, slots: IntArray, links: IntArray, ranks: IntArray, slot: int, rank: int) -> bool:
    """Whether gradients of a slot go to another rank that has no backward to run."""
    for i in range(slots[slot, BACKWARD], slots[slot, BACKWARD_END]):
        other = stages[slots[links[i], STAGE], RANK]
        if other != rank and ranks[other, NUM_READY_BACKWARD] == 0:
            return True
    return False
