"""What a rank of the fast evaluation (`eager_kernel.py`) runs next.

Price: O(stages of the rank) per question, and what memory asks (`eager_memory.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner.eager_memory import (
    AMOUNT,
    BASE,
    MICROBATCH,
    NUM_UNITS,
    READY,
    UNITS,
    forward_that_fits,
)
from entrain_opt.compiled import inlined
from entrain_opt.schedule.columns import LIMIT, NONE

IntArray = NDArray[np.int64]
ByteArray = NDArray[np.uint8]


@inlined
def lowest_ready(state: ByteArray, lowest: IntArray, kind: int, stage: int) -> int:
    """The first ready unit of a stage that has any."""
    unit = lowest[kind, stage]
    while state[kind, stage, unit] != READY:
        unit += 1
    lowest[kind, stage] = unit
    return unit


@inlined
def stage_that_goes_first(
    stages: IntArray, state: ByteArray, num_ready: IntArray, lowest: IntArray, held: IntArray, turns: IntArray,
    routes: IntArray, first_llm: int, microbatch: IntArray, llm_amount: IntArray, unit_amount: IntArray,
    pair_first: IntArray, pair_llm: IntArray, source_first: IntArray, sources: IntArray, next_stage: IntArray,
    first_stage: int, was_backward: bool,
) -> int:  # fmt: skip
    """Of the stages of a rank, the one that runs next: the one with the earliest microbatch, nearest to the loss."""
    best, earliest, stage = NONE, 0, first_stage
    while stage != NONE:
        if num_ready[1, stage]:
            turn = microbatch[routes[stage, MICROBATCH] + lowest_ready(state, lowest, 1, stage)]
            if best == NONE or turn <= earliest:
                best, earliest = stage, turn
        stage = next_stage[stage]
    if best != NONE and not was_backward:
        return best
    backward, best, stage = best, NONE, first_stage
    while stage != NONE:
        if num_ready[0, stage]:
            turn = microbatch[routes[stage, MICROBATCH] + lowest_ready(state, lowest, 0, stage)]
            if best == NONE or turn <= earliest:
                unit = forward_that_may(
                    stages, state, lowest, held, turns, routes, first_llm, llm_amount, unit_amount, pair_first,
                    pair_llm, source_first, sources, stage,
                )  # fmt: skip
                turn = microbatch[routes[stage, MICROBATCH] + unit]
                if unit != NONE and (best == NONE or turn <= earliest):
                    best, earliest = stage, turn
        stage = next_stage[stage]
    if best != NONE:
        return best
    return backward if backward != NONE else first_stage


@inlined
def forward_that_may(
    stages: IntArray, state: ByteArray, lowest: IntArray, held: IntArray, turns: IntArray, routes: IntArray,
    first_llm: int, llm_amount: IntArray, unit_amount: IntArray, pair_first: IntArray, pair_llm: IntArray,
    source_first: IntArray, sources: IntArray, stage: int,
) -> int:  # fmt: skip
    """The next forward of a stage with ready ones; NONE if memory admits none."""
    unit = lowest_ready(state, lowest, 0, stage)
    limit = stages[stage, LIMIT]
    if limit == NONE:
        return unit
    if stage >= first_llm:
        return NONE if held[stage, UNITS] and held[stage, AMOUNT] + llm_amount[unit] > limit else unit
    return forward_that_fits(
        stages, state, held, turns, unit_amount, pair_first, pair_llm, source_first, sources, routes[stage, BASE],
        routes[stage, NUM_UNITS], stage, unit,
    )  # fmt: skip
