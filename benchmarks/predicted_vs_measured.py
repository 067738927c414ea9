"""Predicted against measured step time: the quick-start model on two real processes.

    python benchmarks/predicted_vs_measured.py [--recipe recipes/quickstart.yaml] [--steps 8] [--rounds 5]

A machine's speed drifts over minutes (shared hosts, clocks), so both sides take turns: every round measures the costs
of the model anew, predicts each global batch of the recipe's data with them (same assignment, same schedule), and runs
the same batches through the real executor on two gloo processes. Medians over the rounds are compared. Prints every
step, the median error, and how far the measured times of one step lie apart: no prediction can be nearer than the
machine is to itself.
"""

import argparse
import os
import socket
import statistics
import time
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from entrain_opt import simulate
from entrain_opt.assigner import assign_microbatches
from entrain_opt.cli.recipe import read_recipe
from entrain_opt.cost import CostModel
from entrain_opt.planner import solve_plan
from entrain_opt.runtime.batches import RankBatchBuilder
from entrain_opt.runtime.executor import PipelineExecutor
from entrain_opt.runtime.gradients import GradientReducer
from entrain_opt.runtime.measure import measure_costs
from entrain_opt.runtime.p2p import make_groups
from entrain_opt.runtime.reader import ChatReader
from entrain_opt.runtime.stages import build_rank_model, tied_stages
from entrain_opt.spec import ClusterSpec, ModelSpec
from entrain_opt.workload.index import load_index


def run_rank(rank, port, recipe, plan, costs, samples, batches, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=plan.degrees.world_size)
    groups = make_groups(plan, tied_stages=tied_stages(recipe.model_folder, plan))
    model = build_rank_model(recipe.model_folder, plan, groups.pipeline_rank, seed=0)
    executor = PipelineExecutor(model, groups, GradientReducer(model, groups))
    builder = RankBatchBuilder(
        samples=samples,
        reader=ChatReader.open(recipe.dataset, samples, recipe.model_folder),
        family=model.family,
        plan=plan,
        cost_model=costs,
        replica=groups.replica,
        pipeline_rank=groups.pipeline_rank,
    )
    seconds = []
    for rows in [batches[0], *batches]:  # The first one warms up.
        batch = builder.build(rows)
        for parameter in model.parameters():
            parameter.grad = None
        dist.barrier()
        started = time.perf_counter()
        executor.run(batch, training=True)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        results.put(seconds[1:])
    dist.destroy_process_group()


def measured_seconds(recipe, plan, costs, samples, batches):
    """Seconds of each batch on real processes."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    arguments = (port, recipe, plan, costs, samples, batches, results)
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(plan.degrees.world_size)]
    for process in processes:
        process.start()
    seconds = results.get()
    for process in processes:
        process.join()
    return seconds


def predicted_seconds(plan, costs, samples, batches):
    """Seconds of each batch in the simulator."""
    seconds = []
    for rows in batches:
        batch = costs.batch_costs(samples.take(rows), plan)
        assignment = assign_microbatches(
            batch,
            plan.pipeline_shape,
            num_replicas=plan.degrees.data,
            num_microbatches=plan.num_microbatches,
            policy=plan.policy,
        )
        timeline = simulate(batch, assignment, plan.pipeline_shape, schedule=plan.schedule)
        seconds.append(float(timeline.pipeline_seconds))
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schedule", help="another order than the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    recipe = read_recipe(arguments.recipe)
    model = ModelSpec.from_pretrained(recipe.model_folder, frozen=recipe.frozen)
    cluster = ClusterSpec(device="cpu", devices_per_node=recipe.devices_per_node)
    samples = load_index(recipe.dataset, recipe.model_folder, policy="error", cache_dir="runs/cache", progress=False)
    rng = np.random.default_rng(arguments.seed)
    batches = [rng.choice(len(samples), recipe.global_batch_size, replace=False) for _ in range(arguments.steps)]
    plan, predicted, measured = None, [], []
    for number in range(arguments.rounds):
        timed = measure_costs(recipe.model_folder, frozen=recipe.frozen, num_processes_busy=recipe.devices_per_node)
        costs = CostModel(model, cluster, measured=timed)
        if plan is None:
            plan = solve_plan(
                model, samples, cluster, global_batch_size=recipe.global_batch_size, options=recipe.options, costs=costs
            )
            plan = replace(plan, schedule=arguments.schedule or plan.schedule)
        predicted.append(predicted_seconds(plan, costs, samples, batches))
        measured.append(measured_seconds(recipe, plan, costs, samples, batches))
        ratio = statistics.median(p / m for p, m in zip(predicted[-1], measured[-1], strict=True))
        print(
            f"round {number}: costs measured in {timed.seconds_spent:.0f} s; predicted / measured {ratio:.2f}",
            flush=True,
        )
    print(f"{'step':>4} {'predicted s':>12} {'measured s':>11} {'error':>7} {'measured, least to most':>25}")
    errors, spreads = [], []
    for step in range(arguments.steps):
        expected = statistics.median(seconds[step] for seconds in predicted)
        real = sorted(seconds[step] for seconds in measured)
        middle = statistics.median(real)
        errors.append((expected - middle) / middle)
        spreads.append((real[-1] - real[0]) / middle)
        print(f"{step:>4} {expected:>12.3f} {middle:>11.3f} {errors[-1]:>+7.1%} {real[0]:>16.3f} {real[-1]:>8.3f}")
    print(
        f"schedule {plan.schedule}: median absolute error {statistics.median(map(abs, errors)):.1%}, "
        f"median error {statistics.median(errors):+.1%}; measured times of one step spread over "
        f"{statistics.median(spreads):.1%}"
    )


if __name__ == "__main__":
    main()
