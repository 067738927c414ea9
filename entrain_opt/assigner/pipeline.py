"""How long an assignment takes, compiled: the evaluation that searches call thousands of times.

The units of an assignment (encoder parts, language-model microbatches) are laid out as the matrices of
`schedule/columns.py`, by the rules of `schedule/work.py` and `schedule/orders.py`, and played by the same list
scheduler as every schedule. So the answer is that of `simulate`, up to the rounding of ticks; where the order follows
the durations, messages that queue for a link are not modelled either.

Price: about 0.1 ms for 128 samples in 32 microbatches on 8 stages, 0.4 ms in 128.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner.eager import eager_ticks
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
    SIMPLE,
    SPLIT_BACKWARD,
    TIMED,
    TOKENS_LIMIT,
    WEIGHT_PERMILLE,
)
from entrain_opt.compiled import compiled
from entrain_opt.schedule.columns import (
    AMOUNT,
    BACKWARD,
    BACKWARD_END,
    BACKWARD_KEY,
    FIRST_LLM_STAGE,
    FORWARD,
    FORWARD_END,
    FORWARD_KEY,
    HAS_BACKWARD,
    LIMIT,
    NONE,
    POSITION,
    REACH,
    SEQUENCE,
    SLOT_COLUMNS,
    SLOT_END,
    SLOT_FIRST,
    SLOTS,
    SLOTS_END,
    SPLIT,
    STAGE,
    TURN_COLUMNS,
    TURN_END,
    TURN_FIRST,
    TURNS,
    TURNS_END,
)
from entrain_opt.schedule.kernel import play
from entrain_opt.schedule.replay_kernel import play_orders

IntArray = NDArray[np.int64]

#: Instead of ticks: the assignment breaks a memory limit.
INFEASIBLE = -1.0


@compiled
def iteration_ticks(
    encoder_microbatch: IntArray, llm_microbatch: IntArray, num_microbatches: int, media: IntArray, tokens: IntArray,
    media_ticks: IntArray, sample_ticks: IntArray, stage_costs: IntArray, encoders: IntArray, stages: IntArray,
    rules: IntArray, settings: IntArray,
) -> float:  # fmt: skip
    """Ticks of one iteration of one replica, or INFEASIBLE.

    Args:
        encoder_microbatch: [M] microbatch of each media item.
        llm_microbatch: [N] microbatch of each sample.
        num_microbatches: K; some may be empty.
        media: [M, 3] sample, encoder and patches.
        tokens: [N].
        media_ticks: [3, encoder stages, M] forward, backward and transfer.
        sample_ticks: [3, language-model stages, N] the same.
        stage_costs: [S, 4] ticks per unit, and which part of a backward is weight gradients.
        encoders: [E, 3].
        stages, rules: templates for `play`, without slots and turns.
        settings: [5] limits and what the order follows.
    """
    if settings[SIMPLE]:
        return float(
            eager_ticks(
                encoder_microbatch, llm_microbatch, num_microbatches, media, tokens, media_ticks, sample_ticks,
                stage_costs, encoders, stages, settings,
            )
        )  # fmt: skip
    count_llm = np.zeros(num_microbatches, dtype=np.int64)
    llm_amounts = np.zeros(num_microbatches, dtype=np.int64)
    for sample in range(len(llm_microbatch)):
        count_llm[llm_microbatch[sample]] += 1
        llm_amounts[llm_microbatch[sample]] += tokens[sample]
    llm_unit, num_llm = np.full(num_microbatches, NONE, dtype=np.int64), 0
    for microbatch in range(num_microbatches):
        if count_llm[microbatch]:
            if settings[TOKENS_LIMIT] != NONE and llm_amounts[microbatch] > settings[TOKENS_LIMIT]:
                return INFEASIBLE
            llm_unit[microbatch] = num_llm
            num_llm += 1
    num_units, unit_of_media, units, pairs, unit_first = _encoder_units(
        encoder_microbatch, llm_microbatch, llm_unit, num_microbatches, media, encoders
    )
    if _breaks_limits(units, pairs, num_units, num_llm, unit_first, encoders, stages, settings, num_microbatches):
        return INFEASIBLE
    stages = stages.copy()
    first_llm = rules[FIRST_LLM_STAGE]
    count = 0
    for stage in range(len(stages)):
        stages[stage, SLOT_FIRST] = count
        if stage >= first_llm:
            count += num_llm
        else:
            encoder = _encoder_of_stage(encoders, stage)
            count += unit_first[encoder + 1] - unit_first[encoder]
        stages[stage, SLOT_END] = count
    slots, links, turns, turn_of_llm = _lay_out(
        stages, first_llm, num_llm, llm_microbatch, llm_unit, llm_amounts, units, pairs, unit_first, encoders,
        num_microbatches,
    )  # fmt: skip
    durations, transfer = _durations(
        stages, slots, first_llm, unit_of_media, media, unit_first, encoders, llm_unit, llm_microbatch, media_ticks,
        sample_ticks, stage_costs, settings,
    )  # fmt: skip
    expected = 0
    for slot in range(count):
        expected += 1 + stages[slots[slot, STAGE], HAS_BACKWARD] + slots[slot, SPLIT]
    if settings[TIMED]:
        orders, _, _, end = play(rules, stages, slots, turns, links, turn_of_llm, durations, transfer)
        return float(end.max()) if len(orders) == expected else INFEASIBLE
    missing = np.ones(3 * count, dtype=np.int64)
    missing[: 2 * count] = 0
    for slot in range(count):
        for i in range(slots[slot, FORWARD], slots[slot, FORWARD_END]):
            missing[links[i]] += 1
        missing[count + slot] = 1 + slots[slot, FORWARD_END] - slots[slot, FORWARD]
    orders, order_first, _, _ = play(
        rules, stages, slots, turns, links, turn_of_llm, np.ones(3 * count, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
    )  # fmt: skip
    if len(orders) != expected:
        return INFEASIBLE
    times, _ = play_orders(
        stages, slots, links, orders, order_first, durations.astype(np.float64), transfer.astype(np.float64), missing
    )
    return float(times[1].max())


@compiled
def _encoder_of_stage(encoders: IntArray, stage: int) -> int:
    encoder = 0
    while stage >= encoders[encoder, FIRST_STAGE] + encoders[encoder, NUM_STAGES]:
        encoder += 1
    return encoder


@compiled
def _encoder_units(
    encoder_microbatch: IntArray, llm_microbatch: IntArray, llm_unit: IntArray, num_microbatches: int, media: IntArray,
    encoders: IntArray,
) -> tuple[int, IntArray, IntArray, IntArray, IntArray]:  # fmt: skip
    """Units of all encoders, by encoder, microbatch and (where gradients return) consumer.

    Returns:
        Their number, [M] unit of each item, [units, 4] (encoder, microbatch, patches, consumers), [pairs, 2] (unit,
        language-model unit), [E + 1] first unit of each encoder.
    """
    count, width = len(media), num_microbatches
    keys = np.empty(count, dtype=np.int64)
    for item in range(count):
        consumer = llm_microbatch[media[item, SAMPLE]]
        keys[item] = ((media[item, ENCODER] * width + encoder_microbatch[item]) * width + consumer) * count + item
    keys.sort()
    unit_of_media = np.empty(count, dtype=np.int64)
    units, pairs = np.zeros((count, 4), dtype=np.int64), np.empty((count, 2), dtype=np.int64)
    unit_first = np.zeros(len(encoders) + 1, dtype=np.int64)
    num_units, num_pairs, previous, previous_unit = 0, 0, NONE, NONE
    for i in range(count):
        item, pair = keys[i] % count, keys[i] // count
        encoder = media[item, ENCODER]
        unit = pair if encoders[encoder, RETURNS] else pair // width * width
        # Units are told apart by their first pair's key: with returning gradients every pair is one.
        if i == 0 or unit != previous_unit:
            units[num_units, 0], units[num_units, 1] = encoder, encoder_microbatch[item]
            unit_first[encoder + 1] += 1
            num_units += 1
        if i == 0 or pair != previous:
            pairs[num_pairs, 0], pairs[num_pairs, 1] = num_units - 1, llm_unit[llm_microbatch[media[item, SAMPLE]]]
            units[num_units - 1, 3] += 1
            num_pairs += 1
        previous, previous_unit = pair, unit
        unit_of_media[item] = num_units - 1
        units[num_units - 1, 2] += media[item, PATCHES]
    for encoder in range(len(encoders)):
        unit_first[encoder + 1] += unit_first[encoder]
    return num_units, unit_of_media, units, pairs[:num_pairs], unit_first


@compiled
def _breaks_limits(
    units: IntArray, pairs: IntArray, num_units: int, num_llm: int, unit_first: IntArray, encoders: IntArray,
    stages: IntArray, settings: IntArray, num_microbatches: int,
) -> bool:  # fmt: skip
    """Whether an encoder microbatch exceeds its cap, or what one language-model microbatch needs exceeds a stage's."""
    if settings[PATCHES_LIMIT] == NONE:
        return False
    amounts = np.zeros((len(encoders), num_llm), dtype=np.int64)
    needed = np.zeros((len(encoders), num_llm), dtype=np.int64)
    # Several encoders count as one for the cap of a microbatch.
    whole = np.zeros(num_microbatches, dtype=np.int64)
    for unit in range(num_units):
        whole[units[unit, 1]] += units[unit, 2]
    for microbatch in range(num_microbatches):
        if whole[microbatch] > settings[PATCHES_LIMIT]:
            return True
    for i in range(len(pairs)):
        encoder = units[pairs[i, 0], 0]
        amounts[encoder, pairs[i, 1]] += units[pairs[i, 0], 2]
        needed[encoder, pairs[i, 1]] += 1
    for encoder in range(len(encoders)):
        limit = NONE
        first = encoders[encoder, FIRST_STAGE]
        for stage in range(first, first + encoders[encoder, NUM_STAGES]):
            if stages[stage, LIMIT] != NONE and (limit == NONE or stages[stage, LIMIT] < limit):
                limit = stages[stage, LIMIT]
        for llm in range(num_llm):
            if limit != NONE and needed[encoder, llm] > 1 and amounts[encoder, llm] > limit:
                return True
    return False


