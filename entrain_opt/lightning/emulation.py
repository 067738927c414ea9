"""Rehearsing a plan: which part of it runs, how much faster or slower, and on what costs.

A plan for many devices is rehearsed with all its pipeline ranks and as many of its replicas as there are processes for;
the global batch shrinks with the replicas, so each one has the work it would have. One process stands for all devices
that share a pipeline rank's layers (tensor parallelism). All costs, gradient reductions included, are the whole plan's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from entrain_opt.assignment import BatchCosts
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import ParallelDegrees, Plan
from entrain_opt.runtime.rank_work import CostSource
from entrain_opt.spec.model import ModelSpec
from entrain_opt.workload.samples import SampleTable

#: The stage with the shortest forwards has one of this many seconds on average, unless a scale is given.
SHORTEST_MEAN_SECONDS = 0.02
_SAMPLES_FOR_SCALE = 2000


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """Wait instead of computing: see `entrain_opt.runtime.emulation`.

    Attributes:
        num_nodes, devices_per_node: the machines that the plan is for; None takes the trainer's.
        replicas: how many of the plan's replicas run; None for all.
        scale: wall seconds per predicted second; None makes the forwards of the fastest stage 20 ms long on average.
    """

    num_nodes: int | None = None
    devices_per_node: int | None = None
    replicas: int | None = None
    scale: float | None = None

    def check(self) -> None:
        """Raise RuntimeConfigError naming a value that cannot be."""
        for name in ("num_nodes", "devices_per_node", "replicas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RuntimeConfigError(f"emulate.{name}: expected at least 1, found {value}.")
        if self.scale is not None and not 0 < self.scale < float("inf"):
            raise RuntimeConfigError(f"emulate.scale: expected a number above 0, found {self.scale}.")


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What an emulated run executes.

    Attributes:
        plan: the part of the whole plan that runs.
        costs: predicted costs of that part.
        scale: wall seconds per predicted second.
    """

    plan: Plan
    costs: CostSource
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WholePlanCosts:
    """Costs of a part of a plan, with the gradient reductions of the whole."""

    costs: CostSource
    whole: Plan

    @property
    def model(self) -> ModelSpec:
        return self.costs.model

    def batch_costs(self, samples: SampleTable, plan: Plan) -> BatchCosts:
        # A plan with more replicas than samples would be refused: its batch belongs to its degrees.
        whole = replace(plan, degrees=self.whole.degrees, global_batch_size=self.whole.global_batch_size)
        return self.costs.batch_costs(samples, whole)


def rehearse(emulation: Emulation, plan: Plan, costs: CostSource, samples: SampleTable) -> Rehearsal:
    """The part of a plan that runs, and how fast.

    Raises:
        RuntimeConfigError: more replicas than the plan has.
    """
    emulation.check()
    replicas = emulation.replicas or plan.degrees.data
    if replicas > plan.degrees.data:
        raise RuntimeConfigError(f"emulate.replicas: the plan has {plan.degrees.data} replicas, found {replicas}.")
    part = replace(
        plan,
        degrees=ParallelDegrees(data=replicas, pipeline=plan.degrees.pipeline),
        global_batch_size=max(1, plan.global_batch_size * replicas // plan.degrees.data),
    )
    whole = WholePlanCosts(costs=costs, whole=plan)
    return Rehearsal(plan=part, costs=whole, scale=emulation.scale or scale_for(part, whole, samples))


def scale_for(plan: Plan, costs: CostSource, samples: SampleTable) -> float:
    """Wall seconds per predicted second that make the mean forward of the fastest stage 20 ms long."""
    drawn = samples.take(np.arange(min(len(samples), _SAMPLES_FOR_SCALE)))
    stages = costs.batch_costs(drawn, plan).stages
    assert stages is not None
    per_microbatch = plan.global_batch_size / plan.degrees.data / plan.num_microbatches / len(drawn)
    means = [
        float(seconds.sum()) * per_microbatch + fixed
        for seconds, fixed in zip(stages.forward_seconds, stages.forward_fixed_seconds, strict=True)
    ]
    shortest = min(mean for mean in means if mean > 0)
    return SHORTEST_MEAN_SECONDS / shortest
