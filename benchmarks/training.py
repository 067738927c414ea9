"""Wall clock of training iterations: our policies on our runtime, and our runtime against others.

    python benchmarks/training.py compute                     # (a) real compute, two processes of one thread
    python benchmarks/training.py emulated [--traces DIR]     # (b) waits instead of computing, eight ranks
    python benchmarks/training.py pipelining                  # (c) against torch.distributed.pipelining
    python benchmarks/training.py replicas                    # (d) against DistributedDataParallel

Every round draws one global batch and runs it once under each side, in turn, so that a machine whose speed drifts
disturbs all alike; rounds end before `--budget-seconds` are over. Printed are medians over the rounds, ratios of the
same round (median, least to most), what the simulator said, and the share of ideal: computing seconds over ranks times
wall. The machine's load (1-minute mean, before and after) stands beside each table.

With other work running, wall clocks of real compute say little. So a second table counts processor seconds: for our
side, every action of the schedule takes those that it had, the actions are played through in their order and with their
dependencies, and what a rank's processor did besides is added (*unloaded*: the wall clock of a machine that does
nothing else, as far as processor seconds are the same there). Replicas without a pipeline are as slow as the rank that
needs the most. There is no such number for a peer's pipeline, whose waits only the wall clock shows.

A shared machine also changes its speed from one minute to the next, between measuring costs and running. In (a) *speed*
is what all actions took in the run over what they were predicted to take; the simulation at that speed says whether the
wall clock follows the simulator apart from it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from assigner_data import MODELS_FOLDER, read_tables
from training_ranks import Case, Ranks

from entrain_opt import simulate
from entrain_opt.assigner import assign_microbatches
from entrain_opt.cli.recipe import read_recipe
from entrain_opt.cost import CostModel
from entrain_opt.errors import ScheduleError
from entrain_opt.lightning.emulation import scale_for
from entrain_opt.planner import solve_plan
from entrain_opt.planner.options import PlanOptions
from entrain_opt.schedule.replay import replay
from entrain_opt.spec import ClusterSpec, ModelSpec
from entrain_opt.workload.index import load_index

POLICIES = ("auto", "in_order", "karmarkar_karp", "pairwise")
#: The schedules that the planner chooses between.
OURS = ("eager", "eager_split")
#: Times the scale that a rehearsal takes: eight ranks share few cores here, and `auto` makes more and shorter actions.
SLOWER = 1.5
TRACES_FOLDER = Path(__file__).parents[1] / "recipes" / "data" / "traces"


def load():
    return f"{os.getloadavg()[0]:.1f}"


def assignment_of(plan, costs, policy):
    return assign_microbatches(
        costs,
        plan.pipeline_shape,
        num_replicas=plan.degrees.data,
        num_microbatches=plan.num_microbatches,
        policy=policy,
        schedule=plan.schedule,
    )


def simulated_seconds(plan, costs, assignment, *, with_step):
    """Of one iteration; real iterations are timed without the optimizer's step."""
    timeline = simulate(costs, assignment, plan.pipeline_shape, schedule=plan.schedule)
    return float(timeline.makespan_seconds if with_step else timeline.pipeline_seconds)


def spread(values, digits=3):
    values = sorted(values)
    return f"{statistics.median(values):.{digits}f} ({values[0]:.{digits}f} to {values[-1]:.{digits}f})"


def unloaded(plan, costs, assignment, timed):
    """Wall seconds of one iteration of ours on a machine that does nothing else, and the share of ideal in them."""
    timeline = simulate(costs, assignment, plan.pipeline_shape, schedule=plan.schedule)
    ends, depth = [], plan.degrees.pipeline
    for replica, run in enumerate(timeline.runs):
        of_ranks = timed.action_seconds[replica * depth : (replica + 1) * depth]
        seconds = {action: value for rank in of_ranks for action, value in rank.items()}
        durations = [0.0] * (3 * run.graph.num_slots)
        for order in run.orders:
            for operation in order:
                split = operation - run.graph.num_slots in run.split
                durations[operation] = seconds[run.graph.action(operation, split=split)]
        played = replay(run.graph, run.orders, durations, run.seconds.transfer.tolist()).makespan_seconds
        busy = timed.busy_seconds[replica * depth : (replica + 1) * depth]
        ends.append(played + max(b - sum(rank.values()) for b, rank in zip(busy, of_ranks, strict=True)))
    computed = sum(sum(rank.values()) for rank in timed.action_seconds)
    return max(ends), computed / (len(timed.action_seconds) * max(ends))


