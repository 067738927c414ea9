"""Leveling two loads: never worse, within the limits, and no item further than it may wait."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner.leveling import defer_peaks, improve_by_swaps, improve_from_kicks, place_greedily
from entrain_opt.assigner.random_numbers import random_state

seeds = st.integers(0, 2**32 - 1)


def random_items(seed, num_microbatches=None):
    """Loads in units of the mean microbatch, amounts, their microbatches, and limits that these keep."""
    generator = np.random.default_rng(seed)
    count, num_microbatches = int(generator.integers(1, 30)), num_microbatches or int(generator.integers(1, 9))
    loads = generator.lognormal(sigma=1.5, size=(count, 2)) * (generator.random((count, 2)) < 0.8)
    loads *= num_microbatches / np.maximum(loads.sum(axis=0), 1e-9)
    amounts = generator.integers(1, 20, (count, 2)).astype(np.float64)
    microbatch = generator.integers(0, num_microbatches, count)
    room = generator.choice([1.0, 1.2, np.inf])
    limits = sums(amounts, microbatch, num_microbatches).max(axis=0) * room
    return loads, amounts, microbatch, num_microbatches, limits


def sums(values, microbatch, num_microbatches):
    """[K, columns] over the items that are placed."""
    total = np.zeros((num_microbatches, values.shape[1]))
    np.add.at(total, microbatch[microbatch >= 0], values[microbatch >= 0])
    return total


def sum_of_squares(loads, microbatch, num_microbatches):
    return float((sums(loads, microbatch, num_microbatches) ** 2).sum())


@settings(max_examples=150, deadline=None)
@given(seed=seeds)
def test_swaps_never_raise_the_sum_of_squares(seed):
    loads, amounts, microbatch, count, limits = random_items(seed)
    improved = microbatch.copy()
    improve_by_swaps(loads, amounts, improved, count, limits, 50)
    before, after = (sum_of_squares(loads, m, count) for m in (microbatch, improved))
    assert after <= before + 1e-9
    assert (sums(amounts, improved, count) <= limits).all()
    assert set(improved.tolist()) <= set(range(count))
    assert set(microbatch.tolist()) <= set(improved.tolist())  # none of those in use is emptied
    again = improved.copy()
    improve_by_swaps(loads, amounts, again, count, limits, 50)
    assert sum_of_squares(loads, again, count) <= after + 1e-9


@settings(max_examples=100, deadline=None)
@given(seed=seeds)
def test_kicks_keep_what_is_better_and_the_limits(seed):
    loads, amounts, microbatch, count, limits = random_items(seed)
    kicked, again = microbatch.copy(), microbatch.copy()
    for each in (kicked, again):
        improve_from_kicks(loads, amounts, each, count, limits, 50, 5, random_state(seed))
    before, after = (sum_of_squares(loads, m, count) for m in (microbatch, kicked))
    assert after <= before + 1e-9
    assert (sums(amounts, kicked, count) <= limits).all()
    assert kicked.tolist() == again.tolist()


def test_kicks_leave_local_optima():
    gains = []
    for seed in range(10):
        generator = np.random.default_rng(seed)
        loads = generator.lognormal(size=(48, 2))
        microbatch, limits = np.arange(48) % 8, np.array([np.inf, np.inf])
        amounts = np.ones((48, 2))
        improve_by_swaps(loads, amounts, microbatch, 8, limits, 50)
        before = sum_of_squares(loads, microbatch, 8)
        improve_from_kicks(loads, amounts, microbatch, 8, limits, 50, 20, random_state(0))
        gains.append(before - sum_of_squares(loads, microbatch, 8))
    assert sum(gain > 1e-9 for gain in gains) >= 5


def test_swaps_end_where_no_move_or_swap_helps():
    loads, amounts, microbatch, count, _ = random_items(7, num_microbatches=4)
    limits = np.array([np.inf, np.inf])
    improve_by_swaps(loads, amounts, microbatch, count, limits, 1000)
    best = sum_of_squares(loads, microbatch, count)
    sizes = np.bincount(microbatch, minlength=count)
    for item, target in itertools.product(range(len(microbatch)), range(count)):
        if sizes[microbatch[item]] > 1:
            moved = microbatch.copy()
            moved[item] = target
            assert sum_of_squares(loads, moved, count) >= best - 1e-9
    for one, other in itertools.combinations(range(len(microbatch)), 2):
        swapped = microbatch.copy()
        swapped[[one, other]] = swapped[[other, one]]
        assert sum_of_squares(loads, swapped, count) >= best - 1e-9


def test_a_swap_may_exchange_what_no_move_could():
    """Both microbatches are full, so nothing can move; the even answer is one swap away."""
    loads = np.array([[1.0, 1.0], [0.5, 0.5], [0.5, 0.5], [0.0, 0.0]])
    amounts, microbatch = np.ones((4, 2)), np.array([0, 0, 1, 1])
    improve_by_swaps(loads, amounts, microbatch, 2, np.array([2.0, 2.0]), 50)
    assert sums(loads, microbatch, 2).tolist() == [[1.0, 1.0], [1.0, 1.0]]


@settings(max_examples=150, deadline=None)
@given(seed=seeds, room=st.sampled_from([0.3, 0.6, 1.0, np.inf]))
def test_greedy_leaves_out_only_what_fits_nowhere(seed, room):
    loads, amounts, _, count, _ = random_items(seed)
    limits = amounts.max(axis=0) * room * 2
    order = np.argsort(-loads.max(axis=1), kind="stable")
    microbatch = place_greedily(loads, amounts, order, count, limits)
    held = np.zeros((count, 2))
    for item in order:
        room_left = (held + amounts[item] <= limits).all(axis=1)
        if microbatch[item] < 0:
            assert not room_left.any()
        else:
            assert room_left[microbatch[item]]
            held[microbatch[item]] += amounts[item]


def test_greedy_looks_at_both_loads():
    loads = np.array([[0.9, 0.1], [0.1, 0.9], [0.1, 0.9], [0.9, 0.1]])
    unlimited = np.array([np.inf, np.inf])
    microbatch = place_greedily(loads, np.ones((4, 2)), np.arange(4), 2, unlimited)
    np.testing.assert_allclose(sums(loads, microbatch, 2), 1.0)
    assert microbatch[0] == 0  # ties go to the first


@settings(max_examples=150, deadline=None)
@given(seed=seeds, window=st.integers(0, 3), tolerance=st.sampled_from([0.0, 0.25]))
def test_deferral_keeps_window_and_limit(seed, window, tolerance):
    loads, amounts, microbatch, count, limits = random_items(seed)
    llm, held = loads[:, 1].copy(), amounts[:, 1].copy()
    deferred = microbatch.copy()
    defer_peaks(llm, held, np.arange(len(llm)), deferred, count, limits[1], window, tolerance)
    waits = deferred - microbatch
    assert waits.min() >= 0
    assert waits.max() <= window
    assert deferred.max() < count
    assert (sums(amounts, deferred, count)[:, 1] <= limits[1]).all()
    assert set(microbatch.tolist()) <= set(deferred.tolist())
    before, after = (sum_of_squares(llm[:, None], m, count) for m in (microbatch, deferred))
    assert after <= before + 1e-9


def test_only_loads_above_the_tolerance_give():
    loads = np.array([1.0, 0.2, 0.4, 0.4, 0.5, 0.5])
    start = np.array([0, 0, 1, 1, 2, 2])
    for tolerance, moves in ((0.25, False), (0.15, True)):
        microbatch = start.copy()
        defer_peaks(loads, np.ones(6), np.arange(6), microbatch, 3, np.inf, 2, tolerance)
        assert (microbatch != start).any() == moves


@pytest.mark.parametrize(("window", "expected"), [(0, [3, 0, 0]), (1, [2, 1, 0]), (2, [1, 1, 1])])
def test_worked_deferral(window, expected):
    microbatch = np.zeros(3, dtype=np.int64)
    defer_peaks(np.ones(3), np.ones(3), np.arange(3), microbatch, 3, np.inf, window, 0.0)
    assert np.bincount(microbatch, minlength=3).tolist() == expected
