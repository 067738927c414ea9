"""Sharding the optimizer's state is chosen where memory asks for it, never for its own sake, and counted as it is."""

import io
from dataclasses import replace

import numpy as np
import pytest
from planner_cases import make_model, make_samples
from rich.console import Console

from entrain_opt.cost import CostModel, memory
from entrain_opt.cost.precision import find_precision, precisions
from entrain_opt.errors import PlanError
from entrain_opt.plan import ParallelDegrees, Plan
from entrain_opt.plan.shares import BUCKET_BYTES
from entrain_opt.planner import PlanOptions, solve_plan
from entrain_opt.planner.candidates import WORTH_SHARDING
from entrain_opt.planner.demand import estimate_demand
from entrain_opt.planner.estimates import Estimator, Layout
from entrain_opt.planner.search import rank_choices
from entrain_opt.planner.shortlist import build_shortlist
from entrain_opt.planner.solve import solve_instance
from entrain_opt.planner.table import plan_table
from entrain_opt.spec import ClusterSpec

SAMPLES = make_samples(80)
#: 140 million parameters: state is most of what a rank holds.
MODEL = make_model(scale=6)
OPTIONS = PlanOptions(cost_model="analytic", device="A40-48GB", policy="pairwise", schedule="1f1b", pipeline_degree=2)


def make(gib: float, *, devices: int = 8, **options):
    limit = int(gib * 2**30)
    cluster = ClusterSpec(device="A40-48GB", devices_per_node=devices, memory_bytes=limit)
    return CostModel(MODEL, cluster), replace(OPTIONS, memory_bytes=limit, **options)


def solve(gib: float, **options) -> Plan:
    costs, asked = make(gib, **options)
    return solve_plan(MODEL, SAMPLES, costs.cluster, global_batch_size=32, options=asked, costs=costs)


def static_mib(plan: Plan) -> list[int]:
    assert plan.predicted is not None
    names = ("weights", "gradients", "optimizer", "buffers")
    return [sum(parts.get(name, 0) for name in names) >> 20 for parts in plan.predicted.peak_bytes_parts]


def least_gib(data_parallel: str) -> float:
    """Memory that just holds a plan, to an eighth of a GiB."""
    for eighths in range(4, 40):
        try:
            solve(eighths / 8, data_parallel=data_parallel)
        except PlanError:
            continue
        return eighths / 8
    raise AssertionError("nothing fits in 5 GiB")


def test_it_is_chosen_where_only_it_fits_and_not_where_all_fits():
    least = {how: least_gib(how) for how in ("all_reduce", "sharded")}
    assert least["sharded"] < least["all_reduce"]
    tight, wide = solve(least["sharded"]), solve(20.0)
    assert (tight.data_parallel, wide.data_parallel) == ("sharded", "all_reduce")
    assert not any("data_parallel" in candidate for candidate in wide.provenance.candidates)
    assert tight.provenance.candidates[0]["data_parallel"] == "sharded"
    assert max(tight.predicted.peak_bytes) <= least["sharded"] * 2**30
    with pytest.raises(PlanError, match=r"Closest feasible: .*data_parallel=search \(data=4, pipeline=2\)"):
        solve(least["sharded"], data_parallel="all_reduce")


@pytest.mark.parametrize("gib", [3.5, 4.0, 6.0])
def test_where_both_fit_it_is_chosen_for_more_than_a_percent_alone(gib):
    found, summed = solve(gib), solve(gib, data_parallel="all_reduce")
    assert found.predicted is not None
    assert summed.predicted is not None
    if found.shards_state:
        assert (1 + WORTH_SHARDING) * found.predicted.iteration_seconds < summed.predicted.iteration_seconds
    else:
        assert found.predicted.iteration_seconds <= summed.predicted.iteration_seconds


def test_asked_for_it_is_used_wherever_there_are_replicas():
    sharded, summed = solve(20.0, data_parallel="sharded"), solve(20.0, data_parallel="all_reduce")
    assert (sharded.shards_state, sharded.num_shares) == (True, sharded.degrees.data)
    assert (summed.shards_state, summed.num_shares) == (False, 1)
    assert all(a < b for a, b in zip(static_mib(sharded), static_mib(summed), strict=True))
    alone = solve(20.0, data_parallel="sharded", devices=2)
    assert (alone.degrees.data, alone.data_parallel) == (1, "all_reduce")
    with pytest.raises(PlanError, match=r"data_parallel: expected one of .*'search'"):
        solve(20.0, data_parallel="fsdp")


def test_the_table_says_so():
    plan = solve(20.0, data_parallel="sharded")
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(plan_table(plan))
    assert "replicas that share the optimizer's state x 2 pipeline ranks" in console.export_text()