def print_sides(results, *, baseline, simulated=None, speeds=None):
    """A line per side: `results[side]` has one `Timed` per round, `simulated[side]` and `speeds[side]` one number per
    round."""
    head = f"{'wall clock':<24} {'s, median':>9} {'gain over ' + baseline:>24} {'share of ideal':>14}"
    head += f" {'simulated':>9} {'wall / simulated':>24}" if simulated else ""
    print(head + (f" {'speed':>24} {'wall / simulated at speed':>25}" if speeds else ""))
    for side, rounds in results.items():
        ratios = [b.wall_seconds / r.wall_seconds for b, r in zip(results[baseline], rounds, strict=True)]
        line = f"{side:<24} {statistics.median(r.wall_seconds for r in rounds):>9.3f} {spread(ratios):>24} "
        line += f"{statistics.median(r.share_of_ideal for r in rounds):>14.1%}"
        if simulated:
            over = [r.wall_seconds / s for r, s in zip(rounds, simulated[side], strict=True)]
            line += f" {statistics.median(simulated[side]):>9.3f} {spread(over):>24}"
            if speeds:
                line += f" {spread(speeds[side]):>24} "
                line += f"{spread([ratio / speed for ratio, speed in zip(over, speeds[side], strict=True)]):>25}"
        print(line, flush=True)


def print_processor(results, alone, *, baseline, simulated=None):
    """The same by processor seconds: `alone[side]` has the unloaded seconds and share of ideal of each round."""
    head = f"{'processor':<24} {'all ranks':>9} {'unloaded':>9} {'gain over ' + baseline:>24} {'share of ideal':>22}"
    print(head + (f" {'unloaded / simulated':>24}" if simulated else ""))
    for side, rounds in results.items():
        line = f"{side:<24} {statistics.median(sum(r.busy_seconds) for r in rounds):>9.3f} "
        if side in alone:
            seconds, shares = zip(*alone[side], strict=True)
            line += f"{statistics.median(seconds):>9.3f} "
            gains = "-"
            if baseline in alone:
                gains = spread([b / mine for (b, _), mine in zip(alone[baseline], seconds, strict=True)])
            line += f"{gains:>24} {spread(shares):>22}"
            if simulated:
                line += f" {spread([s / t for s, t in zip(seconds, simulated[side], strict=True)]):>24}"
        print(line, flush=True)


def within_budget(rounds, arguments):
    """The rounds, until another one would probably end after the budget; at least two (the first may warm up)."""
    started = time.monotonic()
    for number, one in enumerate(rounds):
        spent = time.monotonic() - started
        if number > 1 and spent * (number + 1) / number > arguments.budget_seconds:
            print(f"stopped after {number} rounds: the budget of {arguments.budget_seconds:.0f} s is used up")
            return
        yield one


def compute(arguments):
    """(a) Policies on the quickstart's model and data; costs are measured anew in every round."""
    from entrain_opt.runtime.measure import measure_costs

    recipe, setting = quickstart(arguments)
    before, plan, results, simulated, speeds, alone = load(), None, {}, {}, {}, {}
    ranks = None
    try:
        for rows in within_budget(setting.rounds(arguments.rounds, arguments.seed), arguments):
            measured = measure_costs(recipe.model_folder, num_processes_busy=recipe.devices_per_node)
            costs = CostModel(setting.model, setting.cluster, measured=measured)
            if ranks is None:
                options = replace(recipe.options, num_microbatches=arguments.microbatches)
                plan = setting.plan(options, costs)
                case = Case(
                    plan=plan,
                    costs=costs,
                    samples=setting.samples,
                    model_folder=recipe.model_folder,
                    dataset=recipe.dataset,
                )
                ranks = Ranks(plan.degrees.world_size)
                ranks.begin(case)
                first_costs = costs
                ranks.run("in_order", rows)  # Warms up.
            for policy in POLICIES:
                timed = ranks.run(policy, rows)
                results.setdefault(policy, []).append(timed)
                batch = setting.samples.take(np.array(rows))
                assignment = assignment_of(plan, first_costs.batch_costs(batch, plan), policy)
                now = costs.batch_costs(batch, plan)
                timeline = simulate(now, assignment, plan.pipeline_shape, schedule=plan.schedule)
                simulated.setdefault(policy, []).append(float(timeline.pipeline_seconds))
                computed = sum(sum(rank.values()) for rank in timed.action_seconds)
                speeds.setdefault(policy, []).append(computed / float(timeline.busy_seconds.sum()))
                alone.setdefault(policy, []).append(unloaded(plan, now, assignment, timed))
    finally:
        if ranks is not None:
            ranks.__exit__()
    print(
        f"(a) real compute: {recipe.model_folder}, {plan.degrees.world_size} processes of one thread, {plan.schedule}, "
        f"{setting.batch_size} samples in {plan.num_microbatches} microbatches, {len(results['auto'])} rounds; "
        f"load {before} to {load()}"
    )
    print_sides(results, baseline="in_order", simulated=simulated, speeds=speeds)
    print_processor(results, alone, baseline="in_order", simulated=simulated)
    losses = {policy: rounds[0].loss for policy, rounds in results.items()}
    print(f"loss of the first batch: {losses}")


