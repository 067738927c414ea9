"""A small run for end-to-end tests: the shipped data and tokenizer, a model with few layers, analytic costs."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DATA = ROOT / "recipes" / "data" / "physics"


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


def entrain(folder, recipe, *arguments, command="fit", launcher=(), timeout_seconds=300):
    """Run `entrain COMMAND --config recipe ARGUMENTS` in `folder`; returns the finished process and its seconds."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    main = [*launcher, "-m", "entrain_opt.cli.main"] if launcher else [sys.executable, "-m", "entrain_opt.cli.main"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    process = subprocess.run(
        [*main, command, "--config", "recipe.yaml", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    return process, time.monotonic() - started


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
