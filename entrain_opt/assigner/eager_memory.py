"""What a stage holds in the fast evaluation (`eager_kernel.py`), and whether one more unit may start.

The rules are those of `schedule/memory.py`; a test holds both kernels together.

Price: O(1) per question, O(microbatches in flight) where an encoder's memory is limited.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.compiled import borrowing, inlined
from entrain_opt.schedule.columns import GUARDED, LIMIT, NONE

IntArray = NDArray[np.int64]
ByteArray = NDArray[np.uint8]

# States of a unit's forward or backward on a stage.
WAITS, READY, STARTED = 0, 1, 2
# Where a stage's outputs go, and where its units are, of all encoders' units and of all units: [S, 5].
FORWARD_ROUTE, BACKWARD_ROUTE, BASE, NUM_UNITS, MICROBATCH = range(5)
# What a stage holds: [S, 5] amount and units; of its turns (language-model units), the oldest that is unfinished, the
# first that has not started all its units, the latest that has started one.
AMOUNT, UNITS, OLDEST, OPEN, LATEST = range(5)
# What a language-model unit has on a limited encoder stage: [S, units, 5].
UNSTARTED, UNSTARTED_AMOUNT, HELD, NUM_HELD, UNFINISHED = range(5)


@inlined
def take(
    held: IntArray, turns: IntArray, routes: IntArray, first_llm: int, llm_amount: IntArray, unit_amount: IntArray,
    pair_first: IntArray, pair_llm: IntArray, stage: int, unit: int,
) -> None:  # fmt: skip
    """A forward of a limited stage starts."""
    amount = amount_of(routes, first_llm, llm_amount, unit_amount, stage, unit)
    held[stage, AMOUNT] += amount
    held[stage, UNITS] += 1
    if stage < first_llm:
        turn = pair_llm[pair_first[routes[stage, BASE] + unit]]
        turns[stage, turn, UNSTARTED] -= 1
        turns[stage, turn, UNSTARTED_AMOUNT] -= amount
        turns[stage, turn, HELD] += amount
        turns[stage, turn, NUM_HELD] += 1
        held[stage, LATEST] = max(held[stage, LATEST], turn)
        advance(turns, held, stage, OPEN, UNSTARTED)


@inlined
def release(
    held: IntArray, turns: IntArray, routes: IntArray, first_llm: int, llm_amount: IntArray, unit_amount: IntArray,
    pair_first: IntArray, pair_llm: IntArray, stage: int, unit: int,
) -> None:  # fmt: skip
    """The activations of a unit on a limited stage are gone."""
    amount = amount_of(routes, first_llm, llm_amount, unit_amount, stage, unit)
    held[stage, UNITS] -= 1
    held[stage, AMOUNT] -= amount
    if stage < first_llm:
        turn = pair_llm[pair_first[routes[stage, BASE] + unit]]
        turns[stage, turn, HELD] -= amount
        turns[stage, turn, NUM_HELD] -= 1


@inlined
def amount_of(
    routes: IntArray, first_llm: int, llm_amount: IntArray, unit_amount: IntArray, stage: int, unit: int
) -> int:
    """Tokens or patches of a unit."""
    return llm_amount[unit] if stage >= first_llm else unit_amount[routes[stage, BASE] + unit]


@borrowing
def forward_that_fits(
    stages: IntArray, state: ByteArray, held: IntArray, turns: IntArray, unit_amount: IntArray, pair_first: IntArray,
    pair_llm: IntArray, source_first: IntArray, sources: IntArray, base: int, end: int,
    stage: int, first: int,
) -> int:  # fmt: skip
    """A limited encoder stage's first ready unit, if memory admits it, or else one of the oldest turn."""
    if _fits(stages, held, turns, unit_amount[base + first], pair_llm[pair_first[base + first]], stage):
        return first
    oldest = held[stage, OLDEST]
    if oldest < turns.shape[1]:
        for i in range(source_first[oldest], source_first[oldest + 1]):
            unit = sources[i] - base
            ready = 0 <= unit < end and state[0, stage, unit] == READY
            if ready and _fits(stages, held, turns, unit_amount[base + unit], oldest, stage):
                return unit
    return NONE


@borrowing
def _fits(stages: IntArray, held: IntArray, turns: IntArray, amount: int, mine: int, stage: int) -> bool:
    """Whether a unit of turn `mine` may start: `schedule/memory.py` says why."""
    limit = stages[stage, LIMIT]
    if held[stage, UNITS] and held[stage, AMOUNT] + amount > limit:
        return False
    if not stages[stage, GUARDED]:
        return True
    if mine <= held[stage, OPEN] and held[stage, LATEST] <= mine and turns[stage, mine, UNSTARTED] == 1:
        return True  # All turns up to this one have started everything, and no later one has.
    total, num_held = held[stage, AMOUNT] + amount, held[stage, UNITS] + 1
    for turn in range(held[stage, OLDEST], turns.shape[1]):
        own = 1 if turn == mine else 0
        count = turns[stage, turn, UNSTARTED] - own
        if count and total + turns[stage, turn, UNSTARTED_AMOUNT] - amount * own > limit and (num_held or count > 1):
            return False
        total -= turns[stage, turn, HELD] + amount * own
        num_held -= turns[stage, turn, NUM_HELD] + own
        if num_held <= 0:
            return True
    return True


@inlined
def advance(turns: IntArray, held: IntArray, stage: int, place: int, left: int) -> None:
    """Move OLDEST (or OPEN) on to the next turn that has any UNFINISHED (UNSTARTED) units left."""
    turn = held[stage, place]
    while turn < turns.shape[1] and turns[stage, turn, left] == 0:
        turn += 1
    held[stage, place] = turn
