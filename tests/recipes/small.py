"""A small run for end-to-end tests: the shipped data and tokenizer, a model with few layers, analytic costs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import server
import yaml

ROOT = Path(__file__).parents[2]
DATA = ROOT / "recipes" / "data" / "physics"
MAIN = "entrain_opt.cli.main"
#: A launcher: Python as a user starts it.
INTERPRETER = (sys.executable,)


def write_run(folder, *, frozen=(), devices=2, samples=12, global_batch_size=4, max_steps=3, **strategy):
    """Write model, data and recipe under `folder`; returns the recipe's content, to be changed and passed to `fit`."""
    model = folder / "model"
    shutil.copytree(ROOT / "models" / "tiny-llava", model)
    config = json.loads((model / "config.json").read_text())
    config["vision_config"] |= {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    config["text_config"] |= {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8}
    (model / "config.json").write_text(json.dumps(config))
    lines = (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "images").symlink_to(DATA / "images")
    (folder / "train.jsonl").write_text("\n".join(choose(lines, samples)) + "\n", encoding="utf-8")
    return {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu",
            "devices": devices,
            "max_steps": max_steps,
            "log_every_n_steps": 1,
            "default_root_dir": "runs/small",
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "strategy": {
                "class_path": "entrain_opt.EntrainStrategy",
                "init_args": {"pipeline_degree": devices, "cost_model": "analytic", **strategy},
            },
            "logger": {
                "class_path": "pytorch_lightning.loggers.CSVLogger",
                "init_args": {"save_dir": "runs/small", "name": "metrics"},
            },
            "callbacks": [
                {
                    "class_path": "pytorch_lightning.callbacks.ModelCheckpoint",
                    "init_args": {
                        "dirpath": "runs/small/checkpoints",
                        "filename": "{step}",
                        "every_n_train_steps": 3,
                        "save_top_k": -1,
                    },
                }
            ],
        },
        "model": {
            "class_path": "entrain_opt.MultimodalModule",
            "init_args": {"model": "model", "frozen": list(frozen)},
        },
        "data": {
            "class_path": "entrain_opt.MultimodalDataModule",
            "init_args": {"dataset": "train.jsonl", "global_batch_size": global_batch_size},
        },
    }


def choose(lines, count):
    """Short samples of every kind: text-only, one image, several images."""
    kinds = {0: [], 1: [], 2: []}
    for line in sorted(lines, key=len):
        parts = [part for message in json.loads(line)["messages"] for part in message["content"]]
        kinds[min(2, sum(part["type"] == "image" for part in parts))].append(line)
    several = kinds[2][: count // 6]
    text = kinds[0][: count // 4]
    return several + text + kinds[1][: count - len(several) - len(text)]


def entrain(folder, recipe, *arguments, command="fit", launcher=(), ranks=1, timeout_seconds=300):
    """Run `entrain COMMAND --config recipe ARGUMENTS` in `folder`; returns the finished process.

    By default it begins with everything imported and launches further ranks as it always does. `launcher` is the start
    of a command line to run in its place, such as `INTERPRETER`. With `ranks`, that many processes are started as
    `torchrun` starts them, none of which has to import anything; their output is joined.
    """
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    words = [command, "--config", "recipe.yaml", *arguments]
    environment = {**server.ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    if launcher:
        return subprocess.run(
            [*launcher, "-m", MAIN, *words], cwd=folder, env={**os.environ, **environment}, capture_output=True,
            text=True, timeout=timeout_seconds, check=False,
        )  # fmt: skip
    own = server.environments_of_ranks(ranks) if ranks > 1 else [{}]
    runs = [server.ModuleRun(MAIN, words, folder=folder, environment={**environment, **one}) for one in own]
    ended = [run.wait(timeout_seconds) for run in runs]
    code = next((one.returncode for one in ended if one.returncode), 0)
    output, errors = ("\n".join(getattr(one, name) for one in ended) for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, code, output, errors)


def losses(folder, version=0):
    """{step: loss} of a run's CSV log."""
    import csv

    with open(
        folder
        / "runs"
        / "small"
        / "metrics"
        / (f"version_{version}" if isinstance(version, int) else version)
        / "metrics.csv",
        encoding="utf-8",
    ) as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file) if row.get("loss")}
