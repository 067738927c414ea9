"""What to say when nothing fits: the limit that binds, and the nearest changes under which something does.

The choice that comes closest is the one whose fullest rank holds least, with one microbatch in flight. The changes are
tried, not guessed: each is a planning problem of its own, whose memory is counted. Price: a second or two, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from entrain_opt.cost import CostModel
from entrain_opt.errors import EntrainError, PlanError
from entrain_opt.planner.demand import Demand, estimate_demand
from entrain_opt.planner.instance import Choice, Instance
from entrain_opt.planner.options import PlanOptions
from entrain_opt.planner.partition import Partition
from entrain_opt.planner.search import least_memory, least_mib
from entrain_opt.planner.shortlist import build_shortlist
from entrain_opt.units import MIB, format_bytes

#: Choices whose partition is found, of those that hold least in total.
_CLOSEST = 40
_TENSOR_DEGREES = (1, 2, 4, 8)


def explain_infeasible(instance: Instance, costs: CostModel, demand: Demand, options: PlanOptions) -> PlanError:
    """The error for an instance without any feasible choice: what binds, and what would be feasible."""
    closest = _closest(instance)
    if closest is None:
        return PlanError(f"plan: {costs.model.name} cannot be cut into any allowed number of pipeline ranks.")
    choice, partition = closest
    if partition.ticks <= instance.limit_mib:
        # Only the paper's rule passes by a partition that fits: its split of the ranks is given.
        return PlanError(
            "method: the proportional split of the ranks fits nowhere, another split does. Use method cp-sat."
        )
    needs = instance.memory_mib(choice, partition.ends)
    rank = int(np.argmax(needs))
    stages = instance.stages(partition.ends, choice)
    index = next(index for index, stage in enumerate(stages) if stage.rank == rank)
    named = ", ".join(
        f"{stage.module} layers {stage.layers[0]} to {stage.layers[1] - 1}" for stage in stages if stage.rank == rank
    )
    static = sum(costs.static_bytes(stage, choice.degrees).total for stage in stages if stage.rank == rank)
    changes = [*feasible_changes(costs, demand, options), f"{format_bytes(needs[rank] * MIB)} of memory per device"]
    return PlanError(
        f"memory: stage {index} ({named}) needs {format_bytes(needs[rank] * MIB)}, the device has "
        f"{format_bytes(instance.limit_mib * MIB)}; {format_bytes(static)} of it are weights, gradients and optimizer "
        f"state. The closest choice is data_degree={choice.data}, pipeline_degree={choice.pipeline}, "
        f"num_microbatches={choice.num_microbatches} with one microbatch in flight. Closest feasible: "
        f"{'; or '.join(changes)}."
    )


def _closest(instance: Instance) -> tuple[Choice, Partition] | None:
    """The choice and partition whose fullest rank holds least."""
    by_total = sorted(instance.choices, key=lambda choice: least_mib(instance, choice) / choice.pipeline)
    best: tuple[Choice, Partition] | None = None
    for choice in by_total[:_CLOSEST]:
        found = least_memory(instance, choice)
        if found is not None and (best is None or found.ticks < best[1].ticks):
            best = (choice, found)
    return best


def feasible_changes(costs: CostModel, demand: Demand, options: PlanOptions) -> list[str]:
    """Single changes under which something fits, smallest first."""
    found = []
    for words, changed, with_costs in _changes(costs, options):
        try:
            asked = demand
            if with_costs is not costs:
                asked = estimate_demand(demand.samples, with_costs, demand.global_batch_size, seed=options.seed)
            _, ranking = build_shortlist(with_costs, asked, changed, one_in_flight=True)
        except EntrainError:
            continue  # No layout, or no such rate on this device: not a change to propose.
        if not ranking:
            continue
        choice = ranking[0].choice
        tensor = f", tensor={'/'.join(map(str, choice.tensor))}" if choice.tensor else ""
        found.append(f"{words} (data={choice.data}, pipeline={choice.pipeline}{tensor})")
        if len(found) == 3:
            break
    return found


def _changes(costs: CostModel, options: PlanOptions) -> Iterator[tuple[str, PlanOptions, CostModel]]:
    wide = tuple(degree for degree in _TENSOR_DEGREES if costs.cluster.devices_per_node % degree == 0)
    if options.data_degree or options.pipeline_degree or options.num_microbatches:
        free = replace(options, data_degree=None, pipeline_degree=None, num_microbatches=None)
        yield "degrees and microbatches left free", free, costs
    if options.recompute == "never":
        yield "recompute=search", replace(options, recompute="search"), costs
    if set(wide) - set(options.tensor_degrees):
        yield f"tensor_degrees={list(wide)}", replace(options, tensor_degrees=wide), costs
        both = replace(options, tensor_degrees=wide, recompute="search")
        yield f"tensor_degrees={list(wide)} with recompute=search", both, costs
    if costs.measured is None and options.precision != "bf16-true":
        smaller = replace(options, precision="bf16-true")
        yield "precision=bf16-true", smaller, CostModel(costs.model, costs.cluster, precision="bf16-true")
    for factor in (2, 4, 8):
        cluster = replace(costs.cluster, num_nodes=costs.cluster.num_nodes * factor)
        more = CostModel(costs.model, cluster, measured=costs.measured, precision=options.precision)
        yield f"{cluster.num_devices} devices", replace(options, data_degree=None, pipeline_degree=None), more
