"""How long planning takes, whether it finds the optimum, and what its plan is worth against the paper's rule.

    python benchmarks/planner.py speed                    # 8, 64, 512 and 4,096 devices, 5,000 samples
    python benchmarks/planner.py speed --traces DIR --devices 64     # 5,000 samples of every trace and model
    python benchmarks/planner.py traces --traces DIR      # every trace, 16 and 64 A40s, against `proportional`

`speed`: for each number of devices the wall seconds from samples to plan (and those of the solver), what was searched,
and whether the solvers' optimum is that of enumeration: every choice with its best partition, none dropped. `--wide`
adds tensor degrees and recompute. `import entrain_opt` is timed in processes of its own.

`traces`: our plan and the paper's (Algorithm 2, microbatches of four samples), both replayed by the same assigner and
simulator, with more effort and more replicas than planning takes; once on the global batches that the planner saw, and
once on fresh ones. Costs are analytic, from data sheets; nothing is executed. Audio and video are sized as in
`assigner_data.py` and go through the model's one tower.
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
from entrain_opt.planner.demand import Demand, estimate_demand
from entrain_opt.planner.ilp import solve_ilp
from entrain_opt.planner.replay import Replayer
from entrain_opt.planner.search import rank_choices
from entrain_opt.planner.shortlist import build_shortlist
from entrain_opt.planner.solve import solve_instance
from entrain_opt.spec import ClusterSpec, ModelSpec
from entrain_opt.workload import SampleTable
from entrain_opt.workload.media import media_rule

#: Batches that both plans are replayed on, replicas of each, and the effort of their assignments.
BATCHES, REPLICAS, EFFORT = 8, 2, "fast"
FRESH_SEED = 12345
#: Of which planning is timed.
SAMPLES = 5000


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
    parser.add_argument("--schedule", default="auto")
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
    options = plan_options(arguments)
    folders = arguments.models if arguments.traces else arguments.models[-1:]
    row(
        "data", "model", "devices", "global batch", "planning s", "solver s", "choices", "dropped by bound", "plan",
        "optimum is enumeration's",
    )  # fmt: skip
    row(*["---"] * 10)
    took: dict[int, list[float]] = {}
    for folder in folders:
        model = ModelSpec.from_pretrained(folder)
        for name, table in tables(arguments.traces, folder).items():
            samples = table.take(np.random.default_rng(0).permutation(len(table))[:SAMPLES])
            if not took:  # Compiled code is loaded once.
                solve_plan(model, samples, make_cluster(arguments, 8), global_batch_size=64, options=options)
            for devices in arguments.devices or (8, 64, 512, 4096):
                planning, cells = timed_plan(model, samples, devices, options, arguments)
                took.setdefault(devices, []).append(planning)
                row(name, folder[-2:], f"{devices:,}", *cells)
    for devices, seconds in took.items() if arguments.traces else ():
        middle = statistics.median(seconds)
        print(f"\n{devices:,} devices: {min(seconds):.2f} to {max(seconds):.2f} s, median {middle:.2f}")
    seconds = [import_seconds() for _ in range(7)]
    print(f"\nimport entrain_opt: median {statistics.median(seconds):.3f} s of {len(seconds)} processes")


def timed_plan(
    model: ModelSpec, samples: SampleTable, devices: int, options: PlanOptions, arguments: argparse.Namespace
) -> tuple[float, list[object]]:
    """Seconds of planning, and what a line says of it."""
    cluster, batch = make_cluster(arguments, devices), arguments.samples_per_device * devices
    costs = CostModel(model, cluster, precision=options.precision)
    start = time.perf_counter()
    plan = solve_plan(model, samples, cluster, global_batch_size=batch, options=options)
    planning = time.perf_counter() - start
    demand = estimate_demand(samples, costs, batch)
    start = time.perf_counter()
    instance, solution, _ = solve_instance(costs, demand, options)
    solver = time.perf_counter() - start
    whole, _ = build_shortlist(costs, demand, options, everything=True, one_in_flight=instance.one_in_flight)
    best = rank_choices(whole)[0]
    highs = solve_ilp(instance, time_limit_seconds=60) if devices <= 64 and not arguments.wide else None
    equal = solution.ticks == best.ticks and (highs is None or highs.ticks == best.ticks)
    return planning, [
        f"{batch:,}", f"{planning:.2f}", f"{solver:.2f}", f"{len(whole.choices):,}", f"{instance.num_dropped:,}",
        describe(plan), "yes" if equal else f"NO ({solution.ticks} and {best.ticks})",
    ]  # fmt: skip


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
                start = time.perf_counter()
                try:
                    ours = solve_plan(model, samples, cluster, global_batch_size=batch, options=options)
                except PlanError as error:
                    row(name, folder[-2:], devices, f"none: {error}", *[""] * 8)
                    continue
                planning = time.perf_counter() - start
                costs = CostModel(model, cluster, precision=options.precision)
                seen, fresh = (estimate_demand(samples, costs, batch, seed=seed) for seed in (options.seed, FRESH_SEED))
                mine = [replayed_seconds(ours, demand, costs, options) for demand in (seen, fresh)]
                cells = [name, folder[-2:], devices, describe(ours), seconds_cell(mine[0])]
                try:
                    rule = solve_plan(
                        model, samples, cluster, global_batch_size=batch, options=options, method="proportional"
                    )
                except PlanError as error:
                    cells += [f"none: {str(error)[:60]}", "", "", ""]
                else:
                    theirs = [replayed_seconds(rule, demand, costs, options) for demand in (seen, fresh)]
                    cells += [describe(rule), seconds_cell(theirs[0])]
                    for gains, a, b in zip((ratios, fresh_ratios), theirs, mine, strict=True):
                        if a is None or b is None:
                            cells.append("one cannot run them")
                        else:
                            gains.append(a / b)
                            cells.append(f"{a / b:.3f}")
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


def replayed_seconds(plan: Plan, demand: Demand, costs: CostModel, options: PlanOptions) -> float | None:
    """Seconds per step on some batches; None if they do not fit."""
    replayer = Replayer(costs, demand, options)
    try:
        return replayer.replay(plan, num_batches=BATCHES, num_replicas=REPLICAS, effort=EFFORT).seconds
    except PlanError:
        return None


def seconds_cell(seconds: float | None) -> str:
    return "does not fit" if seconds is None else f"{seconds:.3f}"


def describe(plan: Plan) -> str:
    """Replicas x pipeline, ranks of the modules, microbatches."""
    from entrain_opt.cli.what_if import short_plan

    return short_plan(plan).removesuffix(" microbatches")


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
