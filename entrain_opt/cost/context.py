"""What context parallelism makes of a module's cost lines: samples divided, keys and values sent round.

Every sample is cut into 2 c pieces, and each of c devices computes on one from its front and one from its back
(zig-zag, as in Megatron-LM), so that causal attention is divided as evenly as everything else. Keys and values travel
once around the ring of devices per layer while attention computes on those that have come (ring attention, Liu et al.
2023); in the backward pass they come by again and their gradients go along:

    forward   max(attention / c, exchange) + the rest / c + the fixed part + (c - 1) waits for a message
    exchange  2 * key-value heads * head size * bytes * tokens * (c - 1) / c / link speed; twice that backward

An encoder's images are cut like samples, into c pieces, and its keys and values are charged in full: dealing out whole
images would need no messages, but one large image would not be divided at all. So are those of layers with windows.
Before the head and behind the projector, hidden states are dealt out again: answers stand at the end of samples, and
media tokens belong where the language model has their places.

Granularity: a sample is padded to a multiple of 2 c tokens (an image to one of c patches), which costs each device less
than two tokens (one patch) a sample; that much is charged. Kernels do not get slower for short pieces here, but their
launches and the fixed parts are not divided, so short samples gain nothing from it. Layers of a picture that sees
itself in both directions are counted as evenly divided as causal ones.

The devices of a pipeline rank lie in one node. Promise: c = 1 gives the lines as they are. The lines are estimates
for every c > 1; the runtime does not execute them.
"""

from __future__ import annotations

from dataclasses import replace

from entrain_opt.cost.lines import Line, ModuleCosts, PartCosts
from entrain_opt.cost.links import Links
from entrain_opt.cost.precision import Precision
from entrain_opt.spec.model import ModelSpec, ModuleSpec


def context_costs(
    costs: ModuleCosts,
    module: ModuleSpec,
    model: ModelSpec,
    context: int,
    *,
    tensor: int,
    links: Links,
    precision: Precision,
) -> ModuleCosts:
    """Costs of a module whose samples are divided over `context` devices, or as many groups of `tensor` devices.

    Args:
        costs: of the module under its tensor degree.
        module, model: whose they are.
        context: devices, or tensor groups.
        tensor: devices that share the layers, and with them the heads.
        links: of the cluster.
        precision: of the run.
    """
    if context == 1:
        return costs
    is_llm = bool(module.vocabulary_size)
    padding = 2 if is_llm else 1
    others = (context - 1) / context
    per_byte = others / links.link_bytes_per_second
    key_values = 2 * module.num_key_value_heads * module.head_size / tensor
    ring = Line(
        exchange_seconds=key_values * precision.compute_bytes * per_byte,
        fixed_seconds=(context - 1) * links.latency_seconds,
    )
    width = module.hidden_size if is_llm else model.llm.hidden_size
    dealt = Line(
        token_seconds=width * precision.compute_bytes * per_byte / context, fixed_seconds=links.latency_seconds
    )

    def divided(line: Line, messages: Line) -> Line:
        if line == Line():
            return line  # A pass that does not run.
        own = line.scaled(1 / context)
        segment = own.segment_seconds + padding * line.token_seconds
        return replace(own, segment_seconds=segment, fixed_seconds=line.fixed_seconds).plus(messages)

    def part(part_costs: PartCosts, forward: Line, backward: Line) -> PartCosts:
        return PartCosts(
            forward=divided(part_costs.forward, forward),
            backward=divided(part_costs.backward, backward),
            input_backward=divided(part_costs.input_backward, backward),
            split_backward=None if (split := part_costs.split_backward) is None else divided(split, backward),
        )

    return ModuleCosts(
        input=part(costs.input, Line(), Line()),
        layer=part(costs.layer, ring, ring.scaled(2)),
        output=part(costs.output, dealt, dealt),
    )


def rank_degrees(tensor: tuple[int, ...], context: tuple[int, ...], devices_per_node: int) -> list[tuple[int, int]]:
    """Pairs of degrees of a module whose devices divide those of a node.

    Args:
        tensor: degrees that the module can have.
        context: degrees allowed.
        devices_per_node: of the cluster.
    """
    return [(t, c) for t in tensor for c in context if devices_per_node % (t * c) == 0]
