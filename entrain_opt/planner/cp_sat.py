"""The planning problem as one CP-SAT model.

Variables: which choice (data degree, pipeline degree, microbatches), and per module and rank how many of the module's
layers lie on ranks up to this one. A rank may hold the end of one module and the beginning of the next, where the
choice lets them share one; with one rank they always do. Constraints: every rank of the chosen pipeline holds a
layer, a module starts where the one before is complete, and no rank exceeds its memory. Objective: the predicted ticks
of `estimates.py`.

The dynamic program's answer goes in as a hint and as an upper bound, and choices whose lower bound is not below it are
left out, so that mostly the proof is left to do. Promise: the optimum with status `optimal` and gap 0, or an answer not
worse than the hint with the bound that was proved. Deterministic: one worker, a seed and a limit in deterministic time.
Price: well under a second for 64 devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from entrain_opt.errors import SolverError
from entrain_opt.planner.instance import Choice, Instance, PartTicks
from entrain_opt.planner.search import Ranked, lower_bound_ticks
from entrain_opt.planner.solution import Solution, checked


def promising_choices(instance: Instance, incumbent: Ranked | None) -> list[Choice]:
    """The choices that could beat the incumbent, and its own."""
    if incumbent is None:
        return list(instance.choices)
    return [
        choice
        for choice in instance.choices
        if choice is incumbent.choice or lower_bound_ticks(instance, choice) < incumbent.ticks
    ]


def solve_cp_sat(
    instance: Instance,
    *,
    incumbent: Ranked | None = None,
    time_limit_seconds: float = 20.0,
    seed: int = 0,
    workers: int = 1,
) -> Solution | None:
    """The optimum of an instance.

    Args:
        instance: the problem.
        incumbent: a feasible answer to start from.
        time_limit_seconds: deterministic time, close to seconds on one core.
        seed: of the solver.
        workers: threads; they take turns deterministically.

    Returns:
        None if nothing fits in memory.

    Raises:
        SolverError: the solver stopped without an answer.
    """
    from ortools.sat.python import cp_model

    choices = promising_choices(instance, incumbent)
    counts = instance.num_layers
    num_modules, num_ranks = len(counts), max(choice.pipeline for choice in choices)
    model = cp_model.CpModel()

    # Variables.
    chosen = [model.new_bool_var(f"choice{i}") for i in range(len(choices))]
    places = [(m, r) for m in range(num_modules) for r in range(num_ranks)]
    held = {(m, r): model.new_int_var(0, counts[m], f"held{m}_{r}") for m, r in places}
    started = {(m, r): model.new_bool_var(f"started{m}_{r}") for m, r in places}
    done = {(m, r): model.new_bool_var(f"done{m}_{r}") for m, r in places}
    for m in range(num_modules):
        held[m, -1] = started[m, -1] = done[m, -1] = 0

    # Constraints.
    model.add_exactly_one(chosen)
    for m, r in places:
        model.add(held[m, r] >= held[m, r - 1])
        model.add(held[m, r] >= started[m, r])
        model.add(held[m, r] <= counts[m] * started[m, r])
        model.add(held[m, r] >= counts[m] * done[m, r])
        model.add(held[m, r] <= counts[m] - 1 + done[m, r])
        if m:
            model.add_implication(started[m, r], done[m - 1, r])
    for pipeline in sorted({choice.pipeline for choice in choices}):
        active = sum(chosen[i] for i, choice in enumerate(choices) if choice.pipeline == pipeline)
        for m in range(num_modules):
            model.add(held[m, pipeline - 1] >= counts[m] * active)
        for r in range(pipeline):
            model.add(sum(held[m, r] - held[m, r - 1] for m in range(num_modules)) >= active)

    for i, choice in enumerate(choices):
        if not choice.shares:
            for m in range(1, num_modules):
                for r in range(choice.pipeline):
                    model.add(started[m, r] <= done[m - 1, r - 1]).only_enforce_if(chosen[i])
        for m, last in enumerate(np.cumsum(choice.ranks)[:-1].tolist(), start=1):
            model.add(done[m - 1, last - 1] == 1).only_enforce_if(chosen[i])
            model.add(started[m, last - 1] == 0).only_enforce_if(chosen[i])

    def on_rank(part: PartTicks, r: int) -> Any:
        return sum(
            part.layer[m] * (held[m, r] - held[m, r - 1])
            + part.first[m] * (started[m, r] - started[m, r - 1])
            + part.last[m] * (done[m, r] - done[m, r - 1])
            + part.stage[m] * (started[m, r] - done[m, r - 1])
            for m in range(num_modules)
        )

    # Objective.
    largest = max(lower_bound_ticks(instance, choice) * choice.pipeline for choice in choices)
    slowest = model.new_int_var(0, largest, "slowest")
    for i, choice in enumerate(choices):
        for r in range(choice.pipeline):
            model.add(slowest >= on_rank(choice.ticks, r)).only_enforce_if(chosen[i])
            model.add(on_rank(choice.mib[r], r) <= instance.limit_mib).only_enforce_if(chosen[i])
    objective = slowest + sum(choice.constant_ticks * chosen[i] for i, choice in enumerate(choices))
    if incumbent is not None:
        model.add(objective <= incumbent.ticks)
        for i, choice in enumerate(choices):
            model.add_hint(chosen[i], choice is incumbent.choice)
        for m, start in enumerate(instance.module_starts):
            for r in range(num_ranks):
                end = incumbent.ends[min(r, len(incumbent.ends) - 1)]
                before = min(max(end - start, 0), counts[m])
                model.add_hint(held[m, r], before)
                model.add_hint(started[m, r], before > 0)
                model.add_hint(done[m, r], before == counts[m])
        model.add_hint(slowest, incumbent.ticks - incumbent.choice.constant_ticks)
    model.minimize(objective)

    # Solve.
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.interleave_search = workers > 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = time_limit_seconds
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE and incumbent is None:
        return None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        if incumbent is not None and status == cp_model.UNKNOWN:
            return _incumbent(instance, incumbent, choices)
        raise SolverError(f"CP-SAT found no plan in {time_limit_seconds} s ({solver.status_name(status)}).")

    # Read back.
    if incumbent is not None and solver.objective_value >= incumbent.ticks - 0.5:
        # As fast as the hint: the hint, whose layers are the most even, so that ties do not depend on the search.
        bound = incumbent.ticks if status == cp_model.OPTIMAL else int(solver.best_objective_bound)
        return _incumbent(instance, incumbent, choices, bound)
    choice = next(choice for i, choice in enumerate(choices) if solver.boolean_value(chosen[i]))
    ends = tuple(sum(int(solver.value(held[m, r])) for m in range(num_modules)) for r in range(choice.pipeline))
    ticks = instance.objective_ticks(choice, ends)
    solution = Solution(
        choice=choice,
        ends=ends,
        ticks=ticks,
        bound_ticks=ticks if status == cp_model.OPTIMAL else min(int(solver.best_objective_bound), ticks),
        status="optimal" if status == cp_model.OPTIMAL else "feasible",
    )
    return checked(instance, solution, "CP-SAT")


def _incumbent(instance: Instance, incumbent: Ranked, choices: list[Choice], bound_ticks: int = 0) -> Solution:
    """The hint itself, with the better of the solver's bound and the one that needs no solver."""
    bound = min(max(min(lower_bound_ticks(instance, choice) for choice in choices), bound_ticks), incumbent.ticks)
    solution = Solution(
        choice=incumbent.choice,
        ends=incumbent.ends,
        ticks=incumbent.ticks,
        bound_ticks=bound,
        status="optimal" if bound == incumbent.ticks else "feasible",
    )
    return checked(instance, solution, "CP-SAT")
