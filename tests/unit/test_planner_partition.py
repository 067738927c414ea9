"""Partitions: exact against enumeration, the most even among the fastest, fixed ends kept."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import segment_sums

from entrain_opt.planner.partition import IMPOSSIBLE, partition_chain

layers = st.lists(st.integers(0, 50), min_size=2, max_size=9)


def all_ends(num_layers: int, num_ranks: int) -> list[tuple[int, ...]]:
    return [(*cuts, num_layers) for cuts in combinations(range(1, num_layers), num_ranks - 1)]


def costs_of(segments: np.ndarray, ends: tuple[int, ...]) -> list[int]:
    return [int(segments[i, j]) for i, j in zip((0, *ends[:-1]), ends, strict=True)]


def segments_of(ticks: list[int], border: int, stage: tuple[int, int]) -> np.ndarray:
    module = (np.arange(len(ticks)) >= border).astype(np.int64)
    return segment_sums(np.array(ticks), module, np.array(stage))


@settings(max_examples=80, deadline=None)
@given(layers, st.integers(1, 4), st.integers(1, 8), st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_as_fast_as_the_best_of_all_partitions_and_the_most_even_of_them(ticks, num_ranks, border, stage):
    num_ranks, border = min(num_ranks, len(ticks)), min(border, len(ticks) - 1)
    segments = segments_of(ticks, border, stage)
    found = partition_chain(lambda _: segments, num_ranks)
    options = [costs_of(segments, ends) for ends in all_ends(len(ticks), num_ranks)]
    best = min(max(costs) for costs in options)
    assert found is not None
    mine = costs_of(segments, found.ends)
    assert found.ticks == max(mine) == best
    assert sum(c * c for c in mine) == min(sum(c * c for c in costs) for costs in options if max(costs) == best)


def test_a_stage_part_counts_once_for_every_module_on_a_rank():
    segments = segments_of([1, 1, 1, 1], 2, (10, 100))
    assert segments[0, 2] == 12
    assert segments[2, 4] == 102
    assert segments[1, 3] == 112
    assert segments[2, 2] == segments[3, 1] == IMPOSSIBLE


def test_fixed_ends_are_kept():
    segments = segments_of([1] * 8, 4, (0, 0))
    found = partition_chain(lambda _: segments, 3, fixed_ends={0: 5})
    assert found is not None
    assert found.ends[0] == 5
    assert found.ticks == 5


def test_ranks_may_differ_and_nothing_may_fit():
    segments = segments_of([1] * 4, 2, (0, 0))
    tight = np.where(segments > 1, IMPOSSIBLE, segments)
    found = partition_chain(lambda rank: tight if rank == 0 else segments, 2)
    assert found is not None
    assert found.ends == (1, 4)
    assert partition_chain(lambda _: tight, 2) is None


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_every_rank_holds_a_layer(num_ranks):
    found = partition_chain(lambda _: segments_of([5, 0, 0, 0], 1, (0, 0)), num_ranks)
    assert found is not None
    assert all(np.diff([0, *found.ends]) >= 1)
