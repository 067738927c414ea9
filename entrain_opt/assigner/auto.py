"""The default policy: many good placements, played through, and the best one improved by search.

1. *Starts*: joint leveling at several counts of microbatches (each also with its microbatches in several orders), the
   paper's pairwise placement and the peers' Karmarkar-Karp and in-order ones. Media items of a sample with more encoder
   work than a microbatch should have are encoded one after the other, in as many microbatches as that work is worth.
   All are played through under the schedule and the memory of the plan.
2. *Search*, from the best: the order of microbatches changes by moves and swaps, samples move and swap between
   microbatches, single media items are encoded earlier. A change that is worse by a little is accepted now and then,
   less and less (simulated annealing), so that the search leaves local optima. What counts is the simulated time, so a
   trained encoder that would wait for late gradients, memory that runs full and a giant sample that stalls its
   neighbours are all seen.

Promise: memory caps kept; never slower than the starts; the answer depends on the inputs and the settings only (budgets
are counts of evaluations). Price: `SearchSettings.evaluations` evaluations (`pipeline.py`) and the starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner.evaluate import Evaluator
from entrain_opt.assigner.joint import level_jointly, normalised_loads, place_joint
from entrain_opt.assigner.layout import Layout
from entrain_opt.assigner.pairwise import place_pairwise
from entrain_opt.assigner.peers import place_in_order, place_karmarkar_karp
from entrain_opt.assigner.random_numbers import random_state
from entrain_opt.assigner.settings import SearchSettings
from entrain_opt.assigner.work import Placement, SampleWork
from entrain_opt.assignment import FloatArray, IntArray
from entrain_opt.schedule.orders import SPLITTING_ORDERS

#: Counts of microbatches that are tried, as parts of the number of samples: on most budgets, and on the smallest.
_PARTS, _FEW_PARTS = (1.0, 0.75, 0.5, 0.375, 0.25), (1.0, 0.5, 0.25)
#: Microbatches for each rank below which none are tried: deep pipelines of short layers run best with few.
FEWEST_PER_RANK = 0.25
#: Microbatches that stand before the largest one, as parts of all; the best depends on memory and on the encoder.
_SHARES_BEFORE_LARGEST = (0.3, 0.6, 0.15, 0.45)
#: What is large, in mean microbatches, and over which part of the others the large ones are spread.
_LARGE, _SPREADS = 2.0, ((0.3, 0.7), (0.0, 0.6))
#: Start temperature of the annealing, as a part of the iteration time.
START_TEMPERATURE = 0.0005
#: What are few microbatches, as a part of the samples, and the part of the budget that goes to a start with few.
FEW, FEW_SHARE = 0.4, 0.3
#: How much longer an evaluation takes with weight gradients of their own.
SPLIT_PRICE = 1.25
#: Budgets below so many evaluations have no room for the slower starts, and for all counts.
_SMALL_BUDGET, _SMALLEST_BUDGET = 100, 30


def place_auto(work: SampleWork, num_microbatches: int | None, settings: SearchSettings) -> Placement:
    """The fastest placement found for one replica.

    Args:
        work: N >= 1 samples.
        num_microbatches: the most to use, unless the memory caps need more; None leaves the number open.
        settings: schedule, budget and seed.
    """
    search = _Search(work, num_microbatches, settings)
    tried: list[tuple[float, int, Layout]] = []

    def play(starts: Iterator[Layout]) -> None:
        while not tried or search.left > 0:
            start = next(starts, None)
            if start is None:
                break
            tried.append((search.seconds(start), len(tried), start))

    thorough = settings.evaluations >= _SMALL_BUDGET
    counts = _counts(work, num_microbatches, _FEW_PARTS if settings.evaluations < _SMALLEST_BUDGET else _PARTS)
    levels = [_Level(work, count) for count in counts]
    play(level.start(0) for level in levels)
    best_level = levels[min(tried)[1]]
    if min(tried)[0] == math.inf:  # Media that are encoded earlier may need more memory than there is.
        for level in levels:
            start = level.start(0, together=True)
            tried.append((search.seconds(start), len(tried), start))
            best_level = level if min(tried)[2] is start else best_level
    looked_at = levels if thorough else [best_level]
    play(level.start(order) for level in looked_at for order in range(1, len(level.orders)))
    play(
        level.start(order, together=True)
        for level in looked_at
        for order in range(len(level.orders))
        if level.has_giants
    )
    if thorough:
        play(_others(work, (counts[0], counts[len(counts) // 2])))
    tried.sort(key=lambda entry: entry[:2])
    best_seconds, _, best = tried[0]
    if work.num_samples > 1 and best_seconds < math.inf:
        # Fewer microbatches are cheaper to play, so more changes are tried; the best of all gets the rest.
        few = [entry for entry in tried if entry[2].count <= FEW * work.num_samples and entry[0] < math.inf]
        if few and few[0][2] is not best:
            few_seconds, few_best = search.anneal(few[0][2], few[0][0], search.left * FEW_SHARE)
            if few_seconds < best_seconds:
                best_seconds, best = few_seconds, few_best
        best_seconds, best = search.anneal(best, best_seconds, search.left)
    return best.placement(work)


class _Search:
    """Evaluations on a budget.

    Attributes:
        left: what may still be spent. An evaluation costs the microbatches that it plays, as a part of the samples.
    """

    def __init__(self, work: SampleWork, num_microbatches: int | None, settings: SearchSettings) -> None:
        self._work = work
        self._most = work.num_samples if num_microbatches is None else num_microbatches
        self._evaluator = Evaluator(work, settings.schedule)
        self._state = random_state(settings.seed)
        self.left = settings.evaluations / (SPLIT_PRICE if settings.schedule in SPLITTING_ORDERS else 1.0)

    def seconds(self, layout: Layout) -> float:
        placement = layout.placement(self._work)
        self.left -= placement.num_microbatches / self._work.num_samples
        return self._evaluator.seconds(placement)

    def anneal(self, start: Layout, seconds: float, budget: float) -> tuple[float, Layout]:
        """Seconds and layout of the best found from a start with a part of the budget."""
        best_seconds, best, spent = self._evaluator.anneal(
            start,
            seconds,
            most=self._most,
            temperature_seconds=START_TEMPERATURE * seconds,
            budget=budget,
            state=self._state,
        )
        self.left -= spent
        return best_seconds, best


def _counts(work: SampleWork, num_microbatches: int | None, parts: Sequence[float]) -> list[int]:
    """Numbers of microbatches to try, most first."""
    most = work.num_samples if num_microbatches is None else min(num_microbatches, work.num_samples)
    counts = sorted({max(1, round(most * part)) for part in parts}, reverse=True)
    least = max(2, round(FEWEST_PER_RANK * work.shape.num_ranks))
    return [count for count in counts if count >= min(most, least)] or [most]


class _Level:
    """Samples leveled jointly over a number of microbatches, which stand in several orders.

    Small ones are at both ends. Large ones stand beside each other, after different parts of them, so that what one
    costs its neighbours is paid once, or are spread among the others, which then fill the time that ranks wait for a
    large one. A frozen encoder is done with a microbatch once it has encoded it, so encoder and language model are two
    machines in a row, and the first order is the best there is for two (`flow_shop_order`).
    """

    def __init__(self, work: SampleWork, count: int) -> None:
        self._work = work
        self._microbatch, self._count = level_jointly(work, count)
        loads = normalised_loads(work)
        llm = np.bincount(self._microbatch, weights=loads[:, 1], minlength=self._count)
        self._rising = np.argsort(llm, kind="stable")
        self._is_flow_shop = work.shape.num_encoders > 0 and not work.shape.any_encoder_has_backward
        self._spread = media_spread(work, loads[:, 0] * self._count)

    @cached_property
    def _first_order(self) -> IntArray:
        return flow_shop_order(*self._busiest_seconds()) if self._is_flow_shop else self._peaked(0)

    @cached_property
    def orders(self) -> list[IntArray]:
        """[count] each: its microbatches in several orders."""
        peaked = [self._peaked(index) for index in range(len(_SHARES_BEFORE_LARGEST))]
        orders = [self._first_order, *peaked] if self._is_flow_shop else peaked
        seconds = self._busiest_seconds()
        size = np.maximum(*seconds)
        is_large = size > _LARGE * max(values.mean() for values in seconds)
        if is_large.any() and not is_large.all():
            base = orders[0] if self._is_flow_shop else orders[-1]
            orders += [spread_large(base, size, is_large, *between) for between in _SPREADS]
        return orders

    def _peaked(self, index: int) -> IntArray:
        """Small ones at both ends, a part of them before the largest."""
        is_before = np.diff(np.floor(np.arange(self._count + 1) * _SHARES_BEFORE_LARGEST[index])) > 0
        return np.concatenate([self._rising[is_before], self._rising[~is_before][::-1]])

    def _busiest_seconds(self) -> tuple[FloatArray, FloatArray]:
        """[count] seconds of each microbatch on the busiest encoder stage and on the busiest language-model stage."""
        media, llm = self._work.media_stage_seconds, self._work.llm_stage_seconds
        of_media = self._microbatch[self._work.costs.media_sample]
        encoder = media[media.sum(axis=1).argmax()] if len(media) else np.zeros(len(of_media))
        return (
            np.bincount(of_media, encoder, self._count).astype(np.float64),
            np.bincount(self._microbatch, llm[llm.sum(axis=1).argmax()], self._count).astype(np.float64),
        )

    @property
    def has_giants(self) -> bool:
        """Whether any sample's media items are encoded one after the other."""
        return bool(self._spread.any())

    def start(self, order: int, *, together: bool = False) -> Layout:
        """In one of the orders; `together` keeps all media items of every sample in its microbatch."""
        places = self.orders[order] if order else self._first_order
        layout = Layout.together(self._work, np.argsort(places)[self._microbatch])
        if together or not self.has_giants:
            return layout
        return replace(layout, media=np.maximum(layout.media - self._spread, 0))


