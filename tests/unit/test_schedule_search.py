"""The search: never worse than the best fixed order, valid, deterministic, bounded by a count."""

import pytest
from hypothesis import given, settings
from test_schedule_cases import cases, random_case

from entrain_opt.schedule import FIXED_ORDERS, check_schedule, replica_work, schedule_replica
from entrain_opt.schedule import search as search_module
from entrain_opt.schedule.actions import BackwardWeight
from entrain_opt.schedule.orders import SPLITTING_ORDERS
from entrain_opt.schedule.search import search_schedule
from entrain_opt.simulator import simulate
from entrain_opt.simulator.bounds import work_bound


def alone(costs, assignment, replica):
    """The samples of one replica as a batch of its own."""
    from dataclasses import replace

    import numpy as np

    mine = np.flatnonzero(assignment.replica == replica)
    kept = np.isin(costs.media_sample, mine)
    return costs.take(mine), replace(
        assignment,
        replica=np.zeros(len(mine), dtype=int),
        encoder_microbatch=assignment.encoder_microbatch[kept],
        llm_microbatch=assignment.llm_microbatch[mine],
        num_microbatches=assignment.num_microbatches[[replica]],
    )


@given(case=cases)
@settings(max_examples=40, deadline=None)
def test_never_worse_than_the_best_fixed_order_nor_better_than_the_bound(case):
    costs, assignment, shape = case
    costs, assignment = alone(costs, assignment, 0)
    work = replica_work(costs, assignment, shape, 0)
    found = search_schedule(work, shape, costs=costs, evaluations=30)
    check_schedule(found, work, shape, costs=costs)
    spans = {name: simulate(costs, assignment, shape, schedule=name).makespan_seconds for name in FIXED_ORDERS}
    span = simulate(costs, assignment, shape, schedule=found).makespan_seconds
    best = min(spans.values())
    assert span <= best
    assert spans[found.best_fixed_order] == best
    assert found.gain == pytest.approx((best - span) / best if best else 0.0)
    assert span >= work_bound(costs, assignment, shape) * (1 - 1e-12)


def test_finds_something_on_uneven_work():
    gains = []
    for seed in range(12):
        costs, assignment, shape = random_case(seed, limited=False)
        work = replica_work(*alone(costs, assignment, 0), shape, 0)
        gains.append(search_schedule(work, shape, costs=alone(costs, assignment, 0)[0], evaluations=60).gain)
    assert max(gains) > 0.02


def test_same_seed_same_schedule_and_no_more_evaluations_than_allowed(monkeypatch):
    costs, assignment, shape = random_case(7, limited=True)
    work = replica_work(costs, assignment, shape, 0)
    assert len(work.llm_units) > 1
    calls = []
    original = search_module.replay
    monkeypatch.setattr(search_module, "replay", lambda *args: calls.append(1) or original(*args))
    first = search_schedule(work, shape, costs=costs, evaluations=50, seed=3)
    assert len(calls) == 50
    assert first == search_schedule(work, shape, costs=costs, evaluations=50, seed=3)
    assert schedule_replica(work, shape, order="search", costs=costs).order == "search"


def test_without_split_backward():
    for seed in range(10):
        costs, assignment, shape = random_case(seed)
        work = replica_work(costs, assignment, shape, 0)
        found = search_schedule(work, shape, costs=costs, evaluations=30, split_backward=False)
        assert not any(isinstance(action, BackwardWeight) for actions in found.compute for action in actions)
        assert found.best_fixed_order not in SPLITTING_ORDERS
