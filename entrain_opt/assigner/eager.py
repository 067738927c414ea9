"""`iteration_ticks` for the common cases, three to six times as fast.

They are `eager`, `eager_split`, and `zero_bubble` where all stages have a memory limit.

`unit_kernel.py` says what the units are, `eager_kernel.py` plays them; a test holds the answer to the general one's.

Price: 10 us for 128 samples, and the playing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner.eager_kernel import play_eager
from entrain_opt.assigner.pipeline_columns import (
    ENCODER,
    FIRST_STAGE,
    FIXED_BACKWARD,
    FIXED_FORWARD,
    FIXED_SPLIT,
    FIXED_TRANSFER,
    INFEASIBLE,
    NUM_STAGES,
    PATCHES_LIMIT,
    SPLIT_BACKWARD,
    SPLIT_FOR_WAITING,
    SPLIT_PERMILLE,
    TOKENS_LIMIT,
    WEIGHT_PERMILLE,
)
from entrain_opt.assigner.unit_kernel import breaks_limits, encoder_units, llm_units, sources_of_llm
from entrain_opt.compiled import compiled
from entrain_opt.schedule.columns import NONE, RANK

IntArray = NDArray[np.int64]


@compiled
def eager_ticks(
    encoder_microbatch: IntArray, llm_microbatch: IntArray, num_microbatches: int, media: IntArray, tokens: IntArray,
    media_ticks: IntArray, sample_ticks: IntArray, stage_costs: IntArray, encoders: IntArray, stages: IntArray,
    settings: IntArray,
) -> float:  # fmt: skip
    """Ticks of one iteration, or INFEASIBLE; arguments as `iteration_ticks`."""
    num_stages, num_llm_stages = len(stages), sample_ticks.shape[1]
    first_llm = num_stages - num_llm_stages
    llm_unit, llm_amount = llm_units(llm_microbatch, num_microbatches, tokens)
    num_llm = len(llm_amount)
    if settings[TOKENS_LIMIT] != NONE:
        for unit in range(num_llm):
            if llm_amount[unit] > settings[TOKENS_LIMIT]:
                return INFEASIBLE
    unit_of_media, unit_first, unit_microbatch, unit_amount, pair_first, pair_llm = encoder_units(
        encoder_microbatch, llm_microbatch, llm_unit, num_llm, num_microbatches, media, encoders
    )
    source_first, sources = sources_of_llm(pair_first, pair_llm, num_llm)
    if settings[PATCHES_LIMIT] != NONE and breaks_limits(
        encoder_microbatch, num_microbatches, media, unit_first, unit_amount, source_first, sources, encoders, stages,
        settings,
    ):  # fmt: skip
        return INFEASIBLE
    width = num_llm
    for encoder in range(len(encoders)):
        width = max(width, unit_first[encoder + 1] - unit_first[encoder])
    # Durations: [forward, backward, transfer, weight gradients, backward without these] of every unit on every stage.
    ticks = np.empty((5, num_stages, width), dtype=np.int64)
    for stage in range(num_stages):
        ticks[0, stage, :] = stage_costs[stage, FIXED_FORWARD]
        ticks[1, stage, :] = stage_costs[stage, FIXED_BACKWARD]
        ticks[2, stage, :] = stage_costs[stage, FIXED_TRANSFER]
    for kind in range(3):
        for encoder in range(len(encoders)):
            first = encoders[encoder, FIRST_STAGE]
            for stage in range(first, first + encoders[encoder, NUM_STAGES]):
                for item in range(len(media)):
                    if media[item, ENCODER] == encoder:
                        ticks[kind, stage, unit_of_media[item] - unit_first[encoder]] += media_ticks[kind, stage, item]
        for stage in range(num_llm_stages):
            for sample in range(len(llm_microbatch)):
                unit = llm_unit[llm_microbatch[sample]]
                ticks[kind, first_llm + stage, unit] += sample_ticks[kind, stage, sample]
    for stage in range(num_stages - 1):
        target = stage + 1
        for encoder in range(len(encoders)):
            if stage == encoders[encoder, FIRST_STAGE] + encoders[encoder, NUM_STAGES] - 1:
                target = first_llm
        if stages[stage, RANK] == stages[target, RANK]:
            ticks[2, stage, :] = 0  # Nothing is sent.
    splits = settings[SPLIT_BACKWARD] != 0
    if splits:
        for stage in range(num_stages):
            for unit in range(width):
                by_items = ticks[1, stage, unit] - stage_costs[stage, FIXED_BACKWARD]
                ticks[3, stage, unit] = by_items * stage_costs[stage, WEIGHT_PERMILLE] // 1000
                more = by_items * stage_costs[stage, SPLIT_PERMILLE] // 1000 + stage_costs[stage, FIXED_SPLIT]
                ticks[4, stage, unit] = ticks[1, stage, unit] - ticks[3, stage, unit] + more
    microbatch = np.empty(len(unit_amount) + num_llm, dtype=np.int64)
    microbatch[: len(unit_amount)] = unit_microbatch
    for i in range(num_microbatches):
        if llm_unit[i] != NONE:
            microbatch[len(unit_amount) + llm_unit[i]] = i
    ticks_played = play_eager(
        ticks, splits, settings[SPLIT_FOR_WAITING] != 0, stages, encoders, first_llm, microbatch, llm_amount,
        unit_first, unit_amount, pair_first, pair_llm, source_first, sources,
    )  # fmt: skip
    return float(ticks_played) if ticks_played >= 0 else INFEASIBLE