@compiled
def _lay_out(
    stages: IntArray, first_llm: int, num_llm: int, llm_microbatch: IntArray, llm_unit: IntArray,
    llm_amounts: IntArray, units: IntArray, pairs: IntArray, unit_first: IntArray, encoders: IntArray,
    num_microbatches: int,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:  # fmt: skip
    """Slots, links, turns and turns of language-model units; `stages` gets its turns."""
    num_stages, count = len(stages), stages[len(stages) - 1, SLOT_END]
    slots = np.zeros((count, SLOT_COLUMNS), dtype=np.int64)
    turns = np.zeros((num_stages * num_llm, TURN_COLUMNS), dtype=np.int64)
    turn_of_llm = np.full((num_stages, num_llm), NONE, dtype=np.int64)
    links = np.empty(4 * num_stages * (len(pairs) + num_llm) + 1, dtype=np.int64)
    microbatch_of_llm = np.empty(num_llm, dtype=np.int64)
    for microbatch in range(num_microbatches):
        if llm_unit[microbatch] != NONE:
            microbatch_of_llm[llm_unit[microbatch]] = microbatch
    # Pairs by consumer, in the order of the units: what each language-model unit needs.
    by_llm_first = np.zeros(num_llm + 1, dtype=np.int64)
    for i in range(len(pairs)):
        by_llm_first[pairs[i, 1] + 1] += 1
    for llm in range(num_llm):
        by_llm_first[llm + 1] += by_llm_first[llm]
    by_llm, place = np.empty(len(pairs), dtype=np.int64), by_llm_first.copy()
    for i in range(len(pairs)):
        by_llm[place[pairs[i, 1]]] = pairs[i, 0]
        place[pairs[i, 1]] += 1
    used, num_turns = 0, 0
    for stage in range(num_stages):
        first = stages[stage, SLOT_FIRST]
        is_llm = stage >= first_llm
        encoder = NONE if is_llm else _encoder_of_stage(encoders, stage)
        first_unit = 0 if is_llm else unit_first[encoder]
        num_units = num_llm if is_llm else unit_first[encoder + 1] - first_unit
        # Turns.
        stages[stage, TURN_FIRST] = num_turns
        reach = NONE
        for llm in range(num_llm):
            start = used
            if is_llm:
                links[used] = first + llm
                used += 1
                reach = llm
            else:
                for i in range(by_llm_first[llm], by_llm_first[llm + 1]):
                    unit = by_llm[i]
                    if units[unit, 0] == encoder:
                        links[used] = first + unit - first_unit
                        used += 1
                        reach = max(reach, unit - first_unit)
            if used > start:
                turns[num_turns, SLOTS], turns[num_turns, SLOTS_END] = start, used
                turns[num_turns, REACH] = reach
                turn_of_llm[stage, llm] = num_turns
                num_turns += 1
        stages[stage, TURN_END] = num_turns
        last_of_encoder = not is_llm and stage + 1 == encoders[encoder, FIRST_STAGE] + encoders[encoder, NUM_STAGES]
        first_of_module = stage == first_llm if is_llm else stage == encoders[encoder, FIRST_STAGE]
        next_first = stages[stage + 1, SLOT_FIRST] if stage + 1 < num_stages else 0
        next_pair = 0
        while not is_llm and next_pair < len(pairs) and pairs[next_pair, 0] < first_unit:
            next_pair += 1
        for i in range(num_units):
            slot = first + i
            slots[slot, STAGE], slots[slot, SEQUENCE], slots[slot, POSITION] = stage, slot, i
            microbatch = microbatch_of_llm[i] if is_llm else units[first_unit + i, 1]
            slots[slot, AMOUNT] = llm_amounts[microbatch] if is_llm else units[first_unit + i, 2]
            key = (microbatch * num_stages + num_stages - 1 - stage) * count + slot
            slots[slot, FORWARD_KEY] = slots[slot, BACKWARD_KEY] = key
            first_pair = next_pair
            if not is_llm:
                next_pair += units[first_unit + i, 3]
            slots[slot, TURNS] = used
            if is_llm:
                links[used] = turn_of_llm[stage, i]
                used += 1
            else:
                for pair in range(first_pair, next_pair):
                    links[used] = turn_of_llm[stage, pairs[pair, 1]]
                    used += 1
            slots[slot, TURNS_END] = slots[slot, FORWARD] = used
            if last_of_encoder:
                for pair in range(first_pair, next_pair):
                    links[used] = stages[first_llm, SLOT_FIRST] + pairs[pair, 1]
                    used += 1
            elif stage + 1 < num_stages:
                links[used] = next_first + i
                used += 1
            slots[slot, FORWARD_END] = slots[slot, BACKWARD] = used
            if not first_of_module:
                if stages[stage - 1, HAS_BACKWARD]:
                    links[used] = stages[stage - 1, SLOT_FIRST] + i
                    used += 1
            elif is_llm:
                for j in range(by_llm_first[i], by_llm_first[i + 1]):
                    source = units[by_llm[j], 0]
                    last = encoders[source, FIRST_STAGE] + encoders[source, NUM_STAGES] - 1
                    if stages[last, HAS_BACKWARD]:
                        links[used] = stages[last, SLOT_FIRST] + by_llm[j] - unit_first[source]
                        used += 1
            slots[slot, BACKWARD_END] = used
    return slots, links[:used], turns[:num_turns], turn_of_llm


@compiled
def _durations(
    stages: IntArray, slots: IntArray, first_llm: int, unit_of_media: IntArray, media: IntArray, unit_first: IntArray,
    encoders: IntArray, llm_unit: IntArray, llm_microbatch: IntArray, media_ticks: IntArray, sample_ticks: IntArray,
    stage_costs: IntArray, settings: IntArray,
) -> tuple[IntArray, IntArray]:  # fmt: skip
    """[3 * n] ticks of the operations and [n] of the transfers; marks the slots whose backward is split."""
    count = len(slots)
    durations, transfer = np.zeros(3 * count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for item in range(len(media)):
        encoder = media[item, ENCODER]
        first = encoders[encoder, FIRST_STAGE]
        for stage in range(first, first + encoders[encoder, NUM_STAGES]):
            slot = stages[stage, SLOT_FIRST] + unit_of_media[item] - unit_first[encoder]
            durations[slot] += media_ticks[0, stage, item]
            durations[count + slot] += media_ticks[1, stage, item]
            transfer[slot] += media_ticks[2, stage, item]
    for sample in range(len(llm_microbatch)):
        unit = llm_unit[llm_microbatch[sample]]
        for stage in range(first_llm, len(stages)):
            slot = stages[stage, SLOT_FIRST] + unit
            durations[slot] += sample_ticks[0, stage - first_llm, sample]
            durations[count + slot] += sample_ticks[1, stage - first_llm, sample]
            transfer[slot] += sample_ticks[2, stage - first_llm, sample]
    for slot in range(count):
        stage = slots[slot, STAGE]
        if settings[SPLIT_BACKWARD] and slots[slot, BACKWARD_END] > slots[slot, BACKWARD]:
            slots[slot, SPLIT] = 1
            weights = durations[count + slot] * stage_costs[stage, WEIGHT_PERMILLE] // 1000
            durations[2 * count + slot] = weights
            durations[count + slot] -= weights
        durations[slot] += stage_costs[stage, FIXED_FORWARD]
        durations[count + slot] += stage_costs[stage, FIXED_BACKWARD]
        transfer[slot] += stage_costs[stage, FIXED_TRANSFER]
    return durations, transfer
