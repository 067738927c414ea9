"""Which units an assignment makes, compiled.

A unit of the language model is a microbatch with samples. A unit of an encoder is what it runs at once: the media items
of a microbatch, or, where gradients return, those of them that one language-model microbatch consumes. A pair is a unit
of an encoder and a consumer.

Price: linear in media items and microbatches (counting sorts).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner.pipeline_columns import (
    ENCODER,
    FIRST_STAGE,
    NUM_STAGES,
    PATCHES,
    PATCHES_LIMIT,
    RETURNS,
    SAMPLE,
)
from entrain_opt.compiled import compiled
from entrain_opt.schedule.columns import LIMIT, NONE

IntArray = NDArray[np.int64]


@compiled
def llm_units(llm_microbatch: IntArray, num_microbatches: int, tokens: IntArray) -> tuple[IntArray, IntArray]:
    """[K] language-model unit of each microbatch that has samples (else NONE), and [units] their tokens."""
    unit, count = np.full(num_microbatches, NONE, dtype=np.int64), 0
    for sample in range(len(llm_microbatch)):
        unit[llm_microbatch[sample]] = 0
    for microbatch in range(num_microbatches):
        if unit[microbatch] == 0:
            unit[microbatch] = count
            count += 1
    amount = np.zeros(count, dtype=np.int64)
    for sample in range(len(llm_microbatch)):
        amount[unit[llm_microbatch[sample]]] += tokens[sample]
    return unit, amount


@compiled
def encoder_units(
    encoder_microbatch: IntArray, llm_microbatch: IntArray, llm_unit: IntArray, num_llm: int, num_microbatches: int,
    media: IntArray, encoders: IntArray,
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]:  # fmt: skip
    """Units of all encoders in order of encoder, microbatch and (where gradients return) consumer.

    Returns:
        [M] unit of each item, [E + 1] first unit of each encoder, [units] microbatch, [units] patches, [units + 1]
        first pair of each unit, [pairs] its consumers.
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
    unit_microbatch = np.empty(count, dtype=np.int64)
    unit_first = np.zeros(len(encoders) + 1, dtype=np.int64)
    pair_first, pair_llm = np.empty(count + 1, dtype=np.int64), np.empty(count, dtype=np.int64)
    num_units, num_pairs, previous_key, previous_consumer = 0, 0, NONE, NONE
    for i in range(count):
        item = items[i]
        encoder = media[item, ENCODER]
        key = encoder * num_microbatches + encoder_microbatch[item]
        new_pair = key != previous_key or consumer[item] != previous_consumer
        if key != previous_key or (new_pair and encoders[encoder, RETURNS]):
            pair_first[num_units], unit_microbatch[num_units] = num_pairs, encoder_microbatch[item]
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
    return unit_of_media, unit_first, unit_microbatch, unit_amount, pair_first[: num_units + 1], pair_llm[:num_pairs]


@compiled
def sources_of_llm(pair_first: IntArray, pair_llm: IntArray, num_llm: int) -> tuple[IntArray, IntArray]:
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
def breaks_limits(
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
