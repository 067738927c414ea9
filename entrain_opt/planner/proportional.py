"""The paper's planner (Entrain, arXiv 2605.27918, Algorithms 1 and 2), kept to compare with.

Pipeline ranks are split over the modules in proportion to their work in the population, rounded to whole ranks of at
least one; each module's layers are partitioned by the dynamic program F(l, p); among the data degrees the one with
the best DP * K / T wins, T = sum of all stages + (K - 1) * slowest stage. K follows from microbatches of four samples,
as in the paper's evaluation, unless it is given. Where there are fewer ranks than modules, modules share them.

`allocate_ranks` is also the test of Algorithm 1 (`stability.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from entrain_opt.planner.demand import Demand
from entrain_opt.planner.instance import Instance
from entrain_opt.planner.search import Ranked, best_partition, lower_bound_ticks
from entrain_opt.planner.solution import Solution, checked


def module_work(demand: Demand, num_layers: Sequence[int]) -> list[float]:
    """Forward plus backward seconds that a mean global batch spends in each module."""
    return [
        count * load.layer.total + load.input.total + load.output.total
        for load, count in zip(demand.modules, num_layers, strict=True)
    ]


def allocate_ranks(work: Sequence[float], num_ranks: int, num_layers: Sequence[int]) -> tuple[int, ...]:
    """Whole ranks per module in proportion to work: largest remainders, at least one and at most one per layer.

    Args:
        work: of each module.
        num_ranks: at least as many as modules, at most as many as layers.
        num_layers: of each module.
    """
    shares = np.asarray(work, dtype=np.float64)
    shares = num_ranks * shares / shares.sum() if shares.sum() > 0 else np.full(len(work), num_ranks / len(work))
    limits = np.asarray(num_layers)
    ranks = np.clip(np.floor(shares).astype(np.int64), 1, limits)
    while ranks.sum() != num_ranks:
        step = 1 if ranks.sum() < num_ranks else -1
        allowed = ranks < limits if step > 0 else ranks > 1
        missing = np.where(allowed, step * (shares - ranks), -np.inf)
        ranks[int(missing.argmax())] += step
    return tuple(int(count) for count in ranks)


def solve_proportional(instance: Instance, demand: Demand) -> Solution | None:
    """The paper's configuration; None if none fits in memory."""
    work, best = module_work(demand, instance.num_layers), None
    bounds = [lower_bound_ticks(instance, choice) for choice in instance.choices]
    for index in np.argsort(bounds, kind="stable").tolist():
        choice = instance.choices[index]
        if best is not None and bounds[index] >= best.ticks:
            break
        ends = {}
        if choice.ranks:
            widths = choice.widths(len(instance.modules))
            devices = [width * ranks for width, ranks in zip(widths, choice.ranks, strict=True)]
            most = [width * layers for width, layers in zip(widths, instance.num_layers, strict=True)]
            if tuple(devices) != allocate_ranks(work, sum(devices), most):
                continue
        elif choice.pipeline >= len(instance.modules):
            ranks = allocate_ranks(work, choice.pipeline, instance.num_layers)
            borders = np.cumsum(instance.num_layers)
            ends = {int(last) - 1: int(end) for last, end in zip(np.cumsum(ranks), borders, strict=True)}
        found = best_partition(instance, choice, fixed_ends=ends)
        if found is not None and (best is None or found.ticks < best.ticks):
            best = found
    return None if best is None else _solution(instance, best)


def _solution(instance: Instance, best: Ranked) -> Solution:
    solution = Solution(
        choice=best.choice, ends=best.ends, ticks=best.ticks, bound_ticks=best.choice.constant_ticks, status="feasible"
    )
    return checked(instance, solution, "proportional")
