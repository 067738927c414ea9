"""What a user may ask of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from entrain_opt.cost.precision import precisions
from entrain_opt.errors import PlanError
from entrain_opt.plan.shares import DATA_PARALLELS
from entrain_opt.spec.cluster import ClusterSpec, DeviceSpec, find_cluster_device

METHODS = ("cp-sat", "ilp", "ilp-highs", "ilp-cbc", "search", "proportional")
RECOMPUTES = ("never", "search", "always")
#: Of `data_parallel`: summing all, and sharding where memory asks for it.
SEARCH = "search"
DATA_PARALLEL_CHOICES = (*DATA_PARALLELS, SEARCH)
#: Of `schedule`: the planner's choice.
AUTO = "auto"
COST_MODELS = ("measured", "analytic")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Choices that are not the model, the data or the cluster.

    Attributes:
        method: `cp-sat`, `ilp` (the same optimum through PuLP with HiGHS, else CBC; `ilp-highs` and `ilp-cbc` name the
            solver), `search` (dynamic programming over every choice) or `proportional` (the paper's Algorithm 2).
        policy: of the assigner that will run the plan.
        schedule: order that will run the plan; `auto` is `eager_split` where that is faster than `eager`, with what
            splitting a backward costs.
        cost_model: `measured` or `analytic`.
        data_degree, pipeline_degree, num_microbatches: fixed by the user; None is searched.
        tensor_degrees: devices that may share a module's layers; the default is 1 only.
        context_degrees: devices, or groups of them, that a module's samples may be divided over; the default is 1 only,
            because the runtime executes no other: for planning and comparing.
        recompute: `never`, `search` (per module, where memory asks for it) or `always`.
        data_parallel: whether replicas share out the optimizer's state: `all_reduce` (no), `sharded`, or `search`
            (where memory asks for it, or a better plan does).
        device: a name from `ClusterSpec.devices()`, or that of `custom_device`.
        custom_device: a device that is not in the catalogue.
        memory_bytes: what one rank may use; None takes the device's memory less a reserve.
        precision: Lightning's name of it.
        time_limit_seconds: of the solver, in its deterministic time, which is close to seconds on one core.
        seed: of the solver and of the global batches drawn.
        solver_workers: threads of CP-SAT; the answer does not depend on it.
    """

    method: str = "cp-sat"
    policy: str = "auto"
    schedule: str = AUTO
    cost_model: str = "measured"
    data_degree: int | None = None
    pipeline_degree: int | None = None
    num_microbatches: int | None = None
    tensor_degrees: tuple[int, ...] = (1,)
    context_degrees: tuple[int, ...] = (1,)
    recompute: str = "never"
    data_parallel: str = SEARCH
    device: str = "cpu"
    custom_device: DeviceSpec | None = None
    memory_bytes: int | None = None
    precision: str = "32-true"
    time_limit_seconds: float = 20.0
    seed: int = 0
    solver_workers: int = 1

    def check(self) -> None:
        """Raise PlanError naming the option, its value and what was expected."""
        from entrain_opt.assigner import POLICIES
        from entrain_opt.schedule.orders import ORDERS

        allowed = {
            "method": METHODS,
            "policy": tuple(POLICIES),
            "schedule": (AUTO, *ORDERS),
            "cost_model": COST_MODELS,
            "recompute": RECOMPUTES,
            "data_parallel": DATA_PARALLEL_CHOICES,
            "device": tuple(ClusterSpec.devices()) if self.custom_device is None else (self.custom_device.name,),
            "precision": tuple(precisions()),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise PlanError(f"{name}: expected one of {sorted(values)}, found {getattr(self, name)!r}.")
        for name in ("tensor_degrees", "context_degrees"):
            degrees = getattr(self, name)
            whole = all(isinstance(value, int) and not isinstance(value, bool) and value >= 1 for value in degrees)
            if not isinstance(degrees, tuple) or not degrees or not whole or len(set(degrees)) < len(degrees):
                raise PlanError(f"{name}: expected different whole numbers of at least 1, found {degrees!r}.")
        if self.solver_workers not in (1, 2):
            raise PlanError(f"solver_workers: expected 1 or 2, found {self.solver_workers!r}.")
        for name in ("data_degree", "pipeline_degree", "num_microbatches", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise PlanError(f"{name}: expected a whole number of at least 1, or none, found {value!r}.")
        if not self.time_limit_seconds > 0:
            raise PlanError(f"time_limit_seconds: expected more than 0, found {self.time_limit_seconds!r}.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise PlanError(f"seed: expected a whole number from 0 to 2^31 - 1, found {self.seed!r}.")

    def cluster(self, num_nodes: int, devices_per_node: int) -> ClusterSpec:
        """So many of the device asked for."""
        return ClusterSpec(
            device=self.device,
            num_nodes=num_nodes,
            devices_per_node=devices_per_node,
            memory_bytes=self.memory_bytes,
            custom_device=self.custom_device,
        )


def device_options(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """Options that name a device: of the catalogue, of a cluster file (`.yaml`), or described in place.

    A cluster file's numbers of nodes and devices are not used here: a run has its own.

    Raises:
        RuntimeConfigError: it is none of these.
    """
    name, custom, cluster = find_cluster_device(value)
    found: dict[str, Any] = {"device": name, "custom_device": custom}
    if cluster is not None and cluster.memory_bytes is not None:
        found["memory_bytes"] = cluster.memory_bytes
    return found
