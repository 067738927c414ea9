"""What a solver answers, checked: one choice, one partition of the layers, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_opt.errors import SolverError
from entrain_opt.planner.instance import Choice, Instance


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """A feasible answer to an `Instance`.

    Attributes:
        choice: one of the instance's.
        ends: rank r holds chain layers ends[r - 1] to ends[r] - 1.
        ticks: its objective.
        bound_ticks: no answer has fewer.
        status: `optimal` or `feasible`.
    """

    choice: Choice
    ends: tuple[int, ...]
    ticks: int
    bound_ticks: int
    status: str = "optimal"

    @property
    def gap(self) -> float:
        """How much better an answer could be at most, as a share."""
        return (self.ticks - self.bound_ticks) / self.ticks if self.ticks else 0.0


def checked(instance: Instance, solution: Solution, solver: str) -> Solution:
    """The solution, after counting its objective and memory again.

    Raises:
        SolverError: what the solver said does not hold.
    """
    ends, choice = solution.ends, solution.choice
    in_order = all(a < b for a, b in zip((0, *ends), ends, strict=False))
    if len(ends) != choice.pipeline or not in_order or ends[-1] != instance.chain_length:
        raise SolverError(f"{solver}: expected {choice.pipeline} ranks with layers each, found cuts at {ends}.")
    ticks = instance.objective_ticks(choice, ends)
    if ticks != solution.ticks or solution.bound_ticks > ticks:
        raise SolverError(f"{solver}: answered {solution.ticks} ticks (bound {solution.bound_ticks}), counted {ticks}.")
    if max(instance.memory_mib(choice, ends)) > instance.limit_mib:
        raise SolverError(f"{solver}: expected at most {instance.limit_mib} MiB a rank, found more.")
    return solution
