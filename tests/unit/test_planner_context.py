"""Plans that divide samples over devices: searched, proved, written and read like others, and said to be plans only."""

import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import yaml
from planner_cases import make_model, make_plan, make_samples
from test_planner_solvers import brute_force

from entrain_opt.cli.recipe import read_recipe
from entrain_opt.cost import CostModel
from entrain_opt.errors import PlanError, RuntimeConfigError
from entrain_opt.plan import ParallelDegrees, Plan
from entrain_opt.planner import PlanOptions, solve_plan
from entrain_opt.planner.cp_sat import solve_cp_sat
from entrain_opt.planner.demand import estimate_demand
from entrain_opt.planner.estimates import Estimator
from entrain_opt.planner.ilp import solve_ilp
from entrain_opt.planner.resolve import check_plan_file
from entrain_opt.planner.search import lower_bound_ticks, rank_choices, solve_by_search
from entrain_opt.planner.shortlist import build_shortlist
from entrain_opt.planner.space import allowed_layouts, groups_fit_nodes
from entrain_opt.planner.table import plan_sentences, plan_table
from entrain_opt.spec import ClusterSpec
from entrain_opt.workload import SampleTable

OPTIONS = PlanOptions(
    cost_model="analytic", device="A40-48GB", precision="bf16-mixed", policy="pairwise", context_degrees=(1, 2, 4)
)


def make(*, devices=8, per_node=4, gib=None, layers=(5, 4), samples=None, scale=8, batch=32, **options):
    """Costs, demand and options of a small problem."""
    memory = None if gib is None else int(gib * 2**30)
    cluster = ClusterSpec(
        device="A40-48GB", num_nodes=devices // per_node, devices_per_node=per_node, memory_bytes=memory
    )
    costs = CostModel(
        make_model(scale=scale, vision_layers=layers[0], llm_layers=layers[1]), cluster, precision="bf16-mixed"
    )
    demand = estimate_demand(make_samples(80) if samples is None else samples, costs, batch)
    return costs, demand, replace(OPTIONS, memory_bytes=memory, **options)


def chapters(count: int = 40) -> SampleTable:
    """Samples of almost 12,000 tokens, each with one small picture."""
    ones = np.ones(count, dtype=np.int64)
    return SampleTable(
        sample_ids=np.array([f"chapter{i}" for i in range(count)], dtype=np.str_),
        text_tokens=11_744 - 10 * np.arange(count),
        label_tokens=5_000 * ones,
        media_offsets=np.arange(count + 1),
        media_kind=0 * ones,
        media_patches=1_024 * ones,
        media_segments=ones,
        media_tokens=256 * ones,
    )


def solve_chapters(gib: float = 0.7, **changes) -> Plan:
    """Sixteen small devices."""
    costs, demand, options = make(
        devices=16, per_node=8, gib=gib, layers=(4, 6), samples=chapters(), scale=4, batch=16, **changes
    )
    return solve_plan(costs.model, demand.samples, costs.cluster, global_batch_size=16, options=options, costs=costs)


@pytest.fixture(scope="module")
def divided() -> Plan:
    return solve_chapters()


def test_layouts_use_all_devices_and_a_rank_stays_within_its_node():
    costs, _, options = make(tensor_degrees=(1, 2), context_degrees=(1, 2, 3, 4))
    layouts = allowed_layouts(costs, 32, options)
    pairs = {tuple(zip(layout.tensor, layout.context, strict=True)) for layout in layouts}
    assert {((1, 1), (1, 2)), ((2, 2), (2, 2)), ((1, 4), (2, 1)), ((2, 1), (1, 2))} <= pairs
    for layout in layouts:
        layout.degrees.check(8)
        assert groups_fit_nodes(layout.degrees, 4)
        assert all(4 % (t * c) == 0 for t, c in zip(layout.tensor, layout.context, strict=True))
        same = len(set(zip(layout.tensor, layout.context, strict=True))) == 1
        assert bool(layout.ranks) == (not same)


