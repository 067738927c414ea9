"""Lower bounds: never above what any order reaches, exact in the textbook cases."""

import pytest
from hypothesis import given, settings
from test_schedule_cases import cases, uniform

from entrain_opt.schedule import FIXED_ORDERS
from entrain_opt.schedule.orders import SPLITTING_ORDERS
from entrain_opt.simulator import simulate
from entrain_opt.simulator.bounds import balanced_1f1b_bound, balanced_1f1b_seconds, work_bound


@given(case=cases)
@settings(max_examples=120, deadline=None)
def test_no_order_beats_the_bounds(case):
    costs, assignment, shape = case
    bound, balanced = work_bound(costs, assignment, shape), balanced_1f1b_bound(costs, assignment, shape)
    whole = work_bound(costs, assignment, shape, split_backward=False)
    assert balanced <= bound * (1 + 1e-12)
    assert bound <= whole * (1 + 1e-12)
    for order in FIXED_ORDERS:
        span = simulate(costs, assignment, shape, schedule=order).makespan_seconds * (1 + 1e-12)
        assert span >= (bound if order in SPLITTING_ORDERS else whole)


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_microbatches", [1, 4, 9])
def test_uniform_bounds_are_reached(num_microbatches, num_stages):
    case = uniform(num_microbatches, num_stages)
    one_f_one_b = (num_microbatches + num_stages - 1) * 3.0
    assert work_bound(*case, split_backward=False) == one_f_one_b
    assert balanced_1f1b_bound(*case, split_backward=False) == pytest.approx(one_f_one_b)
    assert balanced_1f1b_seconds(case[0], case[2], num_microbatches=num_microbatches) == pytest.approx(one_f_one_b)
    if num_microbatches >= num_stages:
        assert work_bound(*case) == 3 * num_microbatches + num_stages - 1
