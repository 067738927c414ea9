"""The planning problem as an integer linear program, through PuLP with HiGHS (or CBC).

The same variables, constraints and objective as `cp_sat.py`; what holds only for the chosen degrees is switched by a
big-M that is the largest value its left side can take, not more. Coefficients are ticks and MiB, variables are named by
indices only, and the answer is counted again by integer arithmetic, because such solvers work with tolerances.

Promise: the optimum; or, where the time limit comes first, the hint with the bound that needs no solver; or
SolverError. Price: seconds for 64 devices; CP-SAT is the default because it is faster here.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from entrain_opt.errors import SolverError
from entrain_opt.planner.cp_sat import promising_choices
from entrain_opt.planner.instance import Choice, Instance, PartTicks
from entrain_opt.planner.search import Ranked, lower_bound_ticks
from entrain_opt.planner.solution import Solution, checked


def solve_ilp(
    instance: Instance,
    *,
    incumbent: Ranked | None = None,
    time_limit_seconds: float = 20.0,
    seed: int = 0,
    solver: str = "any",
) -> Solution | None:
    """The optimum of an instance; arguments and answer as for `solve_cp_sat`, but the time limit is wall clock.

    Args:
        solver: `highs`, `cbc`, or `any` of them that can run.

    Raises:
        SolverError: the solver is not installed, or it stopped without an answer and there is no incumbent.
    """
    import pulp

    choices = promising_choices(instance, incumbent)
    counts = instance.num_layers
    num_modules, num_ranks = len(counts), max(choice.pipeline for choice in choices)
    problem = pulp.LpProblem("plan", pulp.LpMinimize)

    # Variables.
    chosen = [pulp.LpVariable(f"c{i}", cat="Binary") for i in range(len(choices))]
    places = [(m, r) for m in range(num_modules) for r in range(num_ranks)]
    held: dict[tuple[int, int], Any] = {
        (m, r): pulp.LpVariable(f"h{m}_{r}", 0, counts[m], cat="Integer") for m, r in places
    }
    started: dict[tuple[int, int], Any] = {(m, r): pulp.LpVariable(f"s{m}_{r}", cat="Binary") for m, r in places}
    done: dict[tuple[int, int], Any] = {(m, r): pulp.LpVariable(f"d{m}_{r}", cat="Binary") for m, r in places}
    for m in range(num_modules):
        held[m, -1] = started[m, -1] = done[m, -1] = 0
    slowest = pulp.LpVariable("slowest", 0)

    # Objective.
    problem += slowest + pulp.lpSum(choice.constant_ticks * chosen[i] for i, choice in enumerate(choices))

    # Constraints.
    problem += pulp.lpSum(chosen) == 1
    for m, r in places:
        problem += held[m, r] >= held[m, r - 1]
        problem += held[m, r] >= started[m, r]
        problem += held[m, r] <= counts[m] * started[m, r]
        problem += held[m, r] >= counts[m] * done[m, r]
        problem += held[m, r] <= counts[m] - 1 + done[m, r]
        if m:
            problem += started[m, r] <= done[m - 1, r]
    for pipeline in sorted({choice.pipeline for choice in choices}):
        active = pulp.lpSum(chosen[i] for i, choice in enumerate(choices) if choice.pipeline == pipeline)
        for m in range(num_modules):
            problem += held[m, pipeline - 1] >= counts[m] * active
        for r in range(pipeline):
            problem += pulp.lpSum(held[m, r] - held[m, r - 1] for m in range(num_modules)) >= active

    for i, choice in enumerate(choices):
        if not choice.shares:
            for m in range(1, num_modules):
                for r in range(choice.pipeline):
                    problem += started[m, r] <= done[m - 1, r - 1] + 1 - chosen[i]
        for m, last in enumerate(np.cumsum(choice.ranks)[:-1].tolist(), start=1):
            problem += done[m - 1, last - 1] >= chosen[i]
            problem += started[m, last - 1] <= 1 - chosen[i]

    def on_rank(part: PartTicks, r: int) -> Any:
        return pulp.lpSum(
            part.layer[m] * (held[m, r] - held[m, r - 1])
            + part.first[m] * (started[m, r] - started[m, r - 1])
            + part.last[m] * (done[m, r] - done[m, r - 1])
            + part.stage[m] * (started[m, r] - done[m, r - 1])
            for m in range(num_modules)
        )

    def at_most(part: PartTicks) -> int:
        return sum(
            count * layer + first + last + stage
            for count, layer, first, last, stage in zip(
                counts, part.layer, part.first, part.last, part.stage, strict=True
            )
        )

    for i, choice in enumerate(choices):
        for r in range(choice.pipeline):
            problem += slowest >= on_rank(choice.ticks, r) - at_most(choice.ticks) * (1 - chosen[i])
            excess = max(at_most(choice.mib[r]) - instance.limit_mib, 0)
            if excess:
                problem += on_rank(choice.mib[r], r) <= instance.limit_mib + excess * (1 - chosen[i])

    # Solve.
    with _output_to_stderr():
        status = pulp.LpStatus[problem.solve(_solver(pulp, solver, time_limit_seconds, seed))]
    # A solver that stops at its time limit reports Optimal as well; only the status of the solution tells.
    proved = problem.sol_status == pulp.LpSolutionOptimal
    if status == "Infeasible" and incumbent is None:
        return None
    bound = min(lower_bound_ticks(instance, choice) for choice in choices)
    found = incumbent
    if proved:
        found = _read(instance, choices, chosen, held)
        if abs(found.ticks - pulp.value(problem.objective)) > 0.5:
            raise SolverError(f"ILP: answered {pulp.value(problem.objective)} ticks, counted {found.ticks}.")
        if incumbent is not None and found.ticks > incumbent.ticks:
            raise SolverError(f"ILP: {found.ticks} ticks called optimal, but {incumbent.ticks} are known.")
        if incumbent is not None and found.ticks == incumbent.ticks:
            found = incumbent  # Whose layers are the most even.
    if found is None:
        raise SolverError(
            f"ILP: no proved plan in {time_limit_seconds} s ({status}). Allow more time (time_limit_seconds) or use "
            "method cp-sat."
        )
    solution = Solution(
        choice=found.choice,
        ends=found.ends,
        ticks=found.ticks,
        bound_ticks=found.ticks if proved else min(bound, found.ticks),  # Unproved values of a solver are not used.
        status="optimal" if proved or bound >= found.ticks else "feasible",
    )
    return checked(instance, solution, "ILP")


def _read(instance: Instance, choices: list[Choice], chosen: list[Any], held: dict[tuple[int, int], Any]) -> Ranked:
    """The answer in whole numbers."""
    choice = max(zip(choices, chosen, strict=True), key=lambda pair: pair[1].value())[0]
    ends = tuple(
        sum(round(held[m, r].value()) for m in range(len(instance.num_layers))) for r in range(choice.pipeline)
    )
    return Ranked(choice=choice, ends=ends, ticks=instance.objective_ticks(choice, ends))


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """HiGHS greets on standard output whatever one asks for; that belongs to what the user asked to print there."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # C's own buffer, or the greeting would come later.
        os.dup2(saved, 1)
        os.close(saved)


def _solver(pulp: Any, name: str, time_limit_seconds: float, seed: int) -> Any:
    """HiGHS, else CBC, or the one asked for; one thread and no gap, so that the same problem gives the same answer."""
    highs = pulp.HiGHS(
        msg=False,
        timeLimit=time_limit_seconds,
        threads=1,
        gapRel=0.0,
        gapAbs=0.5,
        random_seed=seed,
    )
    if name in ("any", "highs") and highs.available():
        return highs
    cbc = pulp.PULP_CBC_CMD(msg=False, timeLimit=time_limit_seconds, threads=1, gapRel=0.0)
    if name in ("any", "cbc") and cbc.available():
        return cbc
    missing = {"highs": "HiGHS cannot", "cbc": "CBC cannot"}.get(name, "neither HiGHS nor CBC can")
    raise SolverError(
        f"ILP: {missing} run here. Install HiGHS (`pip install highspy`) and use method ilp, or use method cp-sat."
    )
