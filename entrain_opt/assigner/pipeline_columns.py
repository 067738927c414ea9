"""Columns of the matrices that the compiled evaluation of assignments (`pipeline.py`) takes."""

from __future__ import annotations

# Media items: [M, 3].
SAMPLE, ENCODER, PATCHES = range(3)
# Encoders: [E, 3]. Its first stage, how many it has, and whether the language model returns gradients to it.
FIRST_STAGE, NUM_STAGES, RETURNS = range(3)
# Costs of a stage: [S, 5] ticks per unit, the part of a backward that is weight gradients, in thousandths, and what an
# operation takes for orders that do not follow the durations.
FIXED_FORWARD, FIXED_BACKWARD, FIXED_TRANSFER, WEIGHT_PERMILLE, EVEN, NUM_STAGE_COSTS = range(6)
# Settings: [4]. Caps of one microbatch (-1: none), whether the order follows the durations, whether backwards are
# split.
PATCHES_LIMIT, TOKENS_LIMIT, TIMED, SPLIT_BACKWARD, NUM_SETTINGS = range(5)

#: Instead of ticks: the assignment breaks a memory limit.
INFEASIBLE = -1.0
