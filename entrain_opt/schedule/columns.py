"""Columns of the matrices that the compiled list scheduler (`kernel.py`) works on; -1 means none or unlimited.

Few matrices with named columns, because every array that a compiled function takes adds to its compile time. The first
columns of each matrix are given, the rest is the kernel's own and starts at zero.

A *turn* is a language-model microbatch that needs a stage's module, in running order, numbered over all stages.
*Links* is one array that holds the lists of slots and turns end to end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

NONE = -1

#: What a split backward keeps for its weight gradients beyond the activations, in percent of these: the gradients that
#: arrived at the matrix products and norms. Measured 55 to 58 for Llama's layers.
KEPT_PERCENT = 60

# Rules: [7]. Which of a ready backward and a ready forward goes first, and the rest of `admission.Rule`.
FIRST, WEIGHT_LIMIT, PHASES, SPLIT_FOR_WAITING, FIRST_LLM_STAGE, NUM_RANKS, NUM_RULES = range(7)
ALTERNATE, BACKWARD_FIRST, FORWARD_FIRST = range(3)

# Stages: [S, STAGE_COLUMNS].
RANK, SLOT_FIRST, SLOT_END, HAS_BACKWARD, LIMIT, DEPTH, ENTRY_LIMIT, GROUP, GUARDED, TURN_FIRST, TURN_END = range(11)
LOWEST, NUM_READY, HELD, NUM_HELD, IN_FLIGHT, GROUP_IN_FLIGHT, WEIGHTS_LEFT, OLDEST, NEXT_OF_RANK = range(11, 20)
STAGE_COLUMNS = 20

# Slots: [n, SLOT_COLUMNS]. FORWARD, BACKWARD and TURNS are ranges of links: who needs the slot's output, who gets
# gradients from it, which turns need it. SEQUENCE: row i of a stage names the slot that runs i-th; POSITION: its
# reverse. SPLIT: how the backward runs; the scheduler makes WHOLE of SPLITS where that gains nothing, or where memory
# is short.
WHOLE, SPLITS = range(2)
STAGE, AMOUNT, SPLIT, FORWARD, FORWARD_END, BACKWARD, BACKWARD_END, TURNS, TURNS_END = range(9)
SEQUENCE, POSITION, FORWARD_KEY, BACKWARD_KEY, STARTED, MISSING_FORWARD, MISSING_BACKWARD, SLOT_COLUMNS = range(9, 17)

# Turns: [T, TURN_COLUMNS]. REACH: the highest position that serves this turn and all before; SLOTS: a range of links.
REACH, SLOTS, SLOTS_END, UNFINISHED, UNSTARTED, UNSTARTED_AMOUNT, HELD_OF_TURN, NUM_HELD_OF_TURN = range(8)
TURN_COLUMNS = 8

# Ranks: [R, RANK_COLUMNS]; PLACE is where a rank's rows in the queues start. A rank's stages are a chain from
# FIRST_OF_RANK by NEXT_OF_RANK.
PLACE, NUM_READY_BACKWARD, WEIGHT_HEAD, WEIGHT_TAIL, TOUCHED, RUNNING, LAST_WAS_BACKWARD, FORWARDS_LEFT = range(8)
FIRST_OF_RANK, RANK_COLUMNS = range(8, 10)


class Pipeline(NamedTuple):
    """One replica's work and rules in the matrices above.

    Attributes:
        rules, stages, slots, turns, links: as described above.
        turn_of_llm: [S, language-model units] turn of a unit in an encoder stage.
    """

    rules: IntArray
    stages: IntArray
    slots: IntArray
    turns: IntArray
    links: IntArray
    turn_of_llm: IntArray
