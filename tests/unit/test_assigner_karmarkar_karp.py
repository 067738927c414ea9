"""The largest differencing method: nothing lost, good sums, full sets."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner.karmarkar_karp import largest_differencing


def largest_sum(values, labels, num_sets):
    return np.bincount(labels, weights=values, minlength=num_sets).max()


def greedy_largest_sum(values, num_sets):
    sums = np.zeros(num_sets)
    for value in sorted(values, reverse=True):
        sums[sums.argmin()] += value
    return sums.max()


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(0, 10), max_size=30), num_sets=st.integers(1, 8))
def test_sets_are_filled_and_numbered_by_falling_sum(values, num_sets):
    labels = largest_differencing(np.array(values), num_sets)
    assert labels.shape == (len(values),)
    assert set(labels.tolist()) == set(range(min(num_sets, len(values))))
    sums = np.bincount(labels, weights=values, minlength=num_sets) if values else np.zeros(1)
    assert (np.diff(sums) <= 1e-9).all()


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.integers(0, 30), min_size=1, max_size=7), num_sets=st.integers(2, 3))
def test_within_the_proven_bound_of_the_optimum(values, num_sets):
    values = np.array(values, dtype=float)
    found = largest_sum(values, largest_differencing(values, num_sets), num_sets)
    optimum = min(
        largest_sum(values, np.array(choice), num_sets) for choice in product(range(num_sets), repeat=len(values))
    )
    assert optimum <= found <= optimum * (4 / 3 - 1 / (3 * num_sets)) + 1e-9


def test_classic_example():
    # 8 7 6 5 4: differencing ends at 2 (16 against 14), where the optimum is 0 and largest first ends at 4.
    values = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
    assert largest_sum(values, largest_differencing(values, 2), 2) == 16
    assert greedy_largest_sum(values, 2) == 17


@pytest.mark.parametrize("num_sets", [2, 4, 8])
def test_better_than_largest_first_on_the_average_heavy_tailed_set(num_sets):
    generator = np.random.default_rng(0)
    sets = [generator.lognormal(size=12 * num_sets) for _ in range(30)]
    differencing = np.mean([largest_sum(v, largest_differencing(v, num_sets), num_sets) for v in sets])
    assert differencing <= np.mean([greedy_largest_sum(v, num_sets) for v in sets])