def flow_shop_order(first_seconds: FloatArray, second_seconds: FloatArray) -> IntArray:
    """Jobs in the order that two machines in a row finish soonest (Johnson 1954).

    Those that are shorter on the first machine go first, shortest there first; then the others, longest on the second
    machine first.

    Args:
        first_seconds, second_seconds: [n] of each job on either machine.
    """
    shorter = first_seconds <= second_seconds
    return np.lexsort((np.where(shorter, first_seconds, -second_seconds), ~shorter))


def spread_large(order: IntArray, size: FloatArray, is_large: NDArray[np.bool_], first: float, last: float) -> IntArray:
    """An order with its large jobs evenly spread over a part of the others' work.

    Args:
        order: [n] of jobs, some of them large, some not.
        size: [n] of each job.
        is_large: [n].
        first, last: where the part begins and ends, 0 to 1.
    """
    small, large = order[~is_large[order]], order[is_large[order]]
    done = np.cumsum(size[small])
    wanted = first + (last - first) * (np.arange(len(large)) + 0.5) / len(large)
    return np.insert(small, np.searchsorted(done, wanted * done[-1]), large)


def media_spread(work: SampleWork, encoder_load: FloatArray) -> IntArray:
    """[M] how many microbatches before its sample each media item is encoded, so that none has too much at once.

    Args:
        work: N samples with M media entries.
        encoder_load: [N] of each sample, in mean microbatches; those with at most one stay together.
    """
    sample = work.costs.media_sample
    seconds = work.media_stage_seconds.sum(axis=0)
    cumulated = np.cumsum(seconds)
    total = np.bincount(sample, seconds, work.num_samples)
    after = np.cumsum(total)[sample] - cumulated
    share = np.divide(after, total[sample], out=np.zeros_like(after), where=total[sample] > 0)
    width = np.where(encoder_load > 1, np.ceil(encoder_load), 0.0)
    return np.floor(np.clip(share, 0.0, 1.0) * width[sample]).astype(np.int64)


def _others(work: SampleWork, counts: Sequence[int]) -> Iterator[Layout]:
    """What other policies make of the samples."""
    for place in (place_joint, place_pairwise, place_karmarkar_karp, place_in_order):
        for count in counts:
            yield Layout.of(place(work, count))
