"""`iteration_ticks` for the common case: `eager` with one stage on each rank, six times as fast.

Units are laid out by counting sorts, and `eager_kernel.py` plays them. A test holds the answer to the general one's.

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
    FIXED_TRANSFER,
    NUM_STAGES,
    PATCHES,
    PATCHES_LIMIT,
    RETURNS,
    SAMPLE,
    TOKENS_LIMIT,
)
from entrain_opt.compiled import compiled
from entrain_opt.schedule.columns import LIMIT, NONE

IntArray = NDArray[np.int64]


@compiled
def eager_ticks(
    encoder_microbatch: IntArray, llm_microbatch: IntArray, num_microbatches: int, media: IntArray, tokens: IntArray,
    media_ticks: IntArray, sample_ticks: IntArray, stage_costs: IntArray, encoders: IntArray, stages: IntArray,
    settings: IntArray,
) -> int:  # fmt: skip
    """Ticks of one iteration, or -1 where the assignment breaks a memory limit; arguments as `iteration_ticks`."""
    num_stages, num_llm_stages = len(stages), sample_ticks.shape[1]
    first_llm = num_stages - num_llm_stages
    # Language-model units.
    llm_unit, num_llm = np.full(num_microbatches, NONE, dtype=np.int64), 0
    for sample in range(len(llm_microbatch)):
        llm_unit[llm_microbatch[sample]] = 0
    for microbatch in range(num_microbatches):
        if llm_unit[microbatch] == 0:
            llm_unit[microbatch] = num_llm
            num_llm += 1
    llm_amount = np.zeros(num_llm, dtype=np.int64)
    for sample in range(len(llm_microbatch)):
        llm_amount[llm_unit[llm_microbatch[sample]]] += tokens[sample]
    if settings[TOKENS_LIMIT] != NONE:
        for unit in range(num_llm):
            if llm_amount[unit] > settings[TOKENS_LIMIT]:
                return -1
    # Encoder units.
    unit_of_media, unit_first, unit_amount, pair_first, pair_llm = _encoder_units(
        encoder_microbatch, llm_microbatch, llm_unit, num_llm, num_microbatches, media, encoders
    )
    source_first, sources = _sources(pair_first, pair_llm, num_llm)
    if settings[PATCHES_LIMIT] != NONE and _breaks_limits(
        encoder_microbatch, num_microbatches, media, unit_first, unit_amount, source_first, sources, encoders, stages,
        settings,
    ):  # fmt: skip
        return -1
    width = num_llm
    for encoder in range(len(encoders)):
        width = max(width, unit_first[encoder + 1] - unit_first[encoder])
    # Durations: [forward, backward, transfer] of every unit on every stage.
    ticks = np.empty((3, num_stages, width), dtype=np.int64)
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
    return play_eager(
        ticks, stages, encoders, first_llm, num_llm, llm_amount, unit_first, unit_amount, pair_first, pair_llm,
        source_first, sources,
    )  # fmt: skip


@compiled
def _encoder_units(
    encoder_microbatch: IntArray, llm_microbatch: IntArray, llm_unit: IntArray, num_llm: int, num_microbatches: int,
    media: IntArray, encoders: IntArray,
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:  # fmt: skip
    """Units of all encoders in order of encoder, microbatch and (where gradients return) consumer.

    Returns:
        [M] unit of each item, [E + 1] first unit of each encoder, [units] patches, [units + 1] first pair of each
        unit, [pairs] its consumers.
    """
    count = len(media)
    # Two stable counting sorts: by consumer, then by encoder and microbatch.
    consumer = np.empty(count, dtype=np.int64)
    place = np.zeros(num_llm + 1, dtype=np.int64)
    for item in range(count):
        consumer[item] = llm_unit[llm_microbatch[media[item, SAMPLE]]]
        place[consumer[item] + 1] += 1
    for i in range(num_llm):
        place[i + 1] += place[i]
    by_consumer = np.empty(count, dtype=np.int64)
    for item in range(count):
        by_consumer[place[consumer[item]]] = item
        place[consumer[item]] += 1
    num_keys = len(encoders) * num_microbatches
    place = np.zeros(num_keys + 1, dtype=np.int64)
    for item in range(count):
        place[media[item, ENCODER] * num_microbatches + encoder_microbatch[item] + 1] += 1
    for i in range(num_keys):
        place[i + 1] += place[i]
    items = np.empty(count, dtype=np.int64)
    for i in range(count):
        item = by_consumer[i]
        key = media[item, ENCODER] * num_microbatches + encoder_microbatch[item]
        items[place[key]] = item
        place[key] += 1
    unit_of_media, unit_amount = np.empty(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    unit_first = np.zeros(len(encoders) + 1, dtype=np.int64)
    pair_first, pair_llm = np.empty(count + 1, dtype=np.int64), np.empty(count, dtype=np.int64)
    num_units, num_pairs, previous_key, previous_consumer = 0, 0, NONE, NONE
    for i in range(count):
        item = items[i]
        encoder = media[item, ENCODER]
        key = encoder * num_microbatches + encoder_microbatch[item]
        new_pair = key != previous_key or consumer[item] != previous_consumer
        if key != previous_key or (new_pair and encoders[encoder, RETURNS]):
            pair_first[num_units] = num_pairs
            unit_first[encoder + 1] += 1
            num_units += 1
        if new_pair:
            pair_llm[num_pairs] = consumer[item]
            num_pairs += 1
        previous_key, previous_consumer = key, consumer[item]
        unit_of_media[item] = num_units - 1
        unit_amount[num_units - 1] += media[item, PATCHES]
    pair_first[num_units] = num_pairs
    for encoder in range(len(encoders)):
        unit_first[encoder + 1] += unit_first[encoder]
    return unit_of_media, unit_first, unit_amount, pair_first[: num_units + 1], pair_llm[:num_pairs]


@compiled
def _sources(pair_first: IntArray, pair_llm: IntArray, num_llm: int) -> tuple[IntArray, IntArray]:
    """[llm units + 1] first source of each language-model unit, [pairs] the encoder units it waits for."""
    first = np.zeros(num_llm + 1, dtype=np.int64)
    for i in range(len(pair_llm)):
        first[pair_llm[i] + 1] += 1
    for i in range(num_llm):
        first[i + 1] += first[i]
    sources, place = np.empty(len(pair_llm), dtype=np.int64), first.copy()
    for unit in range(len(pair_first) - 1):
        for i in range(pair_first[unit], pair_first[unit + 1]):
            sources[place[pair_llm[i]]] = unit
            place[pair_llm[i]] += 1
    return first, sources


@compiled
def _breaks_limits(
    encoder_microbatch: IntArray, num_microbatches: int, media: IntArray, unit_first: IntArray, unit_amount: IntArray,
    source_first: IntArray, sources: IntArray, encoders: IntArray, stages: IntArray, settings: IntArray,
) -> bool:  # fmt: skip
    """Whether an encoder microbatch exceeds its cap, or what one language-model microbatch needs exceeds a stage's."""
    # Several encoders count as one for the cap of a microbatch.
    whole = np.zeros(num_microbatches, dtype=np.int64)
    for item in range(len(media)):
        whole[encoder_microbatch[item]] += media[item, PATCHES]
    for microbatch in range(num_microbatches):
        if whole[microbatch] > settings[PATCHES_LIMIT]:
            return True
    for encoder in range(len(encoders)):
        first, limit = encoders[encoder, FIRST_STAGE], NONE
        for stage in range(first, first + encoders[encoder, NUM_STAGES]):
            if stages[stage, LIMIT] != NONE and (limit == NONE or stages[stage, LIMIT] < limit):
                limit = stages[stage, LIMIT]
        if limit == NONE:
            continue
        for llm in range(len(source_first) - 1):
            needed, amount = 0, 0
            for i in range(source_first[llm], source_first[llm + 1]):
                if unit_first[encoder] <= sources[i] < unit_first[encoder + 1]:
                    needed += 1
                    amount += unit_amount[sources[i]]
            if needed > 1 and amount > limit:
                return True
    return False
