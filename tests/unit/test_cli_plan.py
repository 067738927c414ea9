"""`entrain plan` from a recipe or flags: table, JSON, what-if; the same file whatever the process; no torch needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from entrain_opt.cli.main import main
from entrain_opt.cli.plan_arguments import asked_recipe
from entrain_opt.cli.what_if import parse_changes
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import Plan

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "qwen2_5-vit-llama3_2-1b")
SHORT = ["plan", "--model", MODEL, "--data", "trace.parquet", "--global-batch-size", "4"]
#: Runs the command with torch and Transformers refused.
WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "pytorch_lightning", "lightning"):
            raise ImportError(f"{name} is refused in this test")
sys.meta_path.insert(0, Refuse())
from entrain_opt.cli.main import main
code = main(sys.argv[1:])
assert not {"torch", "transformers", "pytorch_lightning"} & set(sys.modules)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    rows = [(f"s{i}", [[200 + 40 * (i % 40), 300]] if i % 3 else [], 20 + 5 * (i % 40)) for i in range(160)]
    columns = dict(zip(("sample_id", "image_sizes", "text_words"), map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns), folder / "trace.parquet")
    return folder


@pytest.fixture(scope="module")
def base_packages(tmp_path_factory):
    """A folder of the base dependencies and what they need, but for torch, Lightning and Transformers."""
    target = tmp_path_factory.mktemp("packages")
    found: set[str] = set()
    asked = [Requirement(text) for text in distribution("entrain-opt").requires or ()]
    while asked:
        one = asked.pop()
        name = canonicalize_name(one.name)
        if name in found | {"torch", "pytorch-lightning", "transformers"} or not (
            one.marker is None or one.marker.evaluate({"extra": ""})
        ):
            continue
        found.add(name)
        installed = distribution(name)
        asked += [Requirement(text) for text in installed.requires or ()]
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            (target / top).symlink_to(Path(installed.locate_file(top)))
    return target


def test_plans_where_only_the_base_dependencies_are_installed(folder, base_packages):
    """Without site packages, so there is nothing else to import."""
    code = (
        f"import sys; sys.path += {[str(base_packages), str(ROOT)]}\n"
        "from importlib.util import find_spec\n"
        "assert not any(find_spec(name) for name in ('torch', 'transformers', 'pytorch_lightning', 'pytest'))\n"
        "from entrain_opt.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    output = folder / "bare.yaml"
    command = [sys.executable, "-I", "-S", "-c", code, *flags(folder, "--output", str(output))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Plan.read(output).degrees.world_size == 4


def flags(folder: Path, *more: str, devices: str = "4", cluster: str = "A100-80GB") -> list[str]:
    return [
        "plan", "--model", MODEL, "--data", str(folder / "trace.parquet"), "--cluster", cluster, "--devices", devices,
        "--global-batch-size", "16", "--cache-dir", str(folder / "cache"), *more,
    ]  # fmt: skip


def test_flags_give_a_table_and_a_file(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    output = folder / "plan.yaml"
    assert main(flags(folder, "--output", str(output))) == 0
    said = capsys.readouterr().out
    for words in (
        "qwen2_5-vit-llama3_2-1b: 4 ranks",
        "predicted",
        "cp-sat: optimal",
        "stability",
        f"Written to {output}",
    ):
        assert words in said
    plan = Plan.read(output)
    assert plan.degrees.world_size == 4
    assert plan.provenance.stability is not None


def test_hardly_any_time_for_the_solver_gives_a_checked_plan_or_an_error(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    output = folder / "short.yaml"
    assert main(flags(folder, "--time-limit", "0.01", "--output", str(output))) == 0
    said = capsys.readouterr().out
    plan = Plan.read(output)
    plan.check(num_layers={"vision": 32, "llm": 16})
    gap = plan.provenance.gap
    assert (f"cp-sat: not proven optimal, gap {gap:.1%}" if gap else "cp-sat: optimal") in said
    assert main(flags(folder, "--time-limit", "0", "--output", str(output))) == 1
    assert "time_limit_seconds: expected more than 0, found 0.0" in capsys.readouterr().err


def test_json_is_all_that_is_printed(folder, capsys):
    assert main(flags(folder, "--output", str(folder / "j.yaml"), "--json", "--what-if", "devices=2,8")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["degrees"]["data"] >= 1
    assert [case["devices"] for case in found["what_if"]] == [4, 2, 8]
    assert found["what_if"][0]["plan"] == found["plan"]
    assert all(case["device_hours_per_million_samples"] > 0 for case in found["what_if"])


def test_what_if_is_one_table_and_keeps_what_does_not_fit(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    changes = ["device=A100-80GB,RTX4090-24GB", "frozen=none,vision_tower+projector"]
    assert main(flags(folder, "--output", str(folder / "w.yaml"), "--what-if", *changes, devices="2")) == 0
    table = capsys.readouterr().out.partition("What if")[2]
    assert table.count("A100-80GB") == table.count("RTX4090-24GB") == 2
    assert "vision_tower+projector" in table
    assert main(flags(folder, "--output", str(folder / "w.yaml"), "--what-if", "device=cpu")) == 0
    table = capsys.readouterr().out.partition("What if")[2]
    assert "none: memory: stage" in table


def test_all_of_the_space_is_planned(folder):
    output = folder / "wide.yaml"
    wide = ["--tensor-degrees", "2,4", "--recompute", "always", "--output", str(output)]
    assert main(flags(folder, *wide)) == 0
    plan = Plan.read(output)
    assert min(plan.degrees.tensor_degrees) >= 2
    assert main(flags(folder, "--recompute", "always", "--output", str(output))) == 0
    plan = Plan.read(output)
    assert all(stage.recompute for stage in plan.stages)
    assert main(flags(folder, "--data-parallel", "sharded", "--output", str(output))) == 0
    plan = Plan.read(output)
    assert plan.shards_state == (plan.degrees.data > 1)


def test_samples_divided_over_devices_are_planned_and_compared(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    output = folder / "context.yaml"
    changes = ["context=1,1+2", "tensor=1"]
    divided = ["--context-degrees", "2", "--output", str(output), "--what-if", *changes]
    assert main(flags(folder, *divided)) == 0
    said, _, table = capsys.readouterr().out.partition("What if")
    assert "samples divided over devices: context 2 vision + 2 llm; planned only" in said
    assert set(Plan.read(output).degrees.context_degrees) == {2}
    rows = [line for line in table.splitlines() if "A100" in line]
    assert len(rows) == 3
    assert "1+2" in rows[2]
    assert ["context 2+2" in row for row in rows[:2]] == [True, False]
    assert main(flags(folder, "--output", str(output), "--what-if", "context=1,two")) == 1
    assert "--what-if context: expected degrees to consider, like 1+2+4, found 'two'" in capsys.readouterr().err


def test_a_cluster_file_brings_its_devices(folder):
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"device": {"name": "mine", "based_on": "A100-80GB"}, "devices_per_node": 4}))
    from entrain_opt.cli.main import build_parser

    words = [word for word in flags(folder, cluster=str(path)) if word not in ("--devices", "4")]
    recipe = asked_recipe(build_parser().parse_args(words))
    assert (recipe.num_nodes, recipe.devices_per_node, recipe.options.device) == (1, 4, "mine")
    assert main([*words, "--output", str(folder / "c.yaml")]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "--model", MODEL], "missing --data, --cluster, --global-batch-size"),
        (["plan", "--config", "r.yaml", "--devices", "4"], "--devices: the recipe r.yaml says this"),
        (["plan", "--model", MODEL, "--data", "x", "--cluster", "A41", "--global-batch-size", "4"], "found 'A41'"),
        (
            ["plan", "--model", MODEL, "--data", "x", "--cluster", "cpu", "--global-batch-size", "4"],
            "--devices is missing",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_named(words, message, capsys):
    assert main(words) == 1
    assert message in capsys.readouterr().err


def test_what_if_names_its_keys():
    assert parse_changes(["devices=2,4", "frozen=none"]) == {"devices": ["2", "4"], "frozen": ["none"]}
    assert parse_changes(["context=1,1+2"]) == {"context": ["1", "1+2"]}
    for text in ("gpus=3", "devices", "devices="):
        with pytest.raises(RuntimeConfigError, match="--what-if: expected one of device=VALUE"):
            parse_changes([text])


def test_infeasible_problems_say_what_binds_and_the_nearest_change(folder, capsys):
    assert main(flags(folder, "--memory-gib", "6", "--output", str(folder / "x.yaml"), devices="2")) == 1
    said = capsys.readouterr().err
    assert "needs" in said
    assert "the device has 6.0 GiB" in said
    nearest = said.partition("Closest feasible: ")[2]
    assert "devices (data=" in nearest or "tensor_degrees=" in nearest or "recompute=search" in nearest
    assert "of memory per device" in nearest


def test_files_are_the_same_to_the_byte_in_every_process_and_need_no_torch(folder):
    """Other hash seeds, one or two solver threads; nothing from the cache."""
    files = []
    recipe = {
        "trainer": {
            "devices": 4,
            "precision": "bf16-mixed",
            "strategy": {
                "class_path": "entrain_opt.EntrainStrategy",
                "init_args": {"device": "A100-80GB", "cost_model": "analytic"},
            },
        },
        "model": {"class_path": "entrain_opt.MultimodalModule", "init_args": {"model": MODEL}},
        "data": {
            "class_path": "entrain_opt.MultimodalDataModule",
            "init_args": {"dataset": str(folder / "trace.parquet"), "global_batch_size": 16},
        },
    }
    for seed, workers in ((0, 1), (1, 2)):
        recipe["trainer"]["strategy"]["init_args"]["solver_workers"] = workers
        path, output = folder / f"recipe{seed}.yaml", folder / f"plan{seed}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        words = ["plan", "--config", str(path), "--output", str(output), "--cache-dir", str(folder / f"cache{seed}")]
        subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH, *words],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        )
        files.append(output.read_bytes())
    assert files[0] == files[1]
