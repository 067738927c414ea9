"""Input gradients now, weight gradients later, with PyTorch's public autograd.

Going backward from a stage's output, some nodes lead to the stage's inputs (the path) and some children of path nodes
lead to weights only. Where such a child hangs, the path node is a border: a matrix product, a norm's scale, a bias.

1. `start`: one backward restricted to the inputs. Hooks on the border nodes keep the gradients that pass through.
2. `finish`: each border node runs once more from its kept gradient, restricted to the weights that hang on it.

Promise: the sum of both equals a whole backward; no product is computed twice. Price: activations and one gradient per
border stay until `finish`, and a walk over the graph (some microseconds per node). A weight that hangs on two borders
(a tied embedding within one stage) makes `finish` a second full backward restricted to the weights: exact, but slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass(slots=True)
class _Border:
    """A node of the path, the weights that hang on it, and the gradients that arrived at it."""

    node: Node
    weights: list[Tensor]
    gradients: tuple[Tensor | None, ...] = ()


@dataclass(slots=True)
class PendingWeightGradients:
    """What `finish` needs to compute the weight gradients of one unit."""

    output: Tensor
    gradient: Tensor | None
    borders: list[_Border] = field(default_factory=list)

    def finish(self) -> None:
        """Add the weight gradients to the parameters and let go of the graph."""
        owners: dict[int, int] = {}
        for border in self.borders:
            for weight in border.weights:
                owners[id(weight)] = owners.get(id(weight), 0) + 1
        if any(count > 1 for count in owners.values()):
            weights = list({id(w): w for border in self.borders for w in border.weights}.values())
            torch.autograd.backward(self.output, self.gradient, inputs=weights)
        else:
            for border in self.borders:
                arrived = [(i, g) for i, g in enumerate(border.gradients) if g is not None]
                if arrived:
                    edges = [GradientEdge(border.node, i) for i, _ in arrived]
                    torch.autograd.backward(edges, [g for _, g in arrived], inputs=border.weights, retain_graph=True)
        self.borders.clear()


def start(output: Tensor, gradient: Tensor | None, inputs: Sequence[Tensor]) -> PendingWeightGradients:
    """Compute the gradients of the inputs (into their `.grad`) and keep what the weight gradients need.

    Args:
        output: of the stage, with its graph.
        gradient: of the output; None for a scalar loss.
        inputs: leaves that require gradients; at least one must be reachable from the output.
    """
    borders = _find_borders(output, inputs)
    hooks = [border.node.register_prehook(_keep(border)) for border in borders]
    torch.autograd.backward(output, gradient, inputs=list(inputs), retain_graph=True)
    for hook in hooks:
        hook.remove()
    return PendingWeightGradients(output, gradient, borders)


def _keep(border: _Border) -> Callable[[tuple[Tensor, ...]], None]:
    def hook(gradients: tuple[Tensor, ...]) -> None:
        border.gradients = gradients

    return hook


def _find_borders(output: Tensor, inputs: Sequence[Tensor]) -> list[_Border]:
    targets = {get_gradient_edge(leaf).node for leaf in inputs}
    order = _nodes_children_first(get_gradient_edge(output).node)
    on_path: set[Node] = set()
    weights_below: dict[Node, list[Tensor]] = {}
    for node in order:
        children = [child for child, _ in node.next_functions if child is not None]
        if node in targets or any(child in on_path for child in children):
            on_path.add(node)
        variable = getattr(node, "variable", None)
        found = {id(variable): variable} if isinstance(variable, Tensor) and node not in targets else {}
        for child in children:
            if child not in on_path:
                found |= {id(weight): weight for weight in weights_below[child]}
        weights_below[node] = list(found.values())
    return [_Border(node, weights_below[node]) for node in order if node in on_path and weights_below[node]]


def _nodes_children_first(root: Node) -> list[Node]:
    order: list[Node] = []
    seen = {root}
    stack: list[tuple[Node, int]] = [(root, 0)]
    while stack:
        node, position = stack.pop()
        if position == len(node.next_functions):
            order.append(node)
            continue
        stack.append((node, position + 1))
        child = node.next_functions[position][0]
        if child is not None and child not in seen:
            seen.add(child)
            stack.append((child, 0))
    return order
