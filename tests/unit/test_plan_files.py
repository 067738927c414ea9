"""Plan files: what was written comes back, and an edit is accepted or refused by the name of its field."""

import pytest
import yaml
from planner_cases import make_model, make_samples

from entrain_opt.errors import PlanError
from entrain_opt.plan import ParallelDegrees, Plan
from entrain_opt.planner import PlanOptions, solve_plan
from entrain_opt.planner.resolve import check_plan_file
from entrain_opt.spec import ClusterSpec

MODEL = make_model()
CLUSTER = ClusterSpec(devices_per_node=4)


@pytest.fixture(scope="module")
def plan() -> Plan:
    options = PlanOptions(cost_model="analytic", pipeline_degree=4)
    return solve_plan(MODEL, make_samples(80), CLUSTER, global_batch_size=16, options=options)


@pytest.fixture
def edit(plan, tmp_path):
    def edited(change) -> Plan:
        path = tmp_path / "plan.yaml"
        plan.write(path)
        content = yaml.safe_load(path.read_text())
        change(content)
        path.write_text(yaml.safe_dump(content))
        return check_plan_file(path, MODEL, CLUSTER, 16, ())

    return edited


def test_a_plan_comes_back_as_it_was(plan, edit):
    assert edit(lambda content: None) == plan


def test_the_file_says_how_sure_it_is_and_why_others_lost(plan):
    provenance = plan.provenance
    assert (provenance.solver_status, provenance.gap) == ("optimal", 0.0)
    assert provenance.bound_seconds == provenance.objective_seconds
    chosen, *others = provenance.candidates
    assert chosen["outcome"] == "chosen"
    assert others
    for other in others:
        assert any(word in other["outcome"] for word in ("slower", "cannot run", "closed form"))
    stability = provenance.stability
    assert {"statement", "b_min", "worst_regret", "splits", "order"} <= set(stability)
    assert list(stability["splits"]) == ["1", "4", "16", "64", "256"]
    assert all(sum(counts.values()) == stability["trials"] == 59 for counts in stability["splits"].values())


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(num_microbatches=3),
        lambda content: content.update(schedule="gpipe", policy="karmarkar_karp"),
        lambda content: content.update(data_parallel="sharded"),
        lambda content: content.pop("data_parallel"),
        lambda content: content.update(predicted=None),
        lambda content: content.pop("provenance"),
        lambda content: content["degrees"].pop("tensor"),
        lambda content: content.update(tokens_in_flight=4096),
        lambda content: content["stages"][0].update(recompute=True),
    ],
)
def test_sensible_edits_are_accepted(edit, change):
    assert edit(change).model == "hand-built"


def test_moving_the_border_of_a_stage_is_accepted(plan, edit):
    def move(content):
        first, second = content["stages"][:2]
        if first["module"] != second["module"]:
            first, second = content["stages"][1:3]
        first["layers"][1] -= 1
        second["layers"][0] -= 1

    moved = edit(move).stages
    assert moved != plan.stages
    assert [stage.rank for stage in moved] == [stage.rank for stage in plan.stages]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda c: c.update(num_microbatches=0), "num_microbatches: expected at least 1"),
        (lambda c: c.update(num_microbatches="four"), r"plan.num_microbatches: expected a whole number, found 'four'"),
        (lambda c: c.update(num_microbatches=2.5), r"plan.num_microbatches: expected a whole number"),
        (lambda c: c.update(global_batch_size=32), "global_batch_size: the run asks for 16"),
        (lambda c: c.update(microbatches=3), "unknown field 'microbatches'"),
        (lambda c: c.update(data_parallel="zero"), r"data_parallel: expected one of \['all_reduce', 'sharded'\]"),
        (lambda c: c.update(policy="best"), "policy: expected one of"),
        (lambda c: c.update(schedule="2f2b"), "schedule: expected one of"),
        (lambda c: c.update(frozen=["projector"]), "frozen: the run asks for"),
        (lambda c: c["degrees"].update(data=2), r"degrees: data \(2\)"),
        (lambda c: c["degrees"].update(data=0), "degrees.data: expected at least 1"),
        (lambda c: c["degrees"].update(tensor=[1, 1]), "degrees.tensor: expected a number of at least 1, or one for"),
        (lambda c: c["degrees"].update(tensor="two"), "plan.degrees.tensor: expected a whole number or a list"),
        (lambda c: c["stages"][0].update(layers=[1, 3]), r"stages\[0\].layers: expected vision layers from 0"),
        (lambda c: c["stages"][0].update(layers=[1]), r"plan.stages\[0\].layers: expected a list of 2 values"),
        (lambda c: c["stages"][0].update(rank=9), r"stages\[0\].rank: expected 0 to 3"),
        (lambda c: c["stages"][-1]["layers"].__setitem__(1, 7), "stages: module llm of hand-built has 6 layers"),
        (lambda c: c["stages"].pop(), "stages: "),
        (lambda c: c.pop("stages"), "missing 1 required keyword-only argument: 'stages'"),
        (lambda c: c.update(stages=3), "plan.stages: expected a list"),
        (lambda c: c.update(tokens_in_flight=0), "tokens_in_flight: expected at least 1"),
    ],
)
def test_wrong_edits_are_refused_by_field(edit, change, field):
    with pytest.raises(PlanError, match=field) as caught:
        edit(change)
    assert "plan.yaml" in str(caught.value)


def test_ranks_of_a_mesh_with_tensor_groups():
    mesh = ParallelDegrees(data=2, pipeline=3, tensor=(1, 1, 2))
    assert (mesh.replica_size, mesh.world_size) == (4, 8)
    assert [mesh.global_rank(1, p, t) for p, t in ((0, 0), (1, 0), (2, 0), (2, 1))] == [4, 5, 6, 7]
    assert ParallelDegrees(data=2, pipeline=2, tensor=2).global_rank(1, 1, 1) == 7
    with pytest.raises(PlanError, match="tensor"):
        mesh.check(6)


def test_degrees_that_the_model_or_the_nodes_cannot_have_are_refused(plan, tmp_path):
    from dataclasses import replace

    stages = tuple(replace(stage, rank=0) for stage in plan.stages if stage.layers[0] == 0)
    ends = {"vision": 12, "llm": 6}
    stages = tuple(replace(stage, layers=(0, ends[stage.module])) for stage in stages)
    for degree, message in ((4, r"degrees.tensor: 4 is not possible: .* its heads \(6\)"), (2, None)):
        wide = replace(plan, degrees=ParallelDegrees(data=4 // degree, pipeline=1, tensor=degree), stages=stages)
        path = tmp_path / f"{degree}.yaml"
        wide.write(path)
        if message is None:
            assert check_plan_file(path, MODEL, CLUSTER, 16, ()).degrees.tensor == 2
        else:
            with pytest.raises(PlanError, match=message):
                check_plan_file(path, MODEL, CLUSTER, 16, ())
