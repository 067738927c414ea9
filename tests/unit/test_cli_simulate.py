"""`entrain simulate` and `entrain report` on a small trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from entrain_opt.cli import report, simulate
from entrain_opt.errors import RuntimeConfigError

ROOT = Path(__file__).parents[2]
RECIPE = """
trainer:
  accelerator: gpu
  devices: 4
  precision: bf16-mixed
  strategy:
    class_path: entrain_opt.EntrainStrategy
    init_args: {{device: A100-80GB, cost_model: analytic, pipeline_degree: 2, num_microbatches: 4}}
model:
  class_path: entrain_opt.MultimodalModule
  init_args: {{model: {model}}}
data:
  class_path: entrain_opt.MultimodalDataModule
  init_args: {{dataset: {dataset}, global_batch_size: 16}}
"""


def parse(*words):
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    simulate.add_parser(commands)
    report.add_parser(commands)
    return parser.parse_args(words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulate")
    rows = [(f"s{i}", [[200 + 40 * i, 300]] if i % 3 else [], 20 + 5 * i) for i in range(40)]
    columns = dict(zip(("sample_id", "image_sizes", "text_words"), map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns), folder / "trace.parquet")
    model = ROOT / "models" / "qwen2_5-vit-llama3_2-1b"
    (folder / "small.yaml").write_text(RECIPE.format(model=model, dataset=folder / "trace.parquet"))
    return folder


def words(folder, command, *more):
    return parse(command, "--config", str(folder / "small.yaml"), "--cache-dir", str(folder / "cache"), *more)


def test_compares_and_writes_the_trace_of_the_best(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    trace = folder / "trace.json"
    arguments = words(
        folder,
        "simulate",
        "--policies",
        "pairwise,in_order",
        "--schedules",
        "1f1b",
        "--batches",
        "2",
        "--trace",
        str(trace),
    )
    assert simulate.run(arguments) == 0
    printed = capsys.readouterr().out
    assert printed.count("1f1b") >= 2
    assert printed.count(" * ") == 1
    assert "seed 0" in printed
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_same_command_prints_the_same(folder, capsys):
    printed = []
    for _ in range(2):
        simulate.run(words(folder, "simulate", "--policies", "in_order", "--schedules", "1f1b,eager", "--batches", "1"))
        printed.append(capsys.readouterr().out.removeprefix("Solving the plan ...\n"))
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--policies", "best"), "--policies"),
        (("--schedules", "1f1b,fast"), "'fast'"),
        (("--schedules", ","), "found none"),
        (("--batches", "0"), "--batches"),
    ],
)
def test_mistakes_are_named(folder, more, named):
    for command in (simulate, report):
        with pytest.raises(RuntimeConfigError, match=named):
            command.run(words(folder, command.__name__.rpartition(".")[2], *more))


def test_default_schedules_leave_out_what_cannot_differ(folder):
    from dataclasses import replace

    from planner_cases import make_plan

    plain = make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)])
    assert "interleaved" not in simulate.default_schedules(plain)
    chunks = replace(plain, stages=make_plan([("vision", 0, 12, 0), ("llm", 0, 3, 0), ("llm", 3, 6, 1)]).stages)
    assert "interleaved" in simulate.default_schedules(chunks)


def test_report_writes_one_page(folder, capsys):
    output = folder / "report.html"
    arguments = words(
        folder, "report", "--output", str(output), "--policies", "in_order", "--schedules", "1f1b", "--batches", "1"
    )
    assert report.run(arguments) == 0
    assert "plotly.js" in capsys.readouterr().out
    assert output.stat().st_size < 6_000_000


def test_the_recipe_for_64_devices_is_ready_to_plan():
    from entrain_opt.cli.recipe import read_recipe
    from entrain_opt.workload.media import media_rule
    from entrain_opt.workload.trace import read_trace

    recipe = read_recipe(ROOT / "recipes" / "qwen2_5-vl-3b-64gpu.yaml")
    assert recipe.num_nodes * recipe.devices_per_node == 64
    samples = read_trace(ROOT / recipe.dataset, media_rule(ROOT / recipe.model_folder))
    assert len(samples) >= recipe.global_batch_size
