"""Replays: memory that the simulator does not see, and what is kept between plans."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import make_costs, make_model, make_plan, make_samples

from entrain_opt.assigner import assign_microbatches
from entrain_opt.errors import PlanError
from entrain_opt.planner import PlanOptions
from entrain_opt.planner.candidates import BEHIND, FINAL_BATCHES, Candidates
from entrain_opt.planner.demand import estimate_demand
from entrain_opt.planner.replay import Replay, Replayer, recomputed_bytes
from entrain_opt.planner.search import Ranked
from entrain_opt.planner.solve import solve_instance, solve_plan
from entrain_opt.simulator import simulate


def test_a_stage_recomputes_the_media_of_its_own_encoder_only():
    model = make_model()
    model = replace(model, encoders=(*model.encoders, replace(model.encoders[0], name="audio")))
    samples = make_samples(20)
    samples = replace(samples, media_kind=(np.arange(samples.num_media) % 3 == 0).astype(np.int64))
    costs = make_costs(model=model, devices=3)
    plan = make_plan([("vision", 0, 12, 0), ("audio", 0, 12, 1), ("llm", 0, 6, 2)])
    plan = replace(plan, stages=tuple(replace(stage, recompute=stage.module != "llm") for stage in plan.stages))
    batch = costs.batch_costs(samples, plan)
    assignment = assign_microbatches(batch, plan.pipeline_shape, num_replicas=1, num_microbatches=1)
    patches = [samples.media_patches[samples.media_kind == kind].sum() for kind in (0, 1)]
    expected = [
        costs.layer_bytes(stage, plan.degrees) * amount
        for stage, amount in zip(plan.stages, (*patches, 0), strict=True)
    ]
    np.testing.assert_allclose(recomputed_bytes(costs, plan, batch, assignment), [expected])


def test_the_largest_microbatch_of_each_replica_counts():
    samples, costs = make_samples(24), make_costs(devices=4)
    plan = make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)], data=2)
    plan = replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
    batch = costs.batch_costs(samples, plan)
    assignment = assign_microbatches(batch, plan.pipeline_shape, num_replicas=2, num_microbatches=4)
    found = recomputed_bytes(costs, plan, batch, assignment)
    for replica in range(2):
        tokens = [
            batch.tokens[(assignment.replica == replica) & (assignment.llm_microbatch == microbatch)].sum()
            for microbatch in range(int(assignment.num_microbatches[replica]))
        ]
        assert found[replica, 1] == pytest.approx(costs.layer_bytes(plan.stages[1], plan.degrees) * max(tokens))


def test_what_is_kept_of_a_plan_without_recompute_is_not_taken_for_one_with():
    samples, costs = make_samples(120), make_costs(devices=8)
    demand = estimate_demand(samples, costs, 16)
    options = PlanOptions(cost_model="analytic")
    plain = make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)], data=4)
    again = replace(plain, stages=tuple(replace(stage, recompute=stage.module == "llm") for stage in plain.stages))
    kept = Replayer(costs, demand, options)
    kept.replay(plain, num_batches=4, num_replicas=1)
    fresh = Replayer(costs, demand, options).replay(again, num_batches=4, num_replicas=1)
    assert kept.replay(again, num_batches=4, num_replicas=1) == fresh


@pytest.mark.parametrize("degree", ["tensor", "context"])
def test_a_wait_of_a_wide_rank_is_a_wait_of_all_its_devices(degree):
    samples, costs = make_samples(60), make_costs(devices=4)
    plan = make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)])
    plan = replace(plan, degrees=replace(plan.degrees, **{degree: (1, 3)}))
    demand = estimate_demand(samples, costs, 16)
    found = Replayer(costs, demand, PlanOptions(cost_model="analytic")).replay(plan, num_batches=1, num_replicas=1)
    batch, shape = costs.batch_costs(samples.take(demand.rows[0]), plan), plan.pipeline_shape
    assignment = assign_microbatches(batch, shape, num_microbatches=4, policy="pairwise", schedule="1f1b")
    idle = simulate(batch, assignment, shape, schedule="1f1b").bubble_share_of_rank[0]
    assert found.bubble_share == pytest.approx((idle[0] + 3 * idle[1]) / 4)
    assert abs(idle[0] - idle[1]) > 0.05


def test_replicas_kept_of_a_plan_are_not_those_of_a_plan_with_another_policy():
    samples, costs = make_samples(120), make_costs(devices=8)
    demand = estimate_demand(samples, costs, 16)
    options = PlanOptions(cost_model="analytic")
    plain = make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)], data=4)
    plans = [replace(plain, policy=policy) for policy in ("pairwise", "in_order")]
    kept = Replayer(costs, demand, options)
    found = [kept.replay(plan, num_batches=4, num_replicas=1) for plan in plans]
    assert found[1] == Replayer(costs, demand, options).replay(plans[1], num_batches=4, num_replicas=1)


def test_plans_of_degrees_that_did_not_fit_without_caps_get_them_at_once(monkeypatch):
    costs = make_costs(model=make_model(scale=4), devices=2)
    demand = estimate_demand(make_samples(120), costs, 64)
    first, second = (make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)], num_microbatches=count) for count in (16, 32))
    roomy = Replayer(costs, demand, PlanOptions(cost_model="analytic")).replay(first, num_batches=1, num_replicas=1)
    assert roomy.plan.patches_in_flight is roomy.plan.tokens_in_flight is None
    tight = Replayer(costs, demand, PlanOptions(cost_model="analytic", memory_bytes=int(0.9 * max(roomy.peak_bytes))))
    played = []
    simulate = tight._simulate
    monkeypatch.setattr(
        tight, "_simulate", lambda batch, plan, effort: (played.append(plan), simulate(batch, plan, effort))[1]
    )
    for plan in (first, second):
        found = tight.replay(plan, num_batches=2, num_replicas=1)
        assert max(found.peak_bytes) <= tight.limit_bytes
        assert found.plan.patches_in_flight is not None
        assert len(found.batch_seconds) == 2
        tight.learn(found)
    # Without caps, one batch of the first plan showed that it does not fit.
    assert [plan.num_microbatches for plan in played if plan.patches_in_flight is None] == [16]


def test_plans_of_other_degrees_get_caps_at_once_only_if_a_sample_fits_them():
    costs = make_costs(model=make_model(scale=4), devices=4)
    demand = estimate_demand(make_samples(120), costs, 64)
    first = make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)], num_microbatches=16)
    roomy = Replayer(costs, demand, PlanOptions(cost_model="analytic")).replay(first, num_batches=1, num_replicas=1)
    limit = int(0.9 * max(roomy.peak_bytes))
    tight = Replayer(costs, demand, PlanOptions(cost_model="analytic", memory_bytes=limit))
    other = make_plan([("vision", 0, 12, 0), ("llm", 0, 3, 1), ("llm", 3, 6, 2)], num_microbatches=16)
    alone = tight.replay(other, num_batches=1, num_replicas=1)
    tight.learn(tight.replay(first, num_batches=1, num_replicas=1))
    found = tight.replay(other, num_batches=1, num_replicas=1)
    assert found.plan.tokens_in_flight is not None
    assert max(found.peak_bytes) <= limit
    assert found.seconds <= 1.05 * alone.seconds


@pytest.mark.parametrize("memory_share", [None, 0.8])
def test_candidates_played_side_by_side_give_the_same_plan(monkeypatch, memory_share):
    costs = make_costs(model=make_model(scale=4), devices=8)
    samples = make_samples(200)
    options = PlanOptions(cost_model="analytic")
    if memory_share is not None:
        free = solve_plan(costs.model, samples, costs.cluster, global_batch_size=64, options=options, costs=costs)
        options = replace(options, memory_bytes=int(memory_share * max(free.predicted.peak_bytes)))
    plans = []
    for threads in (1, 2, 4):
        monkeypatch.setattr("entrain_opt.planner.candidates.THREADS", threads)
        plans.append(
            solve_plan(costs.model, samples, costs.cluster, global_batch_size=64, options=options, costs=costs)
        )
    assert plans[0] == plans[1] == plans[2]


class ScriptedReplayer(Replayer):
    """Says what it is told: the seconds of the baseline and of all others, by the number of replicas.

    No seconds stand for a plan that does not fit in memory.
    """

    def script(self, baseline, seconds):
        self.baseline, self.seconds = baseline, seconds

    def replay(self, plan, *, num_batches, num_replicas, effort="least"):
        seconds = self.seconds[num_replicas][plan != self.baseline]
        if seconds is None:
            raise PlanError("memory: scripted.")
        nothing = (0,) * plan.degrees.pipeline
        return Replay(
            plan=plan, batch_seconds=(seconds,) * num_batches, bubble_share=0.0, busy_share=nothing, peak_bytes=nothing,
            peak_parts=({},) * plan.degrees.pipeline, most_microbatches=plan.num_microbatches,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("one_replica", "two_replicas", "wins"),
    [
        ((1.01, 1.0), (1.01, 1.02), True),  # The heaviest replica was not the slowest.
        ((1.003, 1.0), (1.003, 1.0), True),  # A tie.
        ((1.02, 1.0), (1.02, 1.0), False),
        ((1.02, 1.0), (1.02, None), True),
        ((1.02, 1.0), (None, 1.0), False),
        ((1.2, 1.0), (1.2, 1.3), False),  # So far behind that nobody looks again.
    ],
)
def test_a_close_baseline_runs_against_the_winner_on_more_replicas(one_replica, two_replicas, wins):
    costs, options = make_costs(devices=8), PlanOptions(cost_model="analytic", data_parallel="all_reduce")
    demand = estimate_demand(make_samples(120), costs, 32)
    instance, _, ranking = solve_instance(costs, demand, options)
    baseline = next(one for one in ranking[1:] if one.choice.kind != ranking[0].choice.kind)
    replayer = ScriptedReplayer(costs, demand, options)
    candidates = Candidates(instance, replayer, make_plan([("llm", 0, 6, 0)]))
    replayer.script(candidates.plan_of(baseline), {1: one_replica, 2: two_replicas})
    best = candidates.search(ranking[0], ranking, baseline)[0]
    assert (best.ranked is baseline) == wins
    assert best.replay is not None


def test_candidates_far_behind_are_played_less_and_the_chosen_one_most():
    costs = make_costs(devices=8)
    options = PlanOptions(cost_model="analytic", pipeline_degree=4)
    demand = estimate_demand(make_samples(120), costs, 32)
    instance, solution, ranking = solve_instance(costs, demand, options)
    candidates = Candidates(instance, Replayer(costs, demand, options), make_plan([("llm", 0, 6, 0)]))
    solved = Ranked(choice=solution.choice, ends=solution.ends, ticks=solution.ticks)
    best, *others = candidates.search(solved, ranking, None)
    assert len(best.replay.batch_seconds) == FINAL_BATCHES
    short = [other for other in others if other.replay and len(other.replay.batch_seconds) == 1]
    assert short
    for other in short:
        # As seconds are scaled to the batches that the chosen one was played on, what was far behind still is.
        assert other.seconds > (1 + BEHIND) * best.seconds * 0.99
    assert all(
        best.seconds <= other.seconds
        for other in others
        if other.replay and len(other.replay.batch_seconds) == FINAL_BATCHES
    )