def test_degrees_that_no_node_can_have_and_devices_that_none_fills_are_errors():
    costs, _, options = make(tensor_degrees=(4,), context_degrees=(2, 4))
    with pytest.raises(PlanError, match=r"context_degrees: none of \[2, 4\] is possible: .* \(4\), .* one of \[4\]"):
        allowed_layouts(costs, 32, options)
    costs, _, options = make(data_degree=8, context_degrees=(2,))
    possible = r"\(data, pipeline, tensor, context\): \[\(1, 4, 1, 2\), \(2, 2, 1, 2\), \(4, 1, 1, 2\)\]"
    with pytest.raises(PlanError, match=rf"context_degrees \[2\], data_degree = 8\. .* {possible}"):
        allowed_layouts(costs, 32, options)


def random_problem(seed: int):
    """Costs, demand and options with context degrees; some fit nowhere."""
    draw = random.Random(seed)
    return make(
        devices=4,
        layers=(draw.randint(1, 3), draw.randint(2, 3)),
        gib=draw.choice([None, 1.0, 1.5, 2.0]),
        samples=draw.choice([None, chapters(20)]),
        batch=8,
        scale=4,
        tensor_degrees=draw.choice([(1,), (1, 2)]),
        context_degrees=draw.choice([(1, 2), (2,), (1, 2, 4)]),
        recompute=draw.choice(["never", "search"]),
        num_microbatches=draw.choice([1, 4]),
        schedule=draw.choice(["eager", "1f1b"]),
    )


def test_solvers_and_enumeration_agree_on_random_problems_with_context_degrees():
    optima = []
    for seed in (6, 7, 9, 11, 14, 18, 27, 28, 33, 35):
        costs, demand, options = random_problem(seed)
        whole, _ = build_shortlist(costs, demand, options, everything=True)
        assert any(choice.context for choice in whole.choices)
        _, ranking = build_shortlist(costs, demand, options)
        expected = brute_force(whole)
        assert (ranking[0].ticks if ranking else None) == expected, seed
        highs, cbc = (partial(solve_ilp, solver=name) for name in ("highs", "cbc"))
        for solve in (solve_by_search, solve_cp_sat, highs, cbc):
            found = solve(whole)
            assert (found.ticks if found else None) == expected, seed
            assert found is None or (found.status, found.gap) == ("optimal", 0.0)
        for ranked in rank_choices(whole):
            assert lower_bound_ticks(whole, ranked.choice) <= ranked.ticks
        optima.append(ranking[0].choice if ranking else None)
    assert 0 < sum(choice is None for choice in optima) < 4
    assert any(choice is not None and set(choice.context) == {1, 2} for choice in optima)
    assert any(choice is not None and not choice.context for choice in optima)


def test_memory_of_the_closed_form_is_divided_where_tokens_hold_it():
    costs, demand, options = make(context_degrees=(1, 2), pipeline_degree=2, num_microbatches=4, data_degree=2)
    estimator = Estimator(costs, demand)
    found = {
        layout.context: estimator.mib(layout, 4, one_in_flight=False) for layout in allowed_layouts(costs, 32, options)
    }
    assert (2, 2) in found
    alone, _, _ = make(devices=4, context_degrees=(1,), pipeline_degree=2, num_microbatches=4, data_degree=2)
    layout = next(one for one in allowed_layouts(alone, 32, replace(options, context_degrees=(1,))))
    whole = Estimator(alone, demand).mib(layout, 4, one_in_flight=False)
    static = costs.static_bytes(make_plan([("llm", 1, 2, 0)], data=2).stages[0], ParallelDegrees(data=2)).total / 2**20
    for one, two in zip(whole, found[2, 2], strict=True):
        assert two.layer[1] - static == pytest.approx((one.layer[1] - static) / 2, abs=2)


def test_long_samples_on_small_devices_fit_if_they_may_be_divided(divided):
    divided.check(num_layers={"vision": 4, "llm": 6})
    divided.degrees.check(16)
    assert max(divided.degrees.context_degrees) > 1
    assert max(divided.predicted.peak_bytes) <= int(0.7 * 2**30)
    chosen = divided.provenance.candidates[0]
    assert chosen["context"]["llm"] == divided.degrees.context_of(divided.stages[-1].rank)
    with pytest.raises(PlanError, match="memory: stage") as raised:
        solve_chapters(context_degrees=(1,))
    said = str(raised.value)
    assert said.count("which can be planned for but not trained yet") == 1
    hint = next(words for words in said.split("; or ") if "not trained yet" in words)
    assert "context_degrees=[1, 2, 4, 8] (data=1, pipeline=" in hint
    assert ", context=" in hint
    with pytest.raises(PlanError, match="memory: stage") as raised:
        solve_chapters(gib=0.5, context_degrees=(1, 2), recompute="search")
    assert "context_degrees=[1, 2, 4, 8] (data=" in str(raised.value)  # Asked for already: a change like others.
    assert "not trained" not in str(raised.value)


