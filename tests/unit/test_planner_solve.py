"""Plans: checked, within memory, deterministic, no worse than the paper's rule, and honest when nothing fits."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import make_model, make_samples

from entrain_opt.cost import CostModel, Line
from entrain_opt.errors import PlanError, WorkloadError
from entrain_opt.plan import Plan
from entrain_opt.planner import PlanOptions, solve_plan
from entrain_opt.planner.options import METHODS
from entrain_opt.planner.table import plan_sentences
from entrain_opt.spec import ClusterSpec

ANALYTIC = PlanOptions(cost_model="analytic")
SAMPLES = make_samples(120)


def solve(devices: int = 4, *, batch: int = 32, model=None, samples=SAMPLES, **options) -> Plan:
    return solve_plan(
        model or make_model(), samples, ClusterSpec(devices_per_node=devices), global_batch_size=batch,
        options=replace(ANALYTIC, **options),
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("devices", [1, 4])
def test_every_method_gives_a_runnable_plan(method, devices):
    plan = solve(devices, method=method)
    plan.degrees.check(devices)
    plan.check(num_layers={"vision": 12, "llm": 6})
    assert plan.predicted is not None
    assert plan.predicted.samples_per_second == pytest.approx(32 / plan.predicted.iteration_seconds)
    assert len(plan.predicted.peak_bytes) == plan.degrees.pipeline
    for peak, parts in zip(plan.predicted.peak_bytes, plan.predicted.peak_bytes_parts, strict=True):
        assert peak == sum(parts.values()) <= ClusterSpec().memory_limit_bytes
    assert plan.provenance.method == method
    assert plan.provenance.bound_seconds <= plan.provenance.objective_seconds


def test_exact_methods_agree_and_none_is_worse_than_the_papers_rule():
    plans = {method: solve(8, method=method, pipeline_degree=4) for method in METHODS}
    objectives = {plans[method].provenance.objective_seconds for method in ("cp-sat", "ilp", "search")}
    assert len(objectives) == 1
    assert objectives.pop() <= plans["proportional"].provenance.objective_seconds
    best = plans["cp-sat"].predicted.iteration_seconds
    assert best <= plans["proportional"].predicted.iteration_seconds * 1.0001


def test_the_same_inputs_give_the_same_plan_and_other_inputs_another_hash(tmp_path):
    first, second = solve(), solve()
    first.write(tmp_path / "a.yaml")
    second.write(tmp_path / "b.yaml")
    assert (tmp_path / "a.yaml").read_bytes() == (tmp_path / "b.yaml").read_bytes()
    assert Plan.read(tmp_path / "a.yaml").stages == first.stages
    hashes = {first.provenance.input_hash, solve(seed=1).provenance.input_hash, solve(batch=33).provenance.input_hash}
    hashes |= {solve(samples=make_samples(120, seed=1)).provenance.input_hash, solve(2).provenance.input_hash}
    assert len(hashes) == 5


def test_one_device_holds_both_modules():
    plan = solve(1)
    assert [(stage.module, stage.rank) for stage in plan.stages] == [("vision", 0), ("llm", 0)]
    assert plan.pipeline_shape.num_ranks == 1


def test_backwards_are_split_where_that_pays():
    cluster = ClusterSpec(devices_per_node=4)

    def solved(split_seconds, **options):
        costs = CostModel(make_model(), cluster)
        for name, module in costs.modules.items():
            split = module.layer.backward.plus(Line(fixed_seconds=split_seconds))
            costs.modules[name] = replace(module, layer=replace(module.layer, split_backward=split))
        return solve_plan(
            make_model(), SAMPLES, cluster, global_batch_size=32, costs=costs,
            options=replace(ANALYTIC, pipeline_degree=4, **options),
        )  # fmt: skip

    cheap, dear, given = solved(0.0), solved(1.0), solved(0.0, schedule="eager")
    assert (cheap.schedule, dear.schedule, given.schedule) == ("eager_split", "eager", "eager")
    assert dear.stages == given.stages
    assert cheap.predicted.iteration_seconds < given.predicted.iteration_seconds
    assert cheap.provenance.candidates[0]["predicted_seconds"] == cheap.predicted.iteration_seconds
    # Where nothing is worth splitting, all plans are those of `eager`.
    mine, theirs = ([entry["stages"] for entry in plan.provenance.candidates] for plan in (dear, given))
    assert mine == theirs


def test_what_the_user_fixes_stays_fixed():
    plan = solve(4, data_degree=2, num_microbatches=5, schedule="eager", policy="in_order")
    assert (plan.degrees.data, plan.degrees.pipeline, plan.num_microbatches) == (2, 2, 5)
    assert (plan.schedule, plan.policy) == ("eager", "in_order")
    with pytest.raises(PlanError, match=r"data_degree = 3.*Possible with the same degrees"):
        solve(4, data_degree=3)


def test_frozen_parts_shift_layers_to_what_trains():
    layers = []
    for frozen in ((), ("vision_tower", "projector")):
        plan = solve(4, model=make_model(frozen=frozen), pipeline_degree=4)
        assert plan.frozen == frozen
        layers.append(sum(stage.module == "vision" for stage in plan.stages))
    assert layers[1] <= layers[0]


def test_a_batch_smaller_than_the_devices_limits_the_replicas():
    plan = solve(8, batch=3)
    assert plan.degrees.data <= 3


@pytest.mark.parametrize("kind", ["text", "images"])
def test_data_of_one_kind_only(kind):
    samples = make_samples(60)
    if kind == "text":
        samples = samples.take(samples.media_counts == 0)
        assert samples.num_media == 0
    else:
        samples = samples.take(samples.media_counts > 0)
    plan = solve(4, samples=samples, batch=8, pipeline_degree=4)
    plan.check(num_layers={"vision": 12, "llm": 6})


def test_too_little_memory_names_the_stage_the_need_and_the_closest_choice():
    with pytest.raises(PlanError, match=r"stage \d+ \(.*\) needs .* MiB, the device has 16.0 MiB.*closest choice"):
        solve(4, memory_bytes=16 << 20)


def test_where_only_the_papers_split_does_not_fit_the_method_is_what_binds():
    little = {"pipeline_degree": 2, "memory_bytes": 330 << 20}
    with pytest.raises(PlanError, match=r"^method: the proportional split .* fits nowhere, another split does\. Use"):
        solve(4, method="proportional", **little)
    assert solve(4, **little).provenance.method == "cp-sat"


def test_changes_that_would_fit_are_named_with_their_degrees():
    with pytest.raises(PlanError, match=r"pipeline=2, tensor=[124]/[124]\);") as raised:
        solve(4, pipeline_degree=2, memory_bytes=90 << 20)
    assert "8 devices (data=1, pipeline=8);" in str(raised.value)


def test_a_sample_that_no_rank_can_hold_is_named():
    samples = make_samples(60)
    text = samples.text_tokens.copy()
    text[17] = 400_000
    with pytest.raises(PlanError, match=r"(memory: stage|sample 's17' alone)"):
        solve(4, samples=replace(samples, text_tokens=text), memory_bytes=1 << 30)


def test_short_memory_gives_caps_that_the_prediction_keeps():
    # A policy that searches could be luckier with less memory.
    fixed = {"pipeline_degree": 4, "num_microbatches": 8, "policy": "pairwise", "schedule": "1f1b"}
    generous = solve(4, **fixed)
    assert (generous.patches_in_flight, generous.tokens_in_flight) == (None, None)
    limit = int(0.8 * max(generous.predicted.peak_bytes))
    tight = solve(4, **fixed, memory_bytes=limit)
    assert max(tight.predicted.peak_bytes) <= limit
    assert tight.predicted.iteration_seconds >= generous.predicted.iteration_seconds


def test_the_proved_bound_and_the_runners_up_are_kept():
    plan = solve(4)
    assert (plan.provenance.solver_status, plan.provenance.gap) == ("optimal", 0.0)
    chosen, *others = plan.provenance.candidates
    assert chosen["outcome"] == "chosen"
    assert chosen["predicted_seconds"] == plan.predicted.iteration_seconds
    assert others
    assert {(c["data"], c["pipeline"]) for c in others} - {(chosen["data"], chosen["pipeline"])}
    for candidate in others:
        assert any(words in candidate["outcome"] for words in ("slower", "as fast", "cannot run")), candidate["outcome"]


def test_accelerators_get_a_utilization_and_cpus_none():
    assert solve(2).predicted.model_flops_utilization is None
    cluster = ClusterSpec(device="A100-80GB", devices_per_node=4)
    plan = solve_plan(make_model(scale=8), SAMPLES, cluster, global_batch_size=64)
    assert 0 < plan.predicted.model_flops_utilization < 0.7


def test_given_costs_are_used():
    cluster, model = ClusterSpec(devices_per_node=2), make_model()
    slow = CostModel(model, cluster)
    slow.step_seconds_per_parameter *= 1000
    plans = [solve_plan(model, SAMPLES, cluster, global_batch_size=16, costs=c) for c in (None, slow)]
    assert plans[1].predicted.iteration_seconds > 2 * plans[0].predicted.iteration_seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "cpsat"}, "method: expected one of"),
        ({"schedule": "2f2b"}, "schedule: expected"),
        ({"pipeline_degree": 0}, "pipeline_degree: expected a whole number"),
        ({"time_limit_seconds": 0}, "time_limit_seconds"),
        ({"seed": -1}, "seed: expected"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(PlanError, match=message):
        solve(**options)


def test_no_samples_is_an_error():
    with pytest.raises(WorkloadError):
        solve(samples=SAMPLES.take(np.zeros(0, dtype=np.int64)))


@pytest.mark.parametrize("limit", [0.01, 1e-9])
@pytest.mark.parametrize("method", ["cp-sat", "ilp-highs", "ilp-cbc"])
def test_with_hardly_any_time_the_plan_holds_and_says_what_is_not_proved(method, limit):
    plan = solve(4, method=method, pipeline_degree=4, time_limit_seconds=limit)
    plan.check(num_layers={"vision": 12, "llm": 6})
    assert max(plan.predicted.peak_bytes) <= ClusterSpec().memory_limit_bytes
    best = solve(4, method="search", pipeline_degree=4).provenance.objective_seconds
    proof = plan.provenance
    assert proof.bound_seconds <= best <= proof.objective_seconds
    said = next(line for line in plan_sentences(plan) if line.startswith(f"{method}: "))
    gap = 1 - proof.bound_seconds / proof.objective_seconds
    assert (proof.solver_status == "optimal") == (gap == 0)
    assert said.startswith(f"{method}: optimal," if gap == 0 else f"{method}: not proven optimal, gap {gap:.1%},")
    if method == "cp-sat" and limit < 1e-6:
        assert gap > 0
