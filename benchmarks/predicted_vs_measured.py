"""Predicted against measured step time: the quick-start model on two real processes.

    python benchmarks/predicted_vs_measured.py [--recipe recipes/quickstart.yaml] [--steps 12] [--repeats 3]

Measures the costs of the model now (nothing is cached), runs global batches of the recipe's data through the real
executor on two gloo processes, and simulates each with the same assignment and schedule. The measured time of a step is
the least of its repeats, because other programs can only add to it. Prints the error of every step and the median.
"""

import argparse
import os
import socket
import statistics
import time

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


def run_rank(rank, port, recipe, plan, costs, samples, batches, repeats, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=plan.degrees.world_size)
    groups = make_groups(plan, tied_stages=tied_stages(recipe.model_folder, plan))
    model = build_rank_model(recipe.model_folder, plan, groups.pipeline_rank, seed=0)
    executor = PipelineExecutor(model, groups, GradientReducer(model, groups))
    builder = RankBatchBuilder(
        samples=samples,
        reader=ChatReader.open(recipe.dataset, samples, recipe.model_folder),
        plan=plan,
        cost_model=costs,
        replica=groups.replica,
        pipeline_rank=groups.pipeline_rank,
    )
    seconds = []
    for rows in [batches[0], *batches]:  # The first one warms up.
        batch, times = builder.build(rows), []
        for _ in range(repeats):
            for parameter in model.parameters():
                parameter.grad = None
            dist.barrier()
            started = time.perf_counter()
            executor.run(batch, training=True)
            dist.barrier()
            times.append(time.perf_counter() - started)
        seconds.append(min(times))
    if rank == 0:
        results.put(seconds[1:])
    dist.destroy_process_group()


def measured_seconds(recipe, plan, costs, samples, batches, repeats):
    context = mp.get_context("spawn")
    results = context.Queue()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    arguments = (port, recipe, plan, costs, samples, batches, repeats, results)
    processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(plan.degrees.world_size)]
    for process in processes:
        process.start()
    seconds = results.get()
    for process in processes:
        process.join()
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schedule", help="another order than the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    recipe = read_recipe(arguments.recipe)
    model = ModelSpec.from_pretrained(recipe.model_folder, frozen=recipe.frozen)
    cluster = ClusterSpec(device="cpu", devices_per_node=recipe.devices_per_node)
    samples = load_index(recipe.dataset, recipe.model_folder, policy="error", cache_dir="runs/cache", progress=False)
    rng = np.random.default_rng(arguments.seed)
    batches = [rng.choice(len(samples), recipe.global_batch_size, replace=False) for _ in range(arguments.steps)]
    measured = measure_costs(recipe.model_folder, frozen=recipe.frozen, num_processes_busy=recipe.devices_per_node)
    costs = CostModel(model, cluster, measured=measured)
    print(f"costs measured in {measured.seconds_spent:.0f} s, {measured.num_processes_busy} processes busy")
    plan = solve_plan(
        model, samples, cluster, global_batch_size=recipe.global_batch_size, options=recipe.options, costs=costs
    )
    schedule = arguments.schedule or plan.schedule
    if arguments.schedule:
        from dataclasses import replace

        plan = replace(plan, schedule=arguments.schedule)
    predicted = []
    for rows in batches:
        batch = costs.batch_costs(samples.take(rows), plan)
        assignment = assign_microbatches(
            batch,
            plan.pipeline_shape,
            num_replicas=plan.degrees.data,
            num_microbatches=plan.num_microbatches,
            policy=plan.policy,
        )
        predicted.append(simulate(batch, assignment, plan.pipeline_shape, schedule=schedule).pipeline_seconds)
    found = measured_seconds(recipe, plan, costs, samples, batches, arguments.repeats)
    print(f"{'step':>4} {'predicted s':>12} {'measured s':>11} {'error':>7}")
    errors = []
    for step, (expected, real) in enumerate(zip(predicted, found, strict=True)):
        errors.append((float(expected) - real) / real)
        print(f"{step:>4} {float(expected):>12.3f} {real:>11.3f} {errors[-1]:>+7.1%}")
    print(
        f"schedule {schedule}: median absolute error {statistics.median(map(abs, errors)):.1%}, "
        f"median error {statistics.median(errors):+.1%}"
    )


if __name__ == "__main__":
    main()