def test_recipes_ask_for_degrees_as_a_list(tmp_path):
    strategy = {"class_path": "entrain_opt.EntrainStrategy", "init_args": {"context_degrees": [1, 2]}}
    recipe = {
        "trainer": {"devices": 2, "strategy": strategy},
        "model": {"class_path": "entrain_opt.MultimodalModule", "init_args": {"model": "model"}},
        "data": {
            "class_path": "entrain_opt.MultimodalDataModule",
            "init_args": {"dataset": "train.jsonl", "global_batch_size": 4},
        },
    }
    path = tmp_path / "recipe.yaml"
    for degrees, message in (([1, 2], None), ([2, 2], "found (2, 2)"), ([0], "at least 1, found (0,)")):
        strategy["init_args"]["context_degrees"] = degrees
        path.write_text(yaml.safe_dump(recipe))
        if message is None:
            assert read_recipe(path).options.context_degrees == (1, 2)
            continue
        with pytest.raises(RuntimeConfigError, match=rf"context_degrees: expected different .*{re.escape(message)}"):
            read_recipe(path)


def test_the_same_question_gets_the_same_divided_plan(divided):
    again = solve_chapters()
    assert again == divided
    assert solve_chapters(gib=None).provenance.input_hash != divided.provenance.input_hash


def test_the_table_says_it_only_where_samples_are_divided(divided):
    from rich.console import Console

    sentence = "planned only, training does not execute this"
    assert sum(sentence in line for line in plan_sentences(divided)) == 1
    console = Console(width=150, record=True)
    console.print(plan_table(divided))
    text = console.export_text()
    width = divided.degrees.widths[-1]
    assert f"{width} llm devices" in text
    assert ", ".join(map(str, range(16 - width, 16))) in text
    plain = solve_chapters(gib=None, context_degrees=(1,))
    assert not any("context" in line for line in plan_sentences(plain))


def test_a_plan_comes_back_as_it_was_and_old_files_have_one_part(divided, tmp_path):
    path = tmp_path / "plan.yaml"
    divided.write(path)
    assert Plan.read(path) == divided
    plain = solve_chapters(gib=None, context_degrees=(1,))
    plain.write(path)
    content = yaml.safe_load(path.read_text())
    assert content["degrees"].pop("context") == 1
    path.write_text(yaml.safe_dump(content))
    assert Plan.read(path) == plain


@pytest.mark.parametrize(
    ("context", "data", "message"),
    [
        ("two", 4, "plan.degrees.context: expected a whole number or a list"),
        ([1, 2], 4, "degrees.context: expected a number of at least 1, or one for each of 3 pipeline ranks"),
        ([1, 0, 2], 4, "degrees.context: expected a number of at least 1"),
        ([1, 1, 2], 4, r"degrees.context: expected one degree for all pipeline ranks of module llm, found \[1, 2\]"),
        ([1, 3, 3], 4, r"degrees.context: 3 is not possible: .* of module llm \(3\) must divide .* \(4\)"),
        ([1, 2, 2], 4, r"degrees.context: \(1, 2, 2\) puts devices of one pipeline rank on two nodes of 4"),
        (2, 1, r"6 devices of a replica \(pipeline 3, tensor 1, context 2\) = 6 ranks, but 4 were launched"),
        (4, 1, None),
    ],
)
def test_edits_are_checked(context, data, message, tmp_path):
    path = tmp_path / "plan.yaml"
    make_plan([("vision", 0, 12, 0), ("llm", 0, 3, 1), ("llm", 3, 6, 2)], data=data).write(path)
    content = yaml.safe_load(path.read_text())
    content["degrees"]["context"] = context
    path.write_text(yaml.safe_dump(content))
    replica = sum(context) if isinstance(context, list) else 12 if context == 4 else 4
    cluster = ClusterSpec(num_nodes=max(data * replica // 4, 1), devices_per_node=4)
    if message is None:
        assert check_plan_file(path, make_model(), cluster, 16, ()).degrees.context == context
        return
    with pytest.raises(PlanError, match=message):
        check_plan_file(path, make_model(), cluster, 16, ())
