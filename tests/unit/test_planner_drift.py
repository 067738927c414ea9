"""Drift: data that moves names a better plan and what it gains; data in a steady mixture never does."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import make_costs, make_plan, make_samples

from entrain_opt.planner import PlanOptions, solve_plan
from entrain_opt.planner.demand import estimate_demand
from entrain_opt.planner.drift import NEWEST, DriftWatch
from entrain_opt.planner.replay import Replayer
from entrain_opt.units import format_seconds

BATCH, HALF = 32, 1200
COSTS = make_costs(devices=4)
OPTIONS = PlanOptions(cost_model="analytic", pipeline_degree=4, policy="pairwise", schedule="1f1b", method="search")


@pytest.fixture(scope="module")
def samples():
    """Twice as many as the plan was made for; the later ones have twelve times the text."""
    table = make_samples(2 * HALF, seed=1)
    longer = np.where(np.arange(2 * HALF) < HALF, 1, 12)
    return replace(table, text_tokens=longer * table.text_tokens)


@pytest.fixture(scope="module")
def plan(samples):
    planned = samples.take(np.arange(HALF))
    return solve_plan(COSTS.model, planned, COSTS.cluster, global_batch_size=BATCH, options=OPTIONS, costs=COSTS)


def note(watch, rows):
    for start in range(0, len(rows), BATCH):
        watch.note(rows[start : start + BATCH])


def test_drift_names_a_plan_that_is_faster_by_what_it_says(samples, plan):
    watch = DriftWatch(plan, samples, COSTS, OPTIONS)
    note(watch, np.arange(HALF))
    assert watch.look() is None
    note(watch, np.arange(HALF, 2 * HALF))
    note(watch, np.tile(np.arange(HALF, 2 * HALF), 4))  # The old samples leave the newest 4,096.
    drift = watch.look()
    assert drift is not None
    assert drift.shares["llm"] > drift.planned_shares["llm"] + 0.1
    assert drift.gain > 0.03
    assert drift.plan.stages != plan.stages
    # On batches drawn anew from what the data has become.
    later = samples.take(np.arange(HALF, 2 * HALF))
    replayer = Replayer(COSTS, estimate_demand(later, COSTS, BATCH, seed=7), OPTIONS)
    old, new = (replayer.replay(p, num_batches=4, num_replicas=1).seconds for p in (plan, drift.plan))
    assert 1 - new / old == pytest.approx(drift.gain, abs=0.1)
    said = drift.sentence()
    assert f"{drift.shares['llm']:.0%}" in said
    assert f"{drift.gain:.1%} less" in said
    assert format_seconds(drift.seconds) in said
    assert "llm[" in said
    # Said once; the same mixture is not judged again.
    assert watch.look() is None


def test_steady_data_is_never_judged(samples, plan, monkeypatch):
    def judge(*_, **__):
        raise AssertionError("the planner was asked although nothing has moved")

    monkeypatch.setattr("entrain_opt.planner.drift.solve_plan", judge)
    for seed in range(20):
        watch = DriftWatch(plan, samples, COSTS, OPTIONS)
        generator = np.random.default_rng(seed)
        for _ in range(12):
            note(watch, generator.permutation(HALF)[: 4 * BATCH])
            assert watch.look() is None


def test_moved_data_for_which_the_plan_is_still_best_gives_no_drift(samples, plan):
    # One rank per replica: no cut to move, and two replicas of it are fixed by the options.
    options = replace(OPTIONS, pipeline_degree=1, data_degree=4, num_microbatches=plan.num_microbatches)
    stages = [("vision", 0, 12, 0), ("llm", 0, 6, 0)]
    replicas = replace(
        make_plan(stages, data=4, num_microbatches=plan.num_microbatches), global_batch_size=BATCH,
        provenance=plan.provenance,
    )  # fmt: skip
    watch = DriftWatch(replicas, samples, COSTS, options)
    note(watch, np.arange(HALF, 2 * HALF))
    assert watch.look() is None


def test_a_plan_that_cannot_run_the_new_data_is_said_so(samples, plan):
    """Its memory caps leave no room for the longest of the new samples."""
    capped = replace(plan, tokens_in_flight=int(samples.total_tokens[:HALF].max()))
    watch = DriftWatch(capped, samples, COSTS, OPTIONS)
    note(watch, np.tile(np.arange(HALF, 2 * HALF), 4))
    drift = watch.look()
    assert drift is not None
    assert drift.running_seconds is None
    assert drift.gain == 1
    assert "can no longer run" in drift.sentence()


def test_shares_come_from_the_plan_if_it_was_made_from_such_costs(samples, plan):
    by_plan = DriftWatch(plan, samples, COSTS, OPTIONS).planned_shares
    by_hand = replace(plan, provenance=replace(plan.provenance, cost_source="none"))
    by_table = DriftWatch(by_hand, samples, COSTS, OPTIONS).planned_shares
    assert sum(by_plan.values()) == pytest.approx(1, abs=1e-5)
    assert by_table["llm"] > by_plan["llm"] + 0.05


def test_no_plan_that_cannot_be_trained_is_recommended(samples, plan):
    assert DriftWatch(plan, samples, COSTS, replace(OPTIONS, context_degrees=(1, 2))).options == OPTIONS


def test_memory_of_the_watch_is_bounded(samples, plan):
    watch = DriftWatch(plan, samples, COSTS, OPTIONS)
    for _ in range(1000):
        watch.note(np.arange(BATCH))
    assert NEWEST <= sum(map(len, watch._recent)) <= NEWEST + BATCH
