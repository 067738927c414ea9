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

from entrain_opt.assigner.pipeline_columns import (
    ENCODER,
    EVEN,
    FIRST_STAGE,
    FIXED_BACKWARD,
    FIXED_FORWARD,
    FIXED_SPLIT,
    FIXED_TRANSFER,
    INFEASIBLE,
    NUM_STAGES,
    PATCHES_LIMIT,
    SPLIT_BACKWARD,
    SPLIT_PERMILLE,
    TIMED,
    TOKENS_LIMIT,
    WEIGHT_PERMILLE,
)
from entrain_opt.assigner.unit_kernel import breaks_limits, encoder_units, llm_units, sources_of_llm
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
    SPLITS,
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
        stage_costs: [S, 7] see `pipeline_columns.py`.
        encoders: [E, 3].
        stages, rules: templates for `play`, without slots and turns.
        settings: [5] limits and what the order follows.
    """
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
        stages, first_llm, num_llm, llm_unit, llm_amount, unit_first, unit_microbatch, unit_amount, pair_first,
        pair_llm, source_first, sources, encoders, num_microbatches,
    )  # fmt: skip
    durations, transfer = _durations(
        stages, slots, first_llm, unit_of_media, media, unit_first, encoders, llm_unit, llm_microbatch, media_ticks,
        sample_ticks, stage_costs, settings,
    )  # fmt: skip
    expected = 0
    for slot in range(count):
        expected += 1 + stages[slots[slot, STAGE], HAS_BACKWARD]
    if settings[TIMED]:
        orders, _, _, end = play(rules, stages, slots, turns, links, turn_of_llm, durations, transfer)
        return float(_largest(end)) if _num_passes(orders, count) == expected else INFEASIBLE
    missing, even = np.ones(3 * count, dtype=np.int64), np.empty(4 * count, dtype=np.int64)
    missing[: 2 * count] = 0
    for slot in range(count):
        for kind in range(4):
            even[kind * count + slot] = stage_costs[slots[slot, STAGE], EVEN]
        for i in range(slots[slot, FORWARD], slots[slot, FORWARD_END]):
            missing[links[i]] += 1
        missing[count + slot] = 1 + slots[slot, FORWARD_END] - slots[slot, FORWARD]
    orders, order_first, _, _ = play(
        rules, stages, slots, turns, links, turn_of_llm, even, np.zeros(count, dtype=np.int64),
    )  # fmt: skip
    if _num_passes(orders, count) != expected:
        return INFEASIBLE
    times, _ = play_orders(
        stages, slots, links, orders, order_first, durations.astype(np.float64), transfer.astype(np.float64), missing
    )
    return float(_largest(times[1]))


@compiled
def _num_passes(orders: IntArray, count: int) -> int:
    """Forwards and backwards that ran; how many backwards were split is the scheduler's choice."""
    passes = 0
    for operation in orders:
        passes += operation < 2 * count
    return passes


@compiled
def _largest(values: NDArray[np.generic]) -> float:
    largest = values[0]
    for value in values:
        largest = max(largest, value)
    return largest


@compiled
def _encoder_of_stage(encoders: IntArray, stage: int) -> int:
    encoder = 0
    while stage >= encoders[encoder, FIRST_STAGE] + encoders[encoder, NUM_STAGES]:
        encoder += 1
    return encoder