def emulated(arguments):
    """(b) The same comparison on eight emulated ranks, on real traces: under the schedule that others run, and under
    ours."""
    sides = {policy: (policy, arguments.schedule) for policy in POLICIES}
    sides |= {f"auto, {ours}": ("auto", ours) for ours in OURS if ours != arguments.schedule}
    model = ModelSpec.from_pretrained(MODELS_FOLDER / "qwen2_5-vit-llama3_2-3b")
    cluster = ClusterSpec(device=arguments.device, devices_per_node=8)
    options = PlanOptions(
        cost_model="analytic", device=arguments.device, precision="bf16-mixed", data_degree=1, pipeline_degree=8,
        num_microbatches=arguments.microbatches, schedule=arguments.schedule, policy="auto", recompute="search",
    )  # fmt: skip
    gains = {side: [] for side in sides}
    everything = []
    with Ranks(8) as ranks:
        for name, table in read_tables(Path(arguments.traces)).items():
            if arguments.only and name not in arguments.only.split(","):
                continue
            # One tower takes all media, as in the assigner's benchmark.
            table = replace(table, media_kind=np.zeros_like(table.media_kind))
            costs = CostModel(model, cluster, precision="bf16-mixed")
            plan = solve_plan(
                model, table, cluster, global_batch_size=arguments.batch_size, options=options, costs=costs
            )
            scale = arguments.scale or SLOWER * scale_for(plan, costs, table)
            rng = np.random.default_rng(arguments.seed)
            results, simulated, failures, before = {}, {}, {}, load()
            ranks.begin(Case(plan=plan, costs=costs, samples=table, scale=scale))
            for _ in range(arguments.rounds):
                rows = tuple(rng.choice(len(table), arguments.batch_size, replace=False).tolist())
                batch_costs = costs.batch_costs(table.take(np.array(rows)), plan)
                for side, (policy, schedule) in sides.items():
                    if side in failures:
                        continue
                    mine = replace(plan, schedule=schedule)
                    assignment = assignment_of(mine, batch_costs, policy)
                    try:
                        seconds = scale * simulated_seconds(mine, batch_costs, assignment, with_step=True)
                    except ScheduleError as error:
                        failures[side] = str(error)  # Its microbatches do not fit in the plan's memory.
                        continue
                    simulated.setdefault(side, []).append(seconds)
                    results.setdefault(side, []).append(ranks.run(policy, rows, schedule))
            shape = plan.pipeline_shape
            print(
                f"(b) emulated: {name}, {shape.num_encoder_stages}+{shape.llm_stages} stages of {model.name} on "
                f"{arguments.device}, {plan.schedule}, {arguments.batch_size} samples in {plan.num_microbatches} "
                f"microbatches, {arguments.rounds} rounds, one predicted second takes {scale:.2f} s; "
                f"load {before} to {load()}"
            )
            whole = {side: rounds for side, rounds in results.items() if side not in failures}
            print_sides(whole, baseline="in_order", simulated=simulated)
            for side in sides:
                if side in failures:
                    print(f"{side} cannot run: {failures[side]}")
                    continue
                pairs = zip(results["in_order"], results[side], strict=True)
                gains[side].append(statistics.median(base.wall_seconds / mine.wall_seconds for base, mine in pairs))
                timed = zip(results[side], simulated[side], strict=True)
                everything += [mine.wall_seconds / seconds for mine, seconds in timed]
    print("geometric mean over traces of in_order's time over that of:")
    for side, values in gains.items():
        mean = float(np.exp(np.mean(np.log(values)))) if values else float("nan")
        print(f"  {side:<16} {mean:.3f} on {len(values)} traces")
    print(f"wall / simulated over all {len(everything)} iterations: {spread(everything)}")


def pipelining(arguments):
    """(c) Our pipeline against torch.distributed.pipelining, cut at the same layer."""
    from training_peers import PipeliningPeer

    against(arguments, PipeliningPeer, ("torch pipelining, padded",), {"pipeline_degree": 2, "data_degree": 1})


def replicas(arguments):
    """(d) Our two replicas against DistributedDataParallel: padded, grouped by length, and with our sampler."""
    from training_peers import DdpPeer

    against(arguments, DdpPeer, ("padding", "length grouping", "balanced"), {"pipeline_degree": 1, "data_degree": 2})


