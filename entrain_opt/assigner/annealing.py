"""Simulated annealing (Kirkpatrick et al., 1983) of a layout on its simulated iteration time, compiled.

A random change (`moves.py`) that makes the iteration longer is accepted with probability exp(-longer / temperature);
the temperature falls to zero as the budget is spent.

Promise: never worse than the start; depends on its arguments only. Price: one evaluation (`pipeline.py`) per change.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner.eager import eager_ticks
from entrain_opt.assigner.moves import change
from entrain_opt.assigner.pipeline import iteration_ticks
from entrain_opt.assigner.pipeline_columns import INFEASIBLE, SAMPLE
from entrain_opt.assigner.random_numbers import random_unit
from entrain_opt.compiled import compiled

IntArray = NDArray[np.int64]


@compiled
def anneal(
    media_microbatch: IntArray, llm_microbatch: IntArray, count: int, most: int, start_ticks: float, temperature: float,
    budget: float, media_first: IntArray, cumulated: NDArray[np.float64], state: NDArray[np.uint64], media: IntArray,
    tokens: IntArray, media_ticks: IntArray, sample_ticks: IntArray, stage_costs: IntArray, encoders: IntArray,
    stages: IntArray, rules: IntArray | None, settings: IntArray,
) -> tuple[float, IntArray, IntArray, float]:  # fmt: skip
    """Improve a layout.

    Args:
        media_microbatch, llm_microbatch, count, most: the start; see `moves.change`.
        start_ticks: its iteration time.
        temperature: at the start, in ticks.
        budget: an evaluation costs the microbatches that it plays, as a part of the samples.
        media_first, cumulated, state: see `moves.change`.
        media, ..., settings: see `iteration_ticks`; without rules the case is that of `eager_ticks`.
            Numba compiles only what the given case needs.

    Returns:
        Ticks of the best layout, its microbatches of media and samples, and what was spent.
    """
    num_samples = len(llm_microbatch)
    sample_of_media = np.ascontiguousarray(media[:, SAMPLE])
    current_media, current_llm, current_ticks = media_microbatch, llm_microbatch, start_ticks
    best_media, best_llm, best_ticks = media_microbatch, llm_microbatch, start_ticks
    spent = 0.0
    while spent < budget:
        new_media, new_llm = current_media.copy(), current_llm.copy()
        new_count = change(new_media, new_llm, count, most, sample_of_media, media_first, cumulated, state)
        dense_media, dense_llm, used = dense(new_media, new_llm, new_count)
        if rules is None:
            ticks = eager_ticks(
                dense_media, dense_llm, used, media, tokens, media_ticks, sample_ticks, stage_costs, encoders, stages,
                settings,
            )  # fmt: skip
        else:
            ticks = iteration_ticks(
                dense_media, dense_llm, used, media, tokens, media_ticks, sample_ticks, stage_costs, encoders, stages,
                rules, settings,
            )  # fmt: skip
        now = temperature * (1 - spent / budget)
        spent += used / num_samples
        if ticks == INFEASIBLE:
            continue
        worse = ticks - current_ticks
        if worse <= 0 or random_unit(state) < math.exp(-worse / (now + 1e-300)):
            current_media, current_llm, current_ticks, count = dense_media, dense_llm, ticks, used
            if ticks < best_ticks:
                best_media, best_llm, best_ticks = dense_media, dense_llm, ticks
    return best_ticks, best_media, best_llm, spent


@compiled
def dense(media: IntArray, llm: IntArray, count: int) -> tuple[IntArray, IntArray, int]:
    """`work.place_media`, compiled: [M] and [N] microbatches without empty ones, and how many there are."""
    place = np.zeros(count + 1, dtype=np.int64)
    for sample in range(len(llm)):
        place[llm[sample] + 1] = 1
    for microbatch in range(count):
        place[microbatch + 1] += place[microbatch]
    dense_llm, dense_media = np.empty_like(llm), np.empty_like(media)
    for sample in range(len(llm)):
        dense_llm[sample] = place[llm[sample]]
    for item in range(len(media)):
        dense_media[item] = place[media[item]]
    return dense_media, dense_llm, place[count]
