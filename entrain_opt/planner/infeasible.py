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
from entrain_opt.plan.shares import ALL_REDUCE
from entrain_opt.planner.demand import Demand, estimate_demand
from entrain_opt.planner.instance import Choice, Instance
from entrain_opt.planner.options import SEARCH, PlanOptions
from entrain_opt.planner.partition import Partition
from entrain_opt.planner.search import least_memory, least_mib
from entrain_opt.planner.shortlist import build_shortlist
from entrain_opt.units import MIB, format_bytes

#: Changes named, of those that can be trained.
MOST_CHANGES = 3
#: Choices whose partition is found, of those that hold least in total.
_CLOSEST = 40
_DEGREES = (1, 2, 4, 8)


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
    static = sum(
        costs.static_bytes(stage, choice.degrees, choice.num_shares).total for stage in stages if stage.rank == rank
    )
    changes = [*feasible_changes(costs, demand, options), f"{format_bytes(needs[rank] * MIB)} of memory per device"]
    return PlanError(
        f"memory: stage {index} ({named}) needs {format_bytes(needs[rank] * MIB)}, the device has "
        f"{format_bytes(instance.limit_mib * MIB)}; {format_bytes(static)} of it are weights, gradients and optimizer "
        f"state. The closest choice is data_degree={choice.data}, pipeline_degree={choice.pipeline}"
        f"{choice.degree_words}, num_microbatches={choice.num_microbatches}"
        f"{', recompute' if any(choice.recompute) else ''} with one microbatch in flight. Closest feasible: "
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
    """Single changes under which something fits, smallest first, and one that can be planned for only."""
    found: list[str] = []
    for words, changed, with_costs in _changes(costs, options):
        if len(found) == MOST_CHANGES:
            break
        if (choice := _fitting(changed, with_costs, costs, demand)) is not None:
            found.append(_said(words, choice))
    for words, changed in _planned_only_changes(costs, options):
        choice = _fitting(changed, costs, costs, demand)
        if choice is not None and choice.context:
            return [*found, f"{_said(words, choice)}, which can be planned for but not trained yet"]
    return found


def _said(words: str, choice: Choice) -> str:
    return f"{words} (data={choice.data}, pipeline={choice.pipeline}{choice.degree_words})"


def _fitting(changed: PlanOptions, with_costs: CostModel, costs: CostModel, demand: Demand) -> Choice | None:
    """The fastest choice that fits under changed options; None if nothing does."""
    try:
        asked = demand
        if with_costs is not costs:
            asked = estimate_demand(demand.samples, with_costs, demand.global_batch_size, seed=changed.seed)
        _, ranking = build_shortlist(with_costs, asked, changed, one_in_flight=True)
    except EntrainError:
        return None  # No layout, or no such rate on this device: not a change to propose.
    return ranking[0].choice if ranking else None


def _changes(costs: CostModel, options: PlanOptions) -> Iterator[tuple[str, PlanOptions, CostModel]]:
    wide = _within_a_node(costs)
    if options.data_degree or options.pipeline_degree or options.num_microbatches:
        free = replace(options, data_degree=None, pipeline_degree=None, num_microbatches=None)
        yield "degrees and microbatches left free", free, costs
    if options.data_parallel == ALL_REDUCE and costs.cluster.num_devices > 1:
        yield f"data_parallel={SEARCH}", replace(options, data_parallel=SEARCH), costs
    if options.recompute == "never":
        yield "recompute=search", replace(options, recompute="search"), costs
    if set(options.context_degrees) != {1} and set(wide) - set(options.context_degrees):
        yield f"context_degrees={list(wide)}", replace(options, context_degrees=wide), costs
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


def _planned_only_changes(costs: CostModel, options: PlanOptions) -> Iterator[tuple[str, PlanOptions]]:
    """Context degrees where none was asked for: alone, and with recompute."""
    wide = _within_a_node(costs)
    if set(options.context_degrees) != {1} or set(wide) == {1}:
        return
    context = replace(options, context_degrees=wide)
    yield f"context_degrees={list(wide)}", context
    if options.recompute == "never":
        yield f"context_degrees={list(wide)} with recompute=search", replace(context, recompute="search")


def _within_a_node(costs: CostModel) -> tuple[int, ...]:
    return tuple(degree for degree in _DEGREES if costs.cluster.devices_per_node % degree == 0)
