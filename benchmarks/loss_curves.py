"""One seed, one hundred steps, every plan: the loss curves lie on each other.

    python benchmarks/loss_curves.py
    python benchmarks/loss_curves.py --steps 100 --processes 1 2 4

A small model (four encoder and four language-model layers, everything trained, AdamW, clipped gradients) learns from
the quickstart's data with `entrain fit`, once under each plan: replicas, pipelines, shared layers, recomputed
activations, schedules and policies, on one, two and four processes. Printed is, for each plan, by which share its loss
differs at most from that of one process, over all steps. Ends with status 1 if that is more than `--tolerance`
anywhere.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
DATA = ROOT / "recipes" / "data" / "physics"
#: Name, processes, what the strategy is told.
PLANS = (
    ("one process", 1, {}),
    ("one process, in order", 1, {"policy": "in_order", "num_microbatches": 3}),
    ("one process, recompute", 1, {"recompute": "always"}),
    ("2 stages, eager", 2, {"pipeline_degree": 2}),
    (
        "2 stages, 1F1B, pairwise",
        2,
        {"pipeline_degree": 2, "schedule": "1f1b", "policy": "pairwise", "num_microbatches": 3},
    ),
    ("2 stages, zero bubble", 2, {"pipeline_degree": 2, "schedule": "zero_bubble"}),
    ("2 replicas", 2, {"data_degree": 2}),
    ("2 replicas, sharded", 2, {"data_degree": 2, "data_parallel": "sharded"}),
    ("2 share layers", 2, {"pipeline_degree": 1, "tensor_degrees": [2]}),
    ("4 stages", 4, {"pipeline_degree": 4}),
    ("4 replicas", 4, {"data_degree": 4}),
    ("2 replicas of 2 stages", 4, {"data_degree": 2, "pipeline_degree": 2}),
    ("2 replicas of 2 stages, sharded", 4, {"data_degree": 2, "pipeline_degree": 2, "data_parallel": "sharded"}),
    ("2 stages, 2 share layers", 4, {"pipeline_degree": 2, "tensor_degrees": [2]}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--processes", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--tolerance", type=float, default=1e-4)
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        reference: list[float] = []
        print("| plan | processes | loss of the first and last step | largest difference |")
        print("|---|---|---|---|")
        for name, processes, options in PLANS:
            if processes not in arguments.processes and reference:
                continue
            losses = train(Path(folder), processes, options, arguments.steps)
            reference = reference or losses
            worst = max(abs(mine / one - 1) for mine, one in zip(losses, reference, strict=True))
            failed |= worst > arguments.tolerance
            print(f"| {name} | {processes} | {losses[0]:.4f} to {losses[-1]:.4f} | {worst:.1e} |", flush=True)
    if failed:
        raise SystemExit(f"A loss differs by more than {arguments.tolerance}.")


def write_model(folder: Path) -> None:
    """The quickstart's model with few layers, and short samples of its data."""
    shutil.copytree(ROOT / "models" / "tiny-llava", folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    config["vision_config"] |= {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4}
    config["text_config"] |= {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 8}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    lines = (DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "images").symlink_to(DATA / "images")
    (folder / "train.jsonl").write_text("\n".join(sorted(lines, key=len)[: len(lines) // 4]) + "\n", encoding="utf-8")


def train(folder: Path, processes: int, options: dict, steps: int) -> list[float]:
    """The losses of a run."""
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "eps": 1e-6}}
    recipe = {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu",
            "devices": processes,
            "max_steps": steps,
            "log_every_n_steps": 1,
            "default_root_dir": str(runs),
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "enable_checkpointing": False,
            "gradient_clip_val": 1.0,
            "strategy": {
                "class_path": "entrain_opt.EntrainStrategy",
                "init_args": {"cost_model": "analytic", "drift_check_steps": 0, **options},
            },
            "logger": {"class_path": "pytorch_lightning.loggers.CSVLogger", "init_args": {"save_dir": str(runs)}},
        },
        "model": {
            "class_path": "entrain_opt.MultimodalModule",
            "init_args": {"model": "model", "optimizer": optimizer},
        },
        "data": {
            "class_path": "entrain_opt.MultimodalDataModule",
            "init_args": {"dataset": "train.jsonl", "global_batch_size": 4, "num_workers": 0},
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "entrain_opt.cli.main", "fit", "--config", "recipe.yaml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    (log,) = runs.glob("**/metrics.csv")
    with log.open(encoding="utf-8") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row.get("loss")]
    assert len(losses) == steps, f"{len(losses)} losses of {steps} steps in {log}"
    return losses


if __name__ == "__main__":
    main()
