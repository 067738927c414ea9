"""How fast schedules are made and played through.

    python benchmarks/simulator_speed.py

Uneven synthetic work with one fifth of the samples deferred; three encoder and five language-model stages. Printed per
order: actions (forwards, backwards, reductions, steps), milliseconds of `simulate` with the name of the order (units of
work, order, replay, memory), of `simulate` with a schedule made before, of the bare replay, and the peak of Python
memory. Best of several runs, one core.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np

from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule import FIXED_ORDERS, replica_work, schedule_replica
from entrain_opt.schedule.replay import replay
from entrain_opt.simulator import simulate


def uneven_work(num_microbatches: int, *, limited: bool) -> tuple[BatchCosts, Assignment, PipelineShape]:
    """Four log-normal samples per microbatch."""
    rng = np.random.default_rng(0)
    count = 4 * num_microbatches
    encoder, llm = rng.lognormal(0, 1, count), rng.lognormal(0, 0.7, count)
    microbatch = np.repeat(np.arange(num_microbatches), 4)
    costs = BatchCosts(
        encoder_seconds=encoder,
        llm_seconds=llm,
        encoder_patches=(100 * encoder).astype(int) + 1,
        llm_tokens=(100 * llm).astype(int) + 1,
    )
    assignment = Assignment(
        replica=np.zeros(count, dtype=int),
        encoder_microbatch=microbatch,
        llm_microbatch=np.minimum(microbatch + (rng.random(count) < 0.2), num_microbatches - 1),
        num_microbatches=np.array([num_microbatches]),
    )
    limits = {"patches_in_flight": 12_000, "tokens_in_flight": 6_000} if limited else {}
    return costs, assignment, PipelineShape(encoder_stages=3, llm_stages=5, **limits)


def best_milliseconds(function: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[32, 500])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'microbatches':>12} {'memory':>9} {'order':>12} {'actions':>8} {'order+sim':>10} {'sim':>8} {'replay':>8} "
          f"{'us/action':>9} {'peak MiB':>8}")  # fmt: skip
    for num_microbatches in arguments.microbatches:
        for limited in (False, True):
            costs, assignment, shape = uneven_work(num_microbatches, limited=limited)
            work = replica_work(costs, assignment, shape, 0)
            for order in FIXED_ORDERS:
                made = schedule_replica(work, shape, order=order, costs=costs)
                named = best_milliseconds(
                    partial(simulate, costs, assignment, shape, schedule=order), arguments.repeats
                )
                given = best_milliseconds(partial(simulate, costs, assignment, shape, schedule=made), arguments.repeats)
                tracemalloc.start()
                timeline = simulate(costs, assignment, shape, schedule=made)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                run = timeline.runs[0]
                durations, transfer = run.seconds.operations(run.split), run.seconds.transfer
                bare = best_milliseconds(partial(replay, run.graph, run.orders, durations, transfer), arguments.repeats)
                actions = len(timeline.events)
                print(f"{num_microbatches:>12} {'limited' if limited else 'unlimited':>9} {order:>12} {actions:>8} "
                      f"{named:>7.1f} ms {given:>5.1f} ms {bare:>5.1f} ms {1e3 * named / actions:>9.1f} "
                      f"{peak / 2**20:>8.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
