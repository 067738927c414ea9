"""Every layout and number of microbatches that the options leave open.

Layouts: replicas times the devices of a replica use all devices. Where all modules have the same tensor and context
degrees, a replica is a chain of pipeline ranks and the partition decides which modules they hold. Where they differ,
the number of pipeline ranks of each module is part of the layout, because it decides which devices form a group. The
devices of a pipeline rank stay within a node, and a tensor degree divides heads and widths. Whether replicas share out
the optimizer's state is asked where the memory of a layout is (`shortlist.py`), because it changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from entrain_opt.cost import CostModel
from entrain_opt.cost.context import rank_degrees
from entrain_opt.cost.links import nodes_of_ranks
from entrain_opt.cost.tensor import tensor_degrees, tensor_rule
from entrain_opt.errors import PlanError
from entrain_opt.plan import ParallelDegrees
from entrain_opt.plan.shares import SHARDED
from entrain_opt.planner.estimates import Layout
from entrain_opt.planner.options import PlanOptions
from entrain_opt.spec.model import ModuleSpec

IntArray = NDArray[np.int64]

#: Samples of a microbatch in the paper's evaluation, for its method.
PAPER_MICROBATCH_SIZE = 4
ORDERS_WITHOUT_SHARING = ("1f1b", "interleaved")
_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16)


def allowed_layouts(costs: CostModel, global_batch_size: int, options: PlanOptions) -> list[Layout]:
    """Every layout that uses all devices and gives every replica a sample and every rank a layer.

    Raises:
        PlanError: there is none; the message says which degrees are possible.
    """
    modules, devices, per_node = costs.model.modules, costs.cluster.num_devices, costs.cluster.devices_per_node
    layers = [module.num_layers for module in modules]
    allowed = [allowed_degrees(costs, module, options) for module in modules]
    found = [
        Layout(
            degrees=degrees,
            tensor=tuple(tensor for tensor, _ in pairs),
            context=tuple(context for _, context in pairs),
            recompute=recompute,
            ranks=ranks,
            shares=not ranks and may_share(degrees.pipeline, len(modules), options.schedule),
            sharded=options.data_parallel == SHARDED and degrees.data > 1,
        )
        for pairs in product(*allowed)
        for degrees, ranks in _meshes(pairs, layers, devices, per_node)
        if degrees.data <= global_batch_size
        and options.data_degree in (None, degrees.data)
        and options.pipeline_degree in (None, degrees.pipeline)
        for recompute in _recomputes(costs, options)
    ]
    if not found:
        raise _no_layout(costs, global_batch_size, options, allowed)
    return found


def allowed_degrees(costs: CostModel, module: ModuleSpec, options: PlanOptions) -> list[tuple[int, int]]:
    """(tensor, context) degrees that a module may have."""
    per_node = costs.cluster.devices_per_node
    tensor = tensor_degrees(costs.model, module, options.tensor_degrees, per_node)
    return rank_degrees(tuple(tensor), options.context_degrees, per_node)


def _meshes(
    pairs: tuple[tuple[int, int], ...], layers: list[int], devices: int, devices_per_node: int
) -> Iterator[tuple[ParallelDegrees, tuple[int, ...]]]:
    """Degrees, and the ranks of each module where (tensor, context) degrees differ."""
    if len(set(pairs)) == 1:
        tensor, context = pairs[0]
        for data in range(1, devices + 1):
            pipeline, rest = divmod(devices, data * tensor * context)
            if not rest and 1 <= pipeline <= sum(layers) and devices % data == 0:
                yield ParallelDegrees(data=data, pipeline=pipeline, tensor=tensor, context=context), ()
        return
    grid = np.meshgrid(*(np.arange(1, count + 1) for count in layers), indexing="ij")
    ranks = np.stack([axis.ravel() for axis in grid], axis=1)
    sizes = ranks @ np.array([tensor * context for tensor, context in pairs])
    tensors, contexts = (tuple(pair[i] for pair in pairs) for i in (0, 1))
    fits = (sizes <= devices) & (devices % np.minimum(sizes, devices) == 0)
    for row, size in zip(ranks[fits].tolist(), sizes[fits].tolist(), strict=True):
        degrees = ParallelDegrees.of_modules(data=devices // size, ranks=tuple(row), tensor=tensors, context=contexts)
        if groups_fit_nodes(degrees, devices_per_node):
            yield degrees, tuple(row)


def groups_fit_nodes(degrees: ParallelDegrees, devices_per_node: int) -> bool:
    """Whether the devices of every pipeline rank of every replica lie within one node."""
    nodes = nodes_of_ranks(degrees, devices_per_node)
    return bool((nodes[..., 0] == nodes[..., 1]).all())


def _recomputes(costs: CostModel, options: PlanOptions) -> list[tuple[bool, ...]]:
    """Which modules recompute: those that have a backward pass through their layers may."""
    can = [costs.has_backward(module, (0, 0)) for module in costs.model.modules]
    if options.recompute == "never":
        return [(False,) * len(can)]
    if options.recompute == "always":
        return [tuple(can)]
    return list(product(*((False, True) if may else (False,) for may in can)))


def _no_layout(
    costs: CostModel, global_batch_size: int, options: PlanOptions, allowed: list[list[tuple[int, int]]]
) -> PlanError:
    modules, devices, per_node = costs.model.modules, costs.cluster.num_devices, costs.cluster.devices_per_node
    contexts = list(options.context_degrees)
    for module, own in zip(modules, allowed, strict=True):
        tensors = tensor_degrees(costs.model, module, options.tensor_degrees, per_node)
        if not tensors:
            return PlanError(
                f"tensor_degrees: none of {list(options.tensor_degrees)} is possible: "
                f"{tensor_rule(costs.model, module, per_node)}. Add 1 to it."
            )
        if not own:
            return PlanError(
                f"context_degrees: none of {contexts} is possible: tensor * context degree of module {module.name} "
                f"must divide the devices of a node ({per_node}), and its tensor degree is one of {tensors}. Add 1 to "
                "it."
            )
    counts, in_use = [module.num_layers for module in modules], contexts != [1]
    possible = [
        (degrees.data, degrees.pipeline, *(pair if in_use else pair[:1]))
        for pair in allowed[0]
        for degrees, _ in _meshes((pair,) * len(modules), counts, devices, per_node)
        if all(pair in other for other in allowed) and degrees.data <= global_batch_size
    ]
    fixed = "".join(
        f", {name} = {value}"
        for name, value in (("data_degree", options.data_degree), ("pipeline_degree", options.pipeline_degree))
        if value is not None
    )
    times, asked, column = "", "", ""
    if in_use:
        times, asked, column = " * context degree", f", context_degrees {contexts}", ", context"
    return PlanError(
        f"degrees: no data degree * pipeline degree * tensor degree{times} = {devices} devices with at most "
        f"{sum(counts)} pipeline ranks (layers of {costs.model.name}), at most {global_batch_size} replicas (samples "
        f"of a global batch) and tensor_degrees {list(options.tensor_degrees)}{asked}{fixed}. Possible with the same "
        f"degrees for all modules, as (data, pipeline, tensor{column}): {possible or 'none'}."
    )


def microbatch_counts(samples_of_replica: int, pipeline: int, options: PlanOptions) -> list[int]:
    """Numbers of microbatches worth trying: up to a sample each, mostly multiples of the pipeline's ranks.

    The paper's number is among them, so that its configuration is a candidate as it stands.
    """
    most = max(samples_of_replica, 1)
    if options.num_microbatches is not None:
        return [options.num_microbatches]
    paper = max(most // PAPER_MICROBATCH_SIZE, 1)
    if options.method == "proportional":
        return [paper]
    counts = {1, 2, 4, 8, paper, *(pipeline * multiple for multiple in _MULTIPLES)}
    if most <= pipeline * _MULTIPLES[-1]:
        counts.add(most)
    return sorted(count for count in counts if count <= most)


def may_share(pipeline: int, num_modules: int, schedule: str) -> bool:
    """Whether a rank may hold the end of one module and the beginning of the next.

    With fewer ranks than modules it must. The orders of `ORDERS_WITHOUT_SHARING` do not follow durations and guess what
    a rank with two stages takes: with a frozen encoder iterations were 15 % longer for it.
    """
    return pipeline <= max(num_modules - 1, 2) or schedule not in ORDERS_WITHOUT_SHARING
