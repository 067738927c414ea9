"""What tensor parallelism makes of a module's cost lines: work divided, messages added.

As in Megatron-LM (Shoeybi et al. 2019): a layer's matrices are split by heads and inner width over t devices of one
node. Each layer then sums its output over the group twice forward and twice backward, the token table and projector
once, the head once backward. Norms and residual sums are computed whole on every device. On a ring a sum of b bytes
sends 2 (t - 1) / t * b from every device, and waits log2(t) times for a message to arrive.

Launching kernels does not get faster, so a layer's fixed part falls to that and no further. Promise: t = 1 gives the
lines as they are. The lines are estimates for every t > 1, measured costs included: they were measured on one device.
"""

from __future__ import annotations

import math

from entrain_opt.cost.analytic import KERNELS_PER_LAYER
from entrain_opt.cost.lines import Line, ModuleCosts, PartCosts
from entrain_opt.cost.links import Links
from entrain_opt.cost.memory import replicated_layer_bytes
from entrain_opt.cost.precision import Precision
from entrain_opt.spec.devices import DeviceSpec
from entrain_opt.spec.model import ModelSpec, ModuleSpec


def divided_costs(
    costs: ModuleCosts,
    module: ModuleSpec,
    model: ModelSpec,
    tensor: int,
    *,
    links: Links,
    device: DeviceSpec,
    precision: Precision,
) -> ModuleCosts:
    """Costs of a module whose layers are shared by `tensor` devices of one node."""
    if tensor == 1:
        return costs
    is_llm = bool(module.vocabulary_size)
    ring = 2 * (tensor - 1) / tensor / links.link_bytes_per_second
    wait = math.ceil(math.log2(tensor)) * links.latency_seconds

    def sums(count: int, width: int) -> Line:
        return Line(
            token_seconds=count * width * precision.compute_bytes * ring, fixed_seconds=count * wait if count else 0.0
        )

    def part(part_costs: PartCosts, whole_seconds: float, kernels: int, forward: Line, backward: Line) -> PartCosts:
        launch = kernels * device.kernel_launch_seconds

        def divided(line: Line, times: int, extra: Line) -> Line:
            whole = min(line.token_seconds, times * whole_seconds)
            return Line(
                square_seconds=line.square_seconds / tensor,
                token_seconds=whole + (line.token_seconds - whole) / tensor + extra.token_seconds,
                segment_seconds=line.segment_seconds / tensor,
                fixed_seconds=max(line.fixed_seconds / tensor, min(line.fixed_seconds, times * launch))
                + extra.fixed_seconds,
            )

        return PartCosts(
            forward=divided(part_costs.forward, 1, forward),
            backward=divided(part_costs.backward, 2, backward),
            input_backward=divided(part_costs.input_backward, 1, backward),
            split_backward=None if (split := part_costs.split_backward) is None else divided(split, 2, backward),
        )

    norms = 2 * replicated_layer_bytes(module) / device.memory_bytes_per_second
    hidden, out = module.hidden_size, model.llm.hidden_size
    layer = part(costs.layer, norms, KERNELS_PER_LAYER, sums(2, hidden), sums(2, hidden))
    output = part(costs.output, 0.0, 2, sums(0 if is_llm else 1, out), sums(1, hidden))
    # The patch embedding is whole on every device; the token table is split by rows.
    entry = part(costs.input, math.inf, 1, sums(1, hidden), sums(0, hidden)) if is_llm else costs.input
    return ModuleCosts(input=entry, layer=layer, output=output)


def tensor_degrees(model: ModelSpec, module: ModuleSpec, degrees: tuple[int, ...], devices_per_node: int) -> list[int]:
    """The degrees that a module's heads and widths, and a node's devices, can be divided by.

    Only 1 for a module with dropout inside its layers, whose masks would depend on the degree: the runtime refuses it.
    """
    sizes = _divided_sizes(model, module, devices_per_node)
    possible = (1,) if module.drops_inside else degrees
    return [degree for degree in degrees if degree in possible and all(size % degree == 0 for size in sizes.values())]


def tensor_rule(model: ModelSpec, module: ModuleSpec, devices_per_node: int) -> str:
    """What a tensor degree of a module must divide, with its numbers, for errors."""
    if module.drops_inside:
        return (
            f"module {module.name} has dropout inside its layers, so it cannot be divided over devices exactly (set "
            "the rates to 0 in the model's config)"
        )
    sizes = _divided_sizes(model, module, devices_per_node)
    return f"tensor degrees of module {module.name} must divide " + ", ".join(
        f"{name} ({size})" for name, size in sizes.items()
    )


def _divided_sizes(model: ModelSpec, module: ModuleSpec, devices_per_node: int) -> dict[str, int]:
    """In words -> size. The language model's width counts for encoders as well: their projector is split."""
    return {
        "its heads": module.num_attention_heads,
        "its key-value heads": module.num_key_value_heads,
        "its inner width": module.intermediate_size,
        "the language model's width": model.llm.hidden_size,
        "the devices of a node": devices_per_node,
    }