@pytest.mark.parametrize("gib", [1.0, 1.5, 2.0, 3.0, 20.0])
@pytest.mark.parametrize("pipeline", [None, 2])
def test_every_solver_finds_the_optimum_of_the_whole_space(gib, pipeline):
    """The shortlist drops twins that cannot win; enumeration of all choices finds nothing better."""
    costs, options = make(gib, pipeline_degree=pipeline)
    demand = estimate_demand(SAMPLES, costs, 32)
    whole, _ = build_shortlist(costs, demand, options, everything=True)
    best = rank_choices(whole)
    short, ranking = build_shortlist(costs, demand, options)
    assert len(whole.choices) == len(short.choices) + short.num_dropped
    assert (ranking[0].ticks if ranking else None) == (best[0].ticks if best else None)
    if not best:
        return
    for method in ("cp-sat", "ilp", "search"):
        _, solution, _ = solve_instance(costs, demand, replace(options, method=method))
        assert (solution.ticks, solution.gap) == (best[0].ticks, 0.0)
        assert solution.choice.sharded == best[0].choice.sharded


@pytest.mark.parametrize("name", precisions())
def test_state_is_divided_and_weights_and_gradients_are_not(name):
    precision = find_precision(name)
    whole, share = (
        memory.parameter_bytes(1000, trained=True, precision=precision, reduced=True, shares=n) for n in (1, 4)
    )
    assert (share.weights, share.gradients) == (whole.weights, whole.gradients)
    assert (share.optimizer, share.buffers) == (whole.optimizer / 4, whole.buffers / 4)
    frozen = memory.parameter_bytes(1000, trained=False, precision=precision, reduced=True, shares=4)
    assert frozen.total == frozen.weights


def test_a_message_is_held_besides_and_a_table_whose_rows_do_not_divide():
    llm, precision = MODEL.llm, find_precision("bf16-true")
    for shares in (4, 3):
        held = memory.stage_bytes(MODEL, llm, (0, 6), precision=precision, reduced=True, shares=shares)
        trained = memory.trained_parameters(MODEL, llm, (0, 6))
        tables = 0 if llm.vocabulary_size % shares == 0 else 2 * 4 * llm.vocabulary_size * llm.hidden_size
        assert held.buffers == pytest.approx(4 * trained / shares + BUCKET_BYTES + tables)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_problem_in_mib_counts_no_less_than_the_stages_hold(sharded):
    costs, options = make(20.0, data_parallel="sharded" if sharded else "all_reduce")
    demand = estimate_demand(SAMPLES, costs, 32)
    instance, _ = build_shortlist(costs, demand, options, everything=True)
    choice = next(choice for choice in instance.choices if choice.data == 4)
    assert choice.sharded == sharded
    ends = (7, instance.chain_length)
    for rank, mib in enumerate(instance.memory_mib(choice, ends)):
        stages = [stage for stage in instance.stages(ends, choice) if stage.rank == rank]
        held = sum(costs.static_bytes(stage, choice.degrees, choice.num_shares).total for stage in stages)
        assert held / 2**20 <= mib


def test_the_update_takes_as_many_bytes_as_a_sum_everywhere_and_a_share_of_the_step():
    costs, _ = make(20.0)
    plan = solve(20.0, data_parallel="sharded")
    summed = replace(plan, data_parallel="all_reduce")
    update = costs.update
    step = [update.trained_parameters(plan, i) * costs.step_seconds_per_parameter for i in range(len(plan.stages))]
    for i, whole_step in enumerate(step):
        reduction = update.reduce_seconds(summed, i)
        assert update.step_seconds(summed, i) == whole_step
        assert update.reduce_seconds(plan, i) == pytest.approx(reduction / 2)
        gather = update.step_seconds(plan, i) - whole_step / plan.degrees.data
        assert gather == pytest.approx(reduction / 2)
    half = CostModel(MODEL, costs.cluster, precision="bf16-true").update
    latency = (plan.degrees.data - 1) * costs.links.latency_seconds
    i = len(plan.stages) - 1
    gather = half.step_seconds(plan, i) - half.step_seconds(summed, i) / plan.degrees.data
    assert gather - latency == pytest.approx((half.reduce_seconds(plan, i) - latency) / 2)


def test_layouts_that_share_are_given_the_seconds_of_those_that_do_not():
    costs, options = make(20.0)
    instance, _ = build_shortlist(costs, estimate_demand(SAMPLES, costs, 32), options, everything=True)
    by = {(c.data, c.num_microbatches, c.sharded): c for c in instance.choices}
    twins = [(choice, by[data, count, False]) for (data, count, sharded), choice in by.items() if sharded]
    assert twins
    for twin, plain in twins:
        assert (twin.ticks, twin.constant_ticks) == (plain.ticks, plain.constant_ticks)
        assert all(a.layer < b.layer for a, b in zip(twin.mib, plain.mib, strict=True))


def test_estimates_of_layouts_need_no_replicas_to_share():
    costs, _ = make(20.0)
    estimator = Estimator(costs, estimate_demand(SAMPLES, costs, 32))
    one = Layout(degrees=ParallelDegrees(data=1, pipeline=8), tensor=(1, 1), context=(1, 1), recompute=(False, False))
    counts = np.array([4])
    assert estimator.mib(one, 4, one_in_flight=True) == estimator.mib(replace(one, sharded=True), 4, one_in_flight=True)
    assert np.array_equal(
        estimator.seconds(one, counts).constant, estimator.seconds(replace(one, sharded=True), counts).constant
    )
