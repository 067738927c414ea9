"""Columns of the matrices that the compiled evaluation of assignments (`pipeline.py`) takes."""

from __future__ import annotations

# Media items: [M, 3].
SAMPLE, ENCODER, PATCHES = range(3)
# Encoders: [E, 3]. Its first stage, how many it has, and whether the language model returns gradients to it.
FIRST_STAGE, NUM_STAGES, RETURNS = range(3)
# Costs of a stage: [S, 7] ticks per unit (the last for a split backward), the part of a backward that is weight
# gradients and what a split one takes more, in thousandths, and an operation where orders do not follow durations.
FIXED_FORWARD, FIXED_BACKWARD, FIXED_TRANSFER, FIXED_SPLIT, WEIGHT_PERMILLE, SPLIT_PERMILLE, EVEN = range(7)
NUM_STAGE_COSTS = 7
# Settings: [5]. Caps of one microbatch (-1: none), whether the order follows the durations, whether backwards are
# split, and only where a rank waits for them.
PATCHES_LIMIT, TOKENS_LIMIT, TIMED, SPLIT_BACKWARD, SPLIT_FOR_WAITING, NUM_SETTINGS = range(6)

#: Instead of ticks: the assignment breaks a memory limit.
INFEASIBLE = -1.0
