"""Memory limits of a plan: what may be in flight."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from entrain_opt.cost import CostModel
from entrain_opt.errors import PlanError
from entrain_opt.plan import Plan
from entrain_opt.planner.demand import Demand
from entrain_opt.units import format_bytes


def memory_limit(costs: CostModel, memory_bytes: int | None) -> int:
    """Bytes that one rank may use."""
    return memory_bytes if memory_bytes is not None else costs.cluster.memory_limit_bytes


def with_memory_caps(plan: Plan, costs: CostModel, demand: Demand, limit_bytes: int) -> Plan:
    """The plan with the patches and tokens that its stages may hold in flight.

    Static memory and logits of the largest microbatch come first; what is left on a rank is shared between its stages
    in proportion to what they would hold in 1F1B. The tightest stage of a kind decides for all.

    Raises:
        PlanError: a single sample needs more than what is left; it is named.
    """
    samples, data, count = demand.samples, plan.degrees.data, plan.num_microbatches
    degrees = plan.degrees
    loads = {module.name: load for module, load in zip(costs.model.modules, demand.modules, strict=True)}
    shape = plan.pipeline_shape
    caps: dict[str, tuple[float, int]] = {}
    for rank in range(shape.num_ranks):
        held = [(index, plan.stages[index]) for index in shape.stages_of_rank(rank)]
        budget = float(limit_bytes) - sum(
            costs.static_bytes(stage, degrees, plan.num_shares).total for _, stage in held
        )
        needs: dict[int, tuple[float, float]] = {}
        for index, stage in held:
            load = loads[stage.module]
            per_unit = costs.activation_bytes(stage, samples, degrees)
            largest, mean = (
                load.amount.of_worst_microbatch(data, count),
                load.amount.of_microbatch(data, count),
            )
            if index == shape.num_stages - 1:
                budget -= costs.logit_bytes(degrees, rank) * load.outputs.of_worst_microbatch(data, count)
            if stage.recompute:
                budget -= costs.layer_bytes(stage, degrees) * largest
            if not shape.has_backward[index]:
                budget -= per_unit * largest
                continue
            depth = shape.num_ranks - rank + (stage.module != "llm")
            needs[index] = (per_unit, per_unit * (largest + (depth - 1) * mean))
        total = sum(need for _, need in needs.values())
        for index, (per_unit, need) in needs.items():
            kind = "llm" if plan.stages[index].module == "llm" else "encoder"
            room = budget * need / total / per_unit if total else math.inf
            if room < caps.get(kind, (math.inf, -1))[0]:
                caps[kind] = (room, index)
    result: dict[str, int | None] = {}
    for kind, field in (("encoder", "patches_in_flight"), ("llm", "tokens_in_flight")):
        room, index = caps.get(kind, (math.inf, -1))
        if math.isinf(room):
            result[field] = None
            continue
        stage = plan.stages[index]
        # The assigner counts a microbatch's patches of all encoders against the cap.
        per_sample = samples.total_tokens if kind == "llm" else samples.sum_media(samples.media_patches)
        worst = int(np.argmax(per_sample))
        if per_sample[worst] > room:
            per_unit = costs.activation_bytes(stage, samples, degrees)
            raise PlanError(
                f"sample {samples.sample_ids[worst]!r} alone holds {per_sample[worst]:,.0f} "
                f"{'tokens' if kind == 'llm' else 'patches'} ({format_bytes(per_unit * per_sample[worst])}) on stage "
                f"{index} ({stage.module} layers {stage.layers[0]} to {stage.layers[1] - 1}), where "
                f"{format_bytes(max(room, 0) * per_unit)} are left of {format_bytes(limit_bytes)}. Skip or shrink the "
                "sample, or use more pipeline ranks or devices with more memory."
            )
        result[field] = int(room)
    return replace(plan, **result)  # type: ignore[arg-type]
