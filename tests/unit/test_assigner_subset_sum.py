"""Closest subsets against all subsets."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner.subset_sum import SubsetSums

seconds = st.lists(st.floats(1e-3, 10), min_size=1, max_size=9)


def all_subsets(count):
    return [list(c) for size in range(count + 1) for c in combinations(range(count), size)]


@settings(max_examples=60, deadline=None)
@given(values=seconds, targets=st.lists(st.floats(1e-2, 20), min_size=1, max_size=3))
def test_no_further_from_the_target_than_rounding_allows(values, targets):
    values, targets = np.array(values), np.array(targets)
    table = SubsetSums(values, np.zeros(len(values)), targets.max())
    sums, names = table.closest(targets, np.full(len(targets), np.inf))
    for target, found, name in zip(targets, sums, names, strict=True):
        np.testing.assert_allclose(values[table.members(int(name))].sum(), found, rtol=1e-12)
        assert found <= 2 * target
        best = min(abs(values[c].sum() - target) for c in all_subsets(len(values)))
        assert abs(found - target) <= best + len(values) * table.unit


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=8),
    target=st.integers(1, 60),
    limit=st.integers(0, 60),
)
def test_whole_numbers_are_exact_and_the_size_limit_holds(rows, target, limit):
    values, sizes = np.array(rows, dtype=np.float64).T
    table = SubsetSums(values, sizes, 64.0)  # 32 steps per unit of value: nothing is rounded
    sums, names = table.closest(np.array([float(target)]), np.array([float(limit)]))
    assert sizes[table.members(int(names[0]))].sum() <= limit
    allowed = [c for c in all_subsets(len(rows)) if sizes[c].sum() <= limit]
    assert abs(sums[0] - target) == min(abs(values[c].sum() - target) for c in allowed)


def test_of_two_equally_close_sums_the_smaller_is_taken():
    sums, names = SubsetSums(np.array([2.0, 4.0]), np.zeros(2), 3.0).closest(np.array([3.0]), np.array([np.inf]))
    assert (sums[0], len(names)) == (2.0, 1)


def test_nothing_to_move_without_a_difference():
    table = SubsetSums(np.array([1.0, 2.0]), np.ones(2), 0.0)
    sums, names = table.closest(np.zeros(2), np.full(2, np.inf))
    assert sums.tolist() == [0.0, 0.0]
    assert all(len(table.members(int(name))) == 0 for name in names)
