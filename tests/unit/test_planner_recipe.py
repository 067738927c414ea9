"""Recipes: read without torch, misspelled keys named with file and nearest known key."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from entrain_opt.cli.recipe import Recipe, read_recipe
from entrain_opt.errors import RuntimeConfigError


def recipe_dict() -> dict:
    return {
        "seed_everything": 7,
        "trainer": {
            "devices": 2,
            "precision": "bf16-mixed",
            "strategy": {
                "class_path": "entrain_opt.EntrainStrategy",
                "init_args": {"plan": "auto", "method": "search", "memory_gib": 2.5, "pipeline_degree": 2},
            },
        },
        "model": {
            "class_path": "entrain_opt.MultimodalModule",
            "init_args": {"model": "models/tiny-llava", "frozen": ["vision_tower"]},
        },
        "data": {
            "class_path": "entrain_opt.MultimodalDataModule",
            "init_args": {"dataset": "data/train.jsonl", "global_batch_size": 16, "bad_samples": "skip"},
        },
    }


def read(content: dict, folder: Path) -> Recipe:
    (folder / "my-run.yaml").write_text(yaml.safe_dump(content))
    return read_recipe(folder / "my-run.yaml")


def test_everything_the_planner_needs(tmp_path):
    recipe = read(recipe_dict(), tmp_path)
    assert (recipe.name, recipe.model_folder, recipe.dataset) == ("my-run", "models/tiny-llava", "data/train.jsonl")
    assert (recipe.devices_per_node, recipe.num_nodes, recipe.global_batch_size) == (2, 1, 16)
    assert (recipe.frozen, recipe.bad_samples, recipe.seed, recipe.plan) == (("vision_tower",), "skip", 7, "auto")
    options = recipe.options
    assert (options.method, options.memory_bytes, options.pipeline_degree) == ("search", int(2.5 * 2**30), 2)
    assert options.precision == "bf16-mixed"


def test_defaults_and_shorthand(tmp_path):
    content = recipe_dict()
    content["trainer"] = {"strategy": "entrain", "devices": "4", "precision": 32}
    recipe = read(content, tmp_path)
    assert (recipe.devices_per_node, recipe.options.precision, recipe.options.method) == (4, "32-true", "cp-sat")


@pytest.mark.parametrize(
    ("path", "key", "nearest"),
    [
        (("trainer", "strategy", "init_args"), "pipline_degree", "pipeline_degree"),
        (("trainer", "strategy", "init_args"), "memory_gb", "memory_gib"),
        (("trainer", "strategy"), "init_arg", "init_args"),
        (("data",), "init_argz", "init_args"),
    ],
)
def test_misspelled_keys_are_named_with_the_nearest_known_one(tmp_path, path, key, nearest):
    content = recipe_dict()
    section = content
    for name in path:
        section = section[name]
    section[key] = 1
    with pytest.raises(RuntimeConfigError, match=rf"my-run\.yaml: .*unknown key '{key}'; did you mean '{nearest}'\?"):
        read(content, tmp_path)


@pytest.mark.parametrize(
    "strategy", ["ddp", ["class_path"], "entrain_opt.EntrainStrategy", {"class_path": "x.DDPStrategy"}]
)
def test_wrong_forms_of_the_strategy_show_the_right_one(tmp_path, strategy):
    content = recipe_dict()
    content["trainer"]["strategy"] = strategy
    with pytest.raises(RuntimeConfigError, match=r"expected `entrain` or a class_path[\s\S]*class_path: entrain_opt"):
        read(content, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["trainer"].update(devices="auto"), "trainer.devices: expected a whole number"),
        (lambda c: c["data"]["init_args"].update(global_batch_size=0), "global_batch_size: expected a whole number"),
        (lambda c: c["data"]["init_args"].pop("dataset"), "data.init_args.dataset is missing"),
        (lambda c: c.pop("model"), "model is missing"),
        (lambda c: c["model"]["init_args"].update(frozen="vision_tower"), "frozen: expected a list of names"),
        (lambda c: c["trainer"]["strategy"]["init_args"].update(method="magic"), "method: expected one of"),
        (lambda c: c["trainer"]["strategy"]["init_args"].update(memory_gib=-1), "memory_gib: expected GiB above 0"),
        (lambda c: c["trainer"].update(precision="16-mixed"), "precision: expected one of"),
    ],
)
def test_bad_values_are_named(tmp_path, change, message):
    content = recipe_dict()
    change(content)
    with pytest.raises(RuntimeConfigError, match=message):
        read(content, tmp_path)


def test_files_that_are_missing_or_no_yaml(tmp_path):
    with pytest.raises(RuntimeConfigError, match="found none"):
        read_recipe(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_bytes(b"a: [\xff")
    with pytest.raises(RuntimeConfigError, match="not valid YAML"):
        read_recipe(tmp_path / "broken.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(RuntimeConfigError, match="expected a mapping"):
        read_recipe(tmp_path / "list.yaml")


def test_classes_of_the_users_own_have_arguments_of_their_own(tmp_path):
    content = recipe_dict()
    content["model"] = {"class_path": "mine.Module", "init_args": {"model": "m", "rate": 1}}
    assert read(content, tmp_path).model_folder == "m"


def test_no_torch_is_imported(tmp_path):
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_dict()))
    code = (
        "import sys, entrain_opt.cli.plan, entrain_opt.cli.profile\nfrom entrain_opt.cli.recipe import read_recipe\n"
        f"read_recipe({str(tmp_path / 'r.yaml')!r})\n"
        "assert 'torch' not in sys.modules and 'ortools' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
