"""The plan of a run: solved once, taken from the cache after, read from a file and checked against the run."""

from pathlib import Path

import pytest
import yaml
from test_cost_model import MEASURED

from entrain_opt.cost import MeasuredCosts
from entrain_opt.errors import PlanError, RuntimeConfigError
from entrain_opt.planner import PlanOptions
from entrain_opt.planner.resolve import Resolution, resolve
from entrain_opt.planner.table import plan_sentences, plan_table

ROOT = Path(__file__).parents[2]
ANALYTIC = PlanOptions(cost_model="analytic")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Arguments of a small run; index and plans are kept in a folder of the module."""
    cache = tmp_path_factory.mktemp("cache")

    def resolved(**changes) -> Resolution:
        arguments = {
            "model_folder": ROOT / "models" / "tiny-llava",
            "dataset": ROOT / "recipes" / "data" / "physics" / "validation.jsonl",
            "global_batch_size": 8,
            "devices_per_node": 2,
            "options": ANALYTIC,
            "cache_dir": cache,
        }
        return resolve(**{**arguments, **changes})

    return resolved


def test_solved_once_and_cached_after(run):
    first, second = run(), run()
    assert (first.source, second.source) == ("solved", "cached")
    assert first.plan == second.plan
    assert first.plan.degrees.world_size == 2
    assert run(global_batch_size=4).source == "solved"


def test_measured_costs_are_made_once_and_kept(run):
    calls = []

    def measure() -> MeasuredCosts:
        calls.append(1)
        return MEASURED

    options = PlanOptions(cost_model="measured")
    for _ in range(2):
        found = run(options=options, measure=measure)
        assert found.costs.source == found.plan.provenance.cost_source == "measured"
    assert calls == [1]
    assert run(options=options).costs.measured == MEASURED


def test_without_a_profile_the_error_says_how_to_get_one(run, tmp_path):
    with pytest.raises(RuntimeConfigError, match="entrain profile --config RECIPE"):
        run(options=PlanOptions(), cache_dir=tmp_path)


def test_a_plan_file_is_read_and_checked_against_the_run(run, tmp_path):
    path = tmp_path / "plan.yaml"
    run().plan.write(path)
    found = run(plan=path)
    assert found.source == "file"
    assert found.plan == run().plan
    for changes, message in (
        ({"devices_per_node": 4}, "2 ranks, but 4 were launched"),
        ({"global_batch_size": 4}, "global_batch_size: the run asks for 4, the plan was made for 8"),
        ({"frozen": ("projector",)}, "frozen: the run asks for"),
        ({"plan": tmp_path / "none.yaml"}, "no file"),
    ):
        with pytest.raises(PlanError, match=message):
            # There is no data: a wrong file is told before any is read.
            run(**{"plan": path, "dataset": tmp_path / "none.jsonl", **changes})


def test_edits_of_a_plan_are_checked(run, tmp_path):
    path = tmp_path / "plan.yaml"
    run().plan.write(path)
    content = yaml.safe_load(path.read_text())
    content["stages"][0]["layers"] = [0, 11]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(PlanError, match="has 12 layers, the plan holds 11"):
        run(plan=path)


def test_an_unknown_policy_for_bad_samples_is_named(run):
    with pytest.raises(RuntimeConfigError, match="bad_samples: expected"):
        run(bad_samples="ignore")


def test_the_table_says_what_a_reader_asks(run):
    from rich.console import Console

    found = run()
    console = Console(width=160, record=True)
    console.print(plan_table(found.plan, limit_bytes=found.cluster.memory_limit_bytes))
    text = console.export_text()
    for word in (
        "vision",
        "0 to 11",
        "predicted busy",
        "of 7.4 GiB",
        "per step (analytic costs)",
        "cp-sat: optimal",
        "runner-up",
    ):
        assert word in text
    assert len(plan_sentences(found.plan)) == 4


def test_a_plan_written_by_hand_has_a_table_too():
    from planner_cases import make_plan
    from rich.console import Console

    console = Console(width=120, record=True)
    console.print(plan_table(make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)], data=8)))
    text = console.export_text()
    assert "0, 2, ... 14" in text
    assert "per step" not in text


def test_a_plan_that_the_caller_cannot_run_is_refused_from_a_file_before_the_data_is_read(run, tmp_path):
    asked = []

    def refuse(plan):
        asked.append(plan)
        raise RuntimeConfigError("not on this machine")

    with pytest.raises(RuntimeConfigError, match="not on this machine"):
        run(accept=refuse)
    path = tmp_path / "plan.yaml"
    run().plan.write(path)
    with pytest.raises(RuntimeConfigError, match="not on this machine"):
        run(accept=refuse, plan=path, dataset=tmp_path / "nowhere.jsonl")
    assert asked == [run().plan] * 2
    assert run(accept=asked.append).plan == asked[-1]