@compiled
def _lay_out(
    stages: IntArray, first_llm: int, num_llm: int, llm_unit: IntArray, llm_amount: IntArray, unit_first: IntArray,
    unit_microbatch: IntArray, unit_amount: IntArray, pair_first: IntArray, pair_llm: IntArray, source_first: IntArray,
    sources: IntArray, encoders: IntArray, num_microbatches: int,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:  # fmt: skip
    """Slots, links, turns and turns of language-model units; `stages` gets its turns."""
    num_stages, count = len(stages), stages[len(stages) - 1, SLOT_END]
    slots = np.zeros((count, SLOT_COLUMNS), dtype=np.int64)
    turns = np.zeros((num_stages * num_llm, TURN_COLUMNS), dtype=np.int64)
    turn_of_llm = np.full((num_stages, num_llm), NONE, dtype=np.int64)
    links = np.empty(4 * num_stages * (len(pair_llm) + num_llm) + 1, dtype=np.int64)
    microbatch_of_llm = np.empty(num_llm, dtype=np.int64)
    for microbatch in range(num_microbatches):
        if llm_unit[microbatch] != NONE:
            microbatch_of_llm[llm_unit[microbatch]] = microbatch
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
                for i in range(source_first[llm], source_first[llm + 1]):
                    unit = sources[i]
                    if unit_first[encoder] <= unit < unit_first[encoder + 1]:
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
        for i in range(num_units):
            slot = first + i
            slots[slot, STAGE], slots[slot, SEQUENCE], slots[slot, POSITION] = stage, slot, i
            microbatch = microbatch_of_llm[i] if is_llm else unit_microbatch[first_unit + i]
            slots[slot, AMOUNT] = llm_amount[i] if is_llm else unit_amount[first_unit + i]
            key = (microbatch * num_stages + num_stages - 1 - stage) * count + slot
            slots[slot, FORWARD_KEY] = slots[slot, BACKWARD_KEY] = key
            first_pair = 0 if is_llm else pair_first[first_unit + i]
            end_pair = 0 if is_llm else pair_first[first_unit + i + 1]
            slots[slot, TURNS] = used
            if is_llm:
                links[used] = turn_of_llm[stage, i]
                used += 1
            else:
                for pair in range(first_pair, end_pair):
                    links[used] = turn_of_llm[stage, pair_llm[pair]]
                    used += 1
            slots[slot, TURNS_END] = slots[slot, FORWARD] = used
            if last_of_encoder:
                for pair in range(first_pair, end_pair):
                    links[used] = stages[first_llm, SLOT_FIRST] + pair_llm[pair]
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
                for j in range(source_first[i], source_first[i + 1]):
                    source = 0
                    while sources[j] >= unit_first[source + 1]:
                        source += 1
                    last = encoders[source, FIRST_STAGE] + encoders[source, NUM_STAGES] - 1
                    if stages[last, HAS_BACKWARD]:
                        links[used] = stages[last, SLOT_FIRST] + sources[j] - unit_first[source]
                        used += 1
            slots[slot, BACKWARD_END] = used
    return slots, links[:used], turns[:num_turns], turn_of_llm


@compiled
def _durations(
    stages: IntArray, slots: IntArray, first_llm: int, unit_of_media: IntArray, media: IntArray, unit_first: IntArray,
    encoders: IntArray, llm_unit: IntArray, llm_microbatch: IntArray, media_ticks: IntArray, sample_ticks: IntArray,
    stage_costs: IntArray, settings: IntArray,
) -> tuple[IntArray, IntArray]:  # fmt: skip
    """[4 * n] ticks as for `run_pipeline` and [n] of the transfers; marks the slots whose backward may be split."""
    count = len(slots)
    durations, transfer = np.zeros(4 * count, dtype=np.int64), np.zeros(count, dtype=np.int64)
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
            slots[slot, SPLIT] = SPLITS
            weights = durations[count + slot] * stage_costs[stage, WEIGHT_PERMILLE] // 1000
            more = durations[count + slot] * stage_costs[stage, SPLIT_PERMILLE] // 1000
            durations[2 * count + slot] = weights
            durations[3 * count + slot] = durations[count + slot] - weights + more
            durations[3 * count + slot] += stage_costs[stage, FIXED_BACKWARD] + stage_costs[stage, FIXED_SPLIT]
        durations[slot] += stage_costs[stage, FIXED_FORWARD]
        durations[count + slot] += stage_costs[stage, FIXED_BACKWARD]
        transfer[slot] += stage_costs[stage, FIXED_TRANSFER]
    return durations, transfer
