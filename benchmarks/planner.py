"""How long planning takes, and what the solver's plan is worth against the paper's proportional rule.

    python benchmarks/planner.py                      # synthetic samples, sizes drawn from log-normal distributions
    python benchmarks/planner.py a.parquet b.parquet  # traces with the columns sample_id, image_sizes, text_words

For each data set and number of devices: seconds for `cp-sat` from start to plan (the solver's own part in brackets),
the chosen configuration, its predicted seconds per step, and those of `proportional` (the paper's Algorithm 2, with
microbatches of four samples). Both are predicted by the same assigner and simulator on the same global batches, with
analytic costs; nothing is executed. `--same-microbatches` gives both the paper's number of microbatches.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from entrain_opt.cost import CostModel
from entrain_opt.errors import PlanError
from entrain_opt.plan import Plan
from entrain_opt.planner import PlanOptions, solve_plan
from entrain_opt.planner.demand import estimate_demand
from entrain_opt.planner.solve import solve_instance
from entrain_opt.spec import ClusterSpec, ModelSpec
from entrain_opt.workload import SampleTable
from entrain_opt.workload.media import MediaRule, media_rule
from entrain_opt.workload.trace import read_trace

HEADER = (
    "devices", "global batch", "planning s (solver)", "cp-sat: data x pipeline, encoder+LLM ranks, microbatches",
    "s/step", "gap", "proportional", "s/step", "ratio",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace Parquet files; none: synthetic samples")
    parser.add_argument("--model", default="models/qwen2_5-vit-llama3_2-3b", help="model folder")
    parser.add_argument("--device", default="A100-80GB")
    parser.add_argument("--devices", nargs="*", type=int, default=[8, 16, 64, 512, 4096])
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--method", default="cp-sat", choices=("cp-sat", "ilp", "search"))
    parser.add_argument("--same-microbatches", action="store_true")
    arguments = parser.parse_args()
    rule = media_rule(arguments.model)
    tables = {path.stem: read_trace(path, rule) for path in arguments.traces}
    for name, table in (tables or {"synthetic (log-normal sizes)": synthetic_samples(rule)}).items():
        report(name, table, arguments)


def report(name: str, samples: SampleTable, arguments: argparse.Namespace) -> None:
    print(f"\n{name}: {len(samples):,} samples, {arguments.model}, {arguments.device}, {arguments.schedule}\n")
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    model = ModelSpec.from_pretrained(arguments.model)
    for devices in arguments.devices:
        cluster = ClusterSpec(device=arguments.device, num_nodes=max(devices // 8, 1), devices_per_node=min(devices, 8))
        batch = max(128, 8 * devices)
        options = PlanOptions(
            cost_model="analytic", device=arguments.device, precision=arguments.precision, schedule=arguments.schedule
        )
        try:
            rule = solve_plan(model, samples, cluster, global_batch_size=batch, options=options, method="proportional")
            if arguments.same_microbatches:
                options = replace(options, num_microbatches=rule.num_microbatches, data_degree=rule.degrees.data)
            start = time.perf_counter()
            best = solve_plan(
                model, samples, cluster, global_batch_size=batch, options=options, method=arguments.method
            )
            planning = time.perf_counter() - start
        except PlanError as error:
            print(f"| {devices} | {batch} | {error} |")
            continue
        costs = CostModel(model, cluster, precision=options.precision)
        demand = estimate_demand(samples, costs, batch)
        start = time.perf_counter()
        solve_instance(costs, demand, replace(options, method=arguments.method))
        solver = time.perf_counter() - start
        seconds = [plan.predicted.iteration_seconds for plan in (best, rule) if plan.predicted is not None]
        cells = (
            devices, batch, f"{planning:.2f} ({solver:.2f})", describe(best), f"{seconds[0]:.3f}",
            f"{best.provenance.gap:.1%}", describe(rule), f"{seconds[1]:.3f}", f"{seconds[1] / seconds[0]:.3f}",
        )  # fmt: skip
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def describe(plan: Plan) -> str:
    encoder = {stage.rank for stage in plan.stages if stage.module != "llm"}
    llm = {stage.rank for stage in plan.stages if stage.module == "llm"}
    shared = " (one shared)" if encoder & llm and plan.degrees.pipeline > 1 else ""
    return f"{plan.degrees.data} x {plan.degrees.pipeline}, {len(encoder)}+{len(llm)}{shared}, {plan.num_microbatches}"


def synthetic_samples(rule: MediaRule, count: int = 4000, seed: int = 0) -> SampleTable:
    """Images of log-normal area and texts of log-normal length; a fifth without image."""
    generator = np.random.default_rng(seed)
    images = (generator.random(count) > 0.2).astype(np.int64)
    sides = np.clip(np.exp(generator.normal(6.3, 0.5, size=(int(images.sum()), 2))), 64, 4096).astype(int)
    sizes = [
        rule.image(int(width), int(height)) for width, height in np.clip(sides, sides.max(1, keepdims=True) // 8, None)
    ]
    text = np.ceil(generator.lognormal(5.0, 1.0, size=count)).astype(np.int64)
    return SampleTable(
        sample_ids=np.array([f"s{i}" for i in range(count)], dtype=np.str_),
        text_tokens=text,
        label_tokens=np.maximum(text // 2, 1),
        media_offsets=np.concatenate([[0], np.cumsum(images)]).astype(np.int64),
        media_kind=np.zeros(len(sizes), dtype=np.int64),
        media_patches=np.array([size.patches for size in sizes]),
        media_segments=np.array([size.segments for size in sizes]),
        media_tokens=np.array([size.tokens for size in sizes]),
    )


if __name__ == "__main__":
    main()
