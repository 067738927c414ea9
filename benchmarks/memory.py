"""The estimate of memory against what a process really takes: models/tiny-llava on one CPU process, float32, AdamW.

    python benchmarks/memory.py

Each case is a process of its own. After everything is imported and the data read, its resident memory is noted and the
kernel's high-water mark set back; then the model is built and two steps of the real runtime run. Measured: the mark
less what was there before. Predicted: the planner's static bytes plus the highest point of the simulator's memory curve
for the very same assignment. The allocator is told to give freed memory back, so that what is measured is what is held.
Linux only: it reads and writes /proc/self.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODEL, DATASET = "models/tiny-llava", "recipes/data/physics/train.jsonl"
#: Samples of the global batch, microbatches, frozen parts.
CASES: tuple[tuple[int, int, tuple[str, ...]], ...] = (
    (16, 1, ()),
    (16, 4, ()),
    (32, 2, ()),
    (32, 4, ("vision_tower",)),
    (32, 4, ("vision_tower", "projector")),
    (32, 4, ("language_model",)),
)
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def main() -> None:
    print("| samples | microbatches | frozen | measured MiB | predicted MiB | predicted / measured | predicted parts |")
    print("|---|---|---|---|---|---|---|")
    ratios = []
    for case in CASES:
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(case)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"},
        )
        found = json.loads(done.stdout.splitlines()[-1])
        ratios.append(found["predicted"] / found["measured"])
        parts = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in found["parts"].items())
        print(
            f"| {case[0]} | {case[1]} | {', '.join(case[2]) or 'none'} | {found['measured'] / 2**20:.0f} | "
            f"{found['predicted'] / 2**20:.0f} | {ratios[-1]:.2f} | {parts} |",
            flush=True,
        )
    print(f"\npredicted / measured: least {min(ratios):.2f}, most {max(ratios):.2f}")


def measure(samples: int, microbatches: int, frozen: tuple[str, ...]) -> dict[str, Any]:
    """Measured and predicted bytes of one case; in a process of its own."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from entrain_opt.cost import CostModel
    from entrain_opt.lightning.iteration import IterationRunner
    from entrain_opt.plan import ParallelDegrees, Plan, StagePlan
    from entrain_opt.runtime.batches import RankBatchBuilder
    from entrain_opt.runtime.families import read_family
    from entrain_opt.runtime.p2p import make_groups
    from entrain_opt.runtime.reader import ChatReader
    from entrain_opt.runtime.stages import build_rank_model, tied_stages
    from entrain_opt.spec import ClusterSpec, ModelSpec
    from entrain_opt.workload.index import load_index

    torch.set_num_threads(1)
    spec = ModelSpec.from_pretrained(MODEL, frozen=frozen)
    stages = tuple(StagePlan(module=m.name, layers=(0, m.num_layers), rank=0) for m in spec.modules)
    plan = Plan(
        model=MODEL, degrees=ParallelDegrees(), stages=stages, global_batch_size=samples,
        num_microbatches=microbatches, frozen=frozen,
    )  # fmt: skip
    costs = CostModel(spec, ClusterSpec())
    with tempfile.TemporaryDirectory() as scratch:
        table = load_index(DATASET, MODEL, policy="error", cache_dir=Path(scratch), progress=False)
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        builder = RankBatchBuilder(
            samples=table, reader=ChatReader.open(DATASET, table, MODEL), family=read_family(MODEL), plan=plan,
            cost_model=costs, replica=0, pipeline_rank=0,
        )  # fmt: skip
        rows = np.random.default_rng(0).permutation(len(table))[:samples].tolist()
        warm_up()
        batch = builder.build(rows)  # Holds pixels and ids, which are data, not activations of the plan.
        before = high_water_mark()
        groups = make_groups(plan, tied_stages=tied_stages(MODEL, plan))
        model = build_rank_model(MODEL, plan, 0, seed=0)
        runner = IterationRunner(model, groups)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
        for _ in range(2):
            runner.train(batch)
            optimizer.zero_grad()
            runner.restore_gradients()
            optimizer.step()
        measured = high_water_mark(reset=False) - before
    return {"measured": measured, **predict(costs, plan, table.take(np.array(rows)))}


def predict(costs: Any, plan: Any, samples: Any) -> dict[str, Any]:
    """What the planner's own replay says of the same samples."""
    from entrain_opt.planner.demand import estimate_demand
    from entrain_opt.planner.options import PlanOptions
    from entrain_opt.planner.replay import Replayer

    demand = estimate_demand(samples, costs, plan.global_batch_size, num_batches=1)
    options = PlanOptions(cost_model="analytic", memory_bytes=1 << 40)
    replay = Replayer(costs, demand, options).replay(plan, num_batches=1, num_replicas=1)
    return {"predicted": replay.peak_bytes[0], "parts": replay.peak_parts[0]}


def warm_up() -> None:
    """Threads, kernels and libraries that any first step loads."""
    import torch

    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    loss = torch.nn.functional.scaled_dot_product_attention(*[layer(torch.randn(1, 2, 64, 64)) for _ in range(3)]).sum()
    loss.backward()
    optimizer.step()


def high_water_mark(*, reset: bool = True) -> int:
    """Bytes of resident memory: now, setting the mark back to it, or the highest since then."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status: expected a line VmHWM, found none.")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        count, number, parts = json.loads(sys.argv[1])
        print(json.dumps(measure(count, number, tuple(parts))))
    else:
        main()