def against(arguments, peer, sides, degrees):
    """Our runtime and a peer on the same samples; the peer's first side is the baseline."""
    from training_peers import PeerCase

    from entrain_opt.runtime.measure import measure_costs

    recipe, setting = quickstart(arguments)
    measured = measure_costs(recipe.model_folder, num_processes_busy=recipe.devices_per_node)
    costs = CostModel(setting.model, setting.cluster, measured=measured)
    options = replace(recipe.options, num_microbatches=arguments.microbatches, **degrees)
    plan = setting.plan(options, costs)
    common = {
        "plan": plan,
        "costs": costs,
        "samples": setting.samples,
        "model_folder": recipe.model_folder,
        "dataset": recipe.dataset,
    }
    size = max(1, arguments.batch_size // plan.degrees.data // arguments.microbatches)
    results, alone, before = {}, {}, load()
    with Ranks(2) as ours, Ranks(2, peer) as theirs:
        ours.begin(Case(**common))
        theirs.begin(PeerCase(**common, microbatch_size=size))
        rounds = within_budget(setting.rounds(arguments.rounds + 1, arguments.seed), arguments)
        for number, rows in enumerate(rounds):
            batch_costs = costs.batch_costs(setting.samples.take(np.array(rows)), plan)
            for side in (*sides, "ours, in_order", "ours, auto"):
                policy = side.removeprefix("ours, ")
                timed = theirs.run(side, rows) if policy == side else ours.run(policy, rows)
                if not number:  # The first round warms up.
                    continue
                results.setdefault(side, []).append(timed)
                if policy != side:
                    assignment = assignment_of(plan, batch_costs, policy)
                    alone.setdefault(side, []).append(unloaded(plan, batch_costs, assignment, timed))
                elif plan.degrees.pipeline == 1:
                    slowest = max(timed.busy_seconds)
                    share = statistics.mean(timed.busy_seconds) / slowest
                    alone.setdefault(side, []).append((slowest, share))
    letter = "c" if plan.degrees.pipeline > 1 else "d"
    print(
        f"({letter}) real compute: {recipe.model_folder}, two processes of one thread, {arguments.batch_size} samples, "
        f"padded microbatches of {size}, {len(results[sides[0]])} rounds; load {before} to {load()}"
    )
    print_sides(results, baseline=sides[0])
    print_processor(results, alone, baseline=sides[0])
    print(f"loss of the first batch: { {side: round(rounds[0].loss, 6) for side, rounds in results.items()} }")


class Quickstart:
    """Model, data and rounds of the shipped recipe."""

    def __init__(self, recipe, batch_size):
        self.recipe, self.batch_size = recipe, batch_size
        self.model = ModelSpec.from_pretrained(recipe.model_folder, frozen=recipe.frozen)
        self.cluster = ClusterSpec(device="cpu", devices_per_node=recipe.devices_per_node)
        self.samples = load_index(
            recipe.dataset, recipe.model_folder, policy="error", cache_dir="runs/cache", progress=False
        )

    def plan(self, options, costs):
        return solve_plan(
            self.model, self.samples, self.cluster, global_batch_size=self.batch_size, options=options, costs=costs
        )

    def rounds(self, count, seed):
        rng = np.random.default_rng(seed)
        for _ in range(count):
            yield tuple(rng.choice(len(self.samples), self.batch_size, replace=False).tolist())


def quickstart(arguments):
    recipe = read_recipe(arguments.recipe)
    return recipe, Quickstart(recipe, arguments.batch_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function, batch_size, microbatches in (
        ("compute", compute, 16, 8),
        ("emulated", emulated, 128, 32),
        ("pipelining", pipelining, 16, 8),
        ("replicas", replicas, 8, 2),
    ):
        command = commands.add_parser(name, help=function.__doc__)
        command.add_argument("--rounds", type=int, default=3)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--batch-size", type=int, default=batch_size, help="samples of a global batch")
        command.add_argument("--microbatches", type=int, default=microbatches)
        command.add_argument("--budget-seconds", type=float, default=240.0, help="no new round begins beyond it")
        command.add_argument("--recipe", default="recipes/quickstart.yaml")
        command.set_defaults(run=function)
        if name == "emulated":
            command.add_argument("--traces", default=str(TRACES_FOLDER), help="folder of Parquet traces")
            command.add_argument("--only", help="names of traces, separated by commas")
            command.add_argument("--device", default="A40-48GB")
            command.add_argument("--schedule", default="1f1b", help="of all sides; auto runs under ours as well")
            command.add_argument(
                "--scale", type=float, help="wall seconds per predicted second (default: 30 ms actions)"
            )
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
