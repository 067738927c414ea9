"""What a user may ask of the planner."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_opt.cost.precision import precisions
from entrain_opt.errors import PlanError

METHODS = ("cp-sat", "ilp", "search", "proportional")
COST_MODELS = ("measured", "analytic")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Choices that are not the model, the data or the cluster.

    Attributes:
        method: `cp-sat`, `ilp` (the same optimum through PuLP), `search` (dynamic programming over every choice) or
            `proportional` (the paper's Algorithm 2).
        policy: of the assigner that will run the plan.
        schedule: order that will run the plan.
        cost_model: `measured` or `analytic`.
        data_degree, pipeline_degree, num_microbatches: fixed by the user; None is searched.
        device: a name from `ClusterSpec.devices()`.
        memory_bytes: what one rank may use; None takes the device's memory less a reserve.
        precision: Lightning's name of it.
        time_limit_seconds: of the solver, in its deterministic time, which is close to seconds on one core.
        seed: of the solver and of the global batches drawn.
    """

    method: str = "cp-sat"
    policy: str = "pairwise"
    schedule: str = "1f1b"
    cost_model: str = "measured"
    data_degree: int | None = None
    pipeline_degree: int | None = None
    num_microbatches: int | None = None
    device: str = "cpu"
    memory_bytes: int | None = None
    precision: str = "32-true"
    time_limit_seconds: float = 20.0
    seed: int = 0

    def check(self) -> None:
        """Raise PlanError naming the option, its value and what was expected."""
        from entrain_opt.assigner import POLICIES
        from entrain_opt.schedule.orders import ORDERS
        from entrain_opt.spec.cluster import ClusterSpec

        allowed = {
            "method": METHODS,
            "policy": tuple(POLICIES),
            "schedule": ORDERS,
            "cost_model": COST_MODELS,
            "device": tuple(ClusterSpec.devices()),
            "precision": tuple(precisions()),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise PlanError(f"{name}: expected one of {sorted(values)}, found {getattr(self, name)!r}.")
        for name in ("data_degree", "pipeline_degree", "num_microbatches", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise PlanError(f"{name}: expected a whole number of at least 1, or none, found {value!r}.")
        if not self.time_limit_seconds > 0:
            raise PlanError(f"time_limit_seconds: expected more than 0, found {self.time_limit_seconds!r}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise PlanError(f"seed: expected a whole number from 0 to 2^31 - 1, found {self.seed!r}.")
