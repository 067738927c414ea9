"""Host memory of the loaders over many steps: `python benchmarks/loader_memory.py [--steps 2000] [--workers 2]`.

Reads global batches of the shipped physics data as a rank that holds the whole model does (assign, schedule, decode,
tokenize), without training, and prints the memory of this process and its loader processes as it goes. The last column
is what counts: growth per 100 steps since the first tenth, which should vanish.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torch.utils.data import DataLoader

from entrain_opt.cost import CostModel
from entrain_opt.lightning.datamodule import GlobalBatchDataset, GlobalBatchSampler
from entrain_opt.plan import ParallelDegrees, Plan, StagePlan
from entrain_opt.runtime.batches import RankBatchBuilder
from entrain_opt.runtime.families import read_family
from entrain_opt.runtime.reader import ChatReader
from entrain_opt.spec import ClusterSpec, ModelSpec
from entrain_opt.workload.index import load_index

ROOT = Path(__file__).parents[1]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()
    dataset, folder = ROOT / "recipes/data/physics/train.jsonl", ROOT / "models/tiny-llava"
    samples = load_index(dataset, folder, policy="error", cache_dir="runs/cache", progress=False)
    model = ModelSpec.from_pretrained(folder)
    stages = tuple(StagePlan(module=module.name, layers=(0, module.num_layers), rank=0) for module in model.modules)
    plan = Plan(
        model=str(folder), degrees=ParallelDegrees(), stages=stages, global_batch_size=arguments.batch,
        num_microbatches=2, frozen=(), policy="pairwise", schedule="1f1b",
    )  # fmt: skip
    builder = RankBatchBuilder(
        samples=samples, reader=ChatReader.open(dataset, samples, folder), family=read_family(folder), plan=plan,
        cost_model=CostModel(model, ClusterSpec(device="cpu")), replica=0, pipeline_rank=0,
    )  # fmt: skip
    sampler = GlobalBatchSampler(len(samples), arguments.batch, seed=0, shuffle=True)
    loader = DataLoader(
        GlobalBatchDataset(builder), batch_size=None, sampler=sampler, num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
    )  # fmt: skip
    print(f"{len(samples)} samples, {arguments.batch} a step, {arguments.workers} loader processes")
    print(f"{'step':>6} {'MiB':>8} {'MiB per 100 steps':>18}")
    step = epoch = 0
    base: tuple[int, float] | None = None
    while step < arguments.steps:
        sampler.set_epoch(epoch)
        for _ in loader:
            step += 1
            if step % max(1, arguments.steps // 10) == 0:
                now = resident_mib()
                base = base or (step, now)
                growth = 100 * (now - base[1]) / max(1, step - base[0])
                print(f"{step:>6} {now:>8.1f} {growth:>18.2f}", flush=True)
            if step == arguments.steps:
                break
        epoch += 1


if __name__ == "__main__":
    main()
