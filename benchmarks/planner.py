"""How long planning takes, whether it finds the optimum, and what its plan is worth against the paper's rule.

    python benchmarks/planner.py speed                    # 8, 64, 512 and 4,096 devices, 5,000 samples
    python benchmarks/planner.py traces --traces DIR      # every trace, 16 and 64 A40s, against `proportional`

`speed`: for each number of devices the seconds from samples to plan (processor time of one thread, and the solver's own
part), what was searched, and whether the solvers' optimum is that of enumeration: every choice with its best partition,
none dropped. `--wide` adds tensor degrees and recompute. `import entrain_opt` is timed in processes of its own.

`traces`: our plan and the paper's (Algorithm 2, microbatches of four samples), both replayed by the same assigner and
simulator; once on the global batches that the planner saw, and once on fresh ones. Costs are analytic, from data
sheets; nothing is executed. Audio and video are sized as in `assigner_data.py` and go through the model's one tower.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from assigner_data import read_table, synthetic_table

from entrain_opt.cost import CostModel
from entrain_opt.errors import PlanError
from entrain_opt.plan import Plan
from entrain_opt.planner import PlanOptions, solve_plan
from entrain_opt.planner.demand import estimate_demand
from entrain_opt.planner.ilp import solve_ilp
from entrain_opt.planner.replay import Replayer
from entrain_opt.planner.search import rank_choices
from entrain_opt.planner.shortlist import build_shortlist
from entrain_opt.planner.solve import solve_instance
from entrain_opt.spec import ClusterSpec, ModelSpec
from entrain_opt.workload import SampleTable
from entrain_opt.workload.media import media_rule

#: Fresh batches that both plans are replayed on, and replicas of each.
FRESH_BATCHES, FRESH_REPLICAS = 6, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "traces"))
    parser.add_argument("--traces", type=Path, help="folder of trace Parquet files; none: synthetic samples")
    parser.add_argument(
        "--models", nargs="*", default=["models/qwen2_5-vit-llama3_2-1b", "models/qwen2_5-vit-llama3_2-3b"]
    )
    parser.add_argument("--device", default="A40-48GB")
    parser.add_argument("--devices", nargs="*", type=int)
    parser.add_argument("--devices-per-node", type=int, default=4)
    parser.add_argument("--samples-per-device", type=int, default=8, help="of a global batch")
    parser.add_argument("--schedule", default="eager")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--wide", action="store_true", help="search tensor degrees 1, 2, 4 and recompute as well")
    arguments = parser.parse_args()
    if arguments.what == "speed":
        speed(arguments)
    else:
        compare_traces(arguments)


def plan_options(arguments: argparse.Namespace) -> PlanOptions:
    options = PlanOptions(
        cost_model="analytic", device=arguments.device, precision=arguments.precision, schedule=arguments.schedule,
        policy=arguments.policy,
    )  # fmt: skip
    return replace(options, tensor_degrees=(1, 2, 4), recompute="search") if arguments.wide else options


def make_cluster(arguments: argparse.Namespace, devices: int) -> ClusterSpec:
    per_node = min(devices, arguments.devices_per_node)
    return ClusterSpec(device=arguments.device, num_nodes=devices // per_node, devices_per_node=per_node)


def tables(folder: Path | None, model_folder: str) -> dict[str, SampleTable]:
    if folder is None:
        return {"synthetic": synthetic_table()}
    rule = media_rule(model_folder)
    found = {path.stem: read_table(path, rule) for path in sorted(folder.glob("*.parquet"))}
    return {name: replace(table, media_kind=np.zeros_like(table.media_kind)) for name, table in found.items()}


def speed(arguments: argparse.Namespace) -> None:
    folder = arguments.models[-1]
    name, samples = list(tables(arguments.traces, folder).items())[-1]
    samples = samples.take(np.random.default_rng(0).permutation(len(samples))[:5000])
    model, options = ModelSpec.from_pretrained(folder), plan_options(arguments)
    print(f"\n{name}, {len(samples):,} samples, {folder}, {arguments.device}\n")
    row(
        "devices",
        "global batch",
        "planning s",
        "solver s",
        "choices",
        "dropped by bound",
        "plan",
        "optimum is enumeration's",
    )
    row(*["---"] * 8)
    warm = make_cluster(arguments, 8)
    solve_plan(model, samples, warm, global_batch_size=64, options=options)  # Compiled code is loaded once.
    for devices in arguments.devices or (8, 64, 512, 4096):
        cluster, batch = make_cluster(arguments, devices), arguments.samples_per_device * devices
        costs = CostModel(model, cluster, precision=options.precision)
        start = time.process_time()
        plan = solve_plan(model, samples, cluster, global_batch_size=batch, options=options)
        planning = time.process_time() - start
        demand = estimate_demand(samples, costs, batch)
        start = time.process_time()
        instance, solution, _ = solve_instance(costs, demand, options)
        solver = time.process_time() - start
        whole, _ = build_shortlist(costs, demand, options, everything=True, one_in_flight=instance.one_in_flight)
        best = rank_choices(whole)[0]
        highs = solve_ilp(instance, time_limit_seconds=60) if devices <= 64 and not arguments.wide else None
        equal = solution.ticks == best.ticks and (highs is None or highs.ticks == best.ticks)
        row(
            f"{devices:,}", f"{batch:,}", f"{planning:.2f}", f"{solver:.2f}", f"{len(whole.choices):,}",
            f"{instance.num_dropped:,}", describe(plan), "yes" if equal else f"NO ({solution.ticks} and {best.ticks})",
        )  # fmt: skip
    seconds = [import_seconds() for _ in range(7)]
    print(f"\nimport entrain_opt: median {statistics.median(seconds):.3f} s of {len(seconds)} processes")


def import_seconds() -> float:
    """Of the import alone, in a fresh process."""
    code = "import time; s = time.perf_counter(); import entrain_opt; print(time.perf_counter() - s)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def compare_traces(arguments: argparse.Namespace) -> None:
    options = plan_options(arguments)
    row(
        "trace", "model", "devices", "our plan", "s/step", "proportional", "s/step", "ratio", "ratio on fresh batches",
        "planning s", "b_min", "in order",
    )  # fmt: skip
    row(*["---"] * 12)
    ratios, fresh_ratios = [], []
    for folder in arguments.models:
        model = ModelSpec.from_pretrained(folder)
        for name, samples in tables(arguments.traces, folder).items():
            for devices in arguments.devices or (16, 64):
                cluster, batch = make_cluster(arguments, devices), arguments.samples_per_device * devices
                start = time.process_time()
                try:
                    ours = solve_plan(model, samples, cluster, global_batch_size=batch, options=options)
                except PlanError as error:
                    row(name, folder[-2:], devices, f"none: {error}", *[""] * 8)
                    continue
                planning = time.process_time() - start
                cells = [name, folder[-2:], devices, describe(ours), f"{ours.predicted.iteration_seconds:.3f}"]
                try:
                    rule = solve_plan(
                        model, samples, cluster, global_batch_size=batch, options=options, method="proportional"
                    )
                except PlanError as error:
                    cells += [f"none: {str(error)[:60]}", "", "", ""]
                else:
                    ratios.append(rule.predicted.iteration_seconds / ours.predicted.iteration_seconds)
                    costs = CostModel(model, cluster, precision=options.precision)
                    mine, theirs = (fresh_seconds(plan, samples, costs, options) for plan in (ours, rule))
                    fresh = "one cannot run them"
                    if mine is not None and theirs is not None:
                        fresh_ratios.append(theirs / mine)
                        fresh = f"{theirs / mine:.3f}"
                    cells += [describe(rule), f"{rule.predicted.iteration_seconds:.3f}", f"{ratios[-1]:.3f}", fresh]
                found = ours.provenance.stability
                random = "random" if found.get("order", {}).get("is_random", True) else "sorted"
                row(*cells, f"{planning:.2f}", found["b_min"], random)
    for words, values in (("the planner's batches", ratios), ("fresh batches", fresh_ratios)):
        if values:
            print(
                f"\nproportional / ours on {words}: geometric mean {np.exp(np.mean(np.log(values))):.3f}, least "
                f"{min(values):.3f}, most {max(values):.3f}; at least 1.04 in {sum(v >= 1.04 for v in values)} of "
                f"{len(values)}"
            )


def fresh_seconds(plan: Plan, samples: SampleTable, costs: CostModel, options: PlanOptions) -> float | None:
    """Seconds per step on batches that the planner has not seen; None if they do not fit."""
    demand = estimate_demand(samples, costs, plan.global_batch_size, seed=12345)
    try:
        replay = Replayer(costs, demand, options).replay(plan, num_batches=FRESH_BATCHES, num_replicas=FRESH_REPLICAS)
    except PlanError:
        return None
    return replay.seconds


def describe(plan: Plan) -> str:
    """Replicas x pipeline, ranks of the modules, microbatches."""
    from entrain_opt.cli.what_if import short_plan

    return short_plan(plan).removesuffix(" microbatches")


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
