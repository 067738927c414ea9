"""The bench: fair, repeatable comparisons of policies and schedules."""

from __future__ import annotations

import numpy as np
import pytest
from report_cases import make_bench

from entrain_opt.errors import AssignmentError, ScheduleError
from entrain_opt.planner.demand import estimate_demand
from entrain_opt.report import Trial, draw_batches
from entrain_opt.report.bench import best_trial, microbatch_loads

#: The batch in which `pairwise` defers.
DEFERS = 1
POLICIES = ("pairwise", "in_order", "karmarkar_karp")


@pytest.fixture(scope="module")
def bench():
    return make_bench()


def test_batches_are_the_planners_own():
    from planner_cases import make_costs, make_samples

    samples = make_samples(100)
    rows = draw_batches(samples, 16, 3, seed=5)
    np.testing.assert_array_equal(rows, estimate_demand(samples, make_costs(), 16, num_batches=3, seed=5).rows)
    assert not np.array_equal(rows, draw_batches(samples, 16, 3, seed=6))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_trial_is_the_mean_of_its_timelines(bench, policy):
    trial = bench.trial(policy, "1f1b")
    timelines = [bench.timeline(batch, policy, "1f1b") for batch in range(2)]
    assert trial.can_run
    assert trial.step_seconds == pytest.approx(np.mean([t.makespan_seconds for t in timelines]))
    assert trial.bubble_share == pytest.approx(np.mean([t.bubble_share for t in timelines]))
    assert trial.peak_bytes == max(t.peak_bytes.max() for t in timelines)
    assert trial.samples_per_second == pytest.approx(32 / trial.step_seconds)
    assert trial.times_bound >= 1 - 1e-9
    assert trial.encoder_imbalance >= 1
    assert trial.llm_imbalance >= 1
    assert trial == make_bench().trial(policy, "1f1b")


def test_only_pairwise_defers(bench):
    assert bench.trial("pairwise", "1f1b").deferred_samples > 0
    assert bench.trial("karmarkar_karp", "1f1b").deferred_samples == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_loads_hold_all_work_once(bench, policy):
    costs, plan = bench.batches[DEFERS], bench.plan
    loads = microbatch_loads(costs, bench.assignment(DEFERS, policy), plan)
    stages = costs.stages
    per_stage = [(f + b).sum() for f, b in zip(stages.forward_seconds, stages.backward_seconds, strict=True)]
    assert sum(load.sum() for load in loads.encoder) == pytest.approx(np.mean(per_stage[:2]))
    assert sum(load.sum() for load in loads.llm) == pytest.approx(np.mean(per_stage[2:]))
    for whole, part in ((loads.encoder, loads.encoder_deferred), (loads.llm, loads.llm_deferred)):
        for all_of_it, deferred in zip(whole, part, strict=True):
            assert (deferred <= all_of_it + 1e-12).all()
        assert (sum(deferred.sum() for deferred in part) > 0) == (policy == "pairwise")


def test_memory_caps_are_tried_before_a_combination_is_given_up():
    free = make_bench()
    needs = free.trial("in_order", "gpipe").peak_bytes
    static = min(curve.weight_bytes for curve in free.timeline(0, "in_order", "gpipe").memory[0])
    tight = make_bench(limit_bytes=int(static + 0.8 * (needs - static)))
    trial = tight.trial("in_order", "gpipe")
    assert trial.capped
    assert trial.can_run
    assert trial.peak_bytes <= tight.limit_bytes < needs
    assert trial.step_seconds >= free.trial("in_order", "gpipe").step_seconds - 1e-9


def test_what_does_not_fit_says_why():
    trial = make_bench(limit_bytes=1 << 20).trial("in_order", "1f1b")
    assert not trial.can_run
    assert "MiB" in trial.failure


def test_unknown_names_raise(bench):
    with pytest.raises(AssignmentError, match="policy"):
        bench.trial("best", "1f1b")
    with pytest.raises(ScheduleError, match="schedule"):
        bench.trial("in_order", "fastest")


def test_the_best_trial_fits_and_ties_go_to_the_first():
    def trial(seconds, failure=""):
        return Trial(policy="p", schedule="s", num_microbatches=1, step_seconds=seconds, failure=failure)

    assert best_trial([trial(3.0), trial(1.0, "too big"), trial(2.0), trial(2.0)]) == 2
    assert best_trial([trial(float("nan"), "no"), trial(1.0, "too big")]) is None
