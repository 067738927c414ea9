"""Host memory over many steps: `python benchmarks/loader_memory.py [--steps 2000] [--workers N] [--no-training]`.

Reads global batches of the shipped physics data as a rank that holds the whole model does (assign, schedule, decode,
tokenize) with the loader of real runs, one batch ahead, and trains a model of a few layers on them. Prints the memory
of this process and its loader processes as it goes. The last column is what counts: growth per 100 steps since the
first tenth, which should vanish.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch

from entrain_opt.cost import CostModel
from entrain_opt.lightning.ahead import AheadLoader
from entrain_opt.lightning.datamodule import GlobalBatchDataset, GlobalBatchSampler
from entrain_opt.lightning.iteration import IterationRunner
from entrain_opt.plan import ParallelDegrees, Plan, StagePlan
from entrain_opt.runtime.batches import RankBatchBuilder
from entrain_opt.runtime.p2p import make_groups
from entrain_opt.runtime.reader import ChatReader
from entrain_opt.runtime.stages import build_rank_model
from entrain_opt.spec import ClusterSpec, ModelSpec
from entrain_opt.workload.index import load_index

ROOT = Path(__file__).parents[1]
DATA = ROOT / "recipes" / "data" / "physics"
SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1}


def resident_mib() -> float:
    """Resident memory of this process and its children; pages that they share are counted for each."""
    pids = [os.getpid()]
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # It ended while we looked.
            if parent == os.getpid():
                pids.append(int(name))
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue  # It ended while we looked.
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return total / 1024


def write_inputs(folder: Path, num_samples: int) -> tuple[Path, Path]:
    """A model of two layers with the shipped tokenizer and processor, and the shortest samples of the shipped data."""
    model, dataset = folder / "model", folder / "train.jsonl"
    shutil.copytree(ROOT / "models" / "tiny-llava", model)
    config = json.loads((model / "config.json").read_text())
    config["vision_config"] |= SMALL
    config["text_config"] |= SMALL | {"head_dim": 8}
    (model / "config.json").write_text(json.dumps(config))
    (folder / "images").symlink_to(DATA / "images")
    lines = sorted((DATA / "train.jsonl").read_text(encoding="utf-8").splitlines(), key=len)[:num_samples]
    dataset.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return model, dataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=0, help="loader processes; 0: a thread works one batch ahead")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--samples", type=int, default=60, help="of the shipped data, shortest first")
    parser.add_argument("--no-training", action="store_true", help="read only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        run(arguments, *write_inputs(Path(scratch), arguments.samples))


def run(arguments: argparse.Namespace, folder: Path, dataset: Path) -> None:
    samples = load_index(dataset, folder, policy="error", cache_dir=folder / "cache", progress=False)
    spec = ModelSpec.from_pretrained(folder)
    stages = tuple(StagePlan(module=module.name, layers=(0, module.num_layers), rank=0) for module in spec.modules)
    plan = Plan(
        model=str(folder), degrees=ParallelDegrees(), stages=stages, global_batch_size=arguments.batch,
        num_microbatches=2, frozen=(), policy="pairwise", schedule="1f1b",
    )  # fmt: skip
    model = build_rank_model(folder, plan, 0, seed=0)
    builder = RankBatchBuilder(
        samples=samples, reader=ChatReader.open(dataset, samples, folder), family=model.family, plan=plan,
        cost_model=CostModel(spec, ClusterSpec(device="cpu")), replica=0, pipeline_rank=0,
    )  # fmt: skip
    sampler = GlobalBatchSampler(len(samples), arguments.batch, seed=0, shuffle=True)
    loader = AheadLoader(
        GlobalBatchDataset(builder), batch_size=None, sampler=sampler, num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
    )  # fmt: skip
    runner = IterationRunner(model, make_groups(plan))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    what = "read" if arguments.no_training else "read and trained on"
    print(f"{len(samples)} samples, {arguments.batch} a step, {what}; {arguments.workers} loader processes")
    print(f"{'step':>6} {'MiB':>8} {'MiB per 100 steps':>18} {'seconds':>8}")
    step = epoch = 0
    started = time.monotonic()
    base: tuple[int, float] | None = None
    while step < arguments.steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            if not arguments.no_training:
                runner.train(batch)
                optimizer.zero_grad()
                runner.restore_gradients()
                optimizer.step()
            step += 1
            if step % max(1, arguments.steps // 10) == 0:
                now = resident_mib()
                base = base or (step, now)
                growth = 100 * (now - base[1]) / max(1, step - base[0])
                print(f"{step:>6} {now:>8.1f} {growth:>18.2f} {time.monotonic() - started:>8.0f}", flush=True)
            if step == arguments.steps:
                break
        epoch += 1


if __name__ == "__main__":
    main()
