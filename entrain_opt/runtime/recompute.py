"""Layers that keep their input only and run forward again in the backward pass.

Each layer of a stage with recompute runs under PyTorch's non-reentrant checkpoint, one layer at a time, with the random
numbers and autocast settings of its first run. Embeddings, projector, last norm and head keep what they computed.

Promise: the same gradients (to the last bits of a matrix product); between forward and backward a layer holds its
input alone.
Price: one more forward per layer. A stage with recompute runs its whole backward where a schedule has the input part:
split in two, every weight gradient would run its layer forward once more, or the activations would be held after all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

#: `model.language_model.layers.3.mlp.up_proj.weight` -> `model.language_model.layers.3`
_LAYER = re.compile(r"(.+?\.\d+)\.")


def layer_of(parameter_name: str) -> str:
    """Name of the layer that a parameter with a layer index belongs to."""
    found = _LAYER.match(parameter_name)
    assert found is not None, parameter_name
    return found[1]


def recompute_layers(model: nn.Module, layers: Iterable[str]) -> None:
    """Make layers recompute what they need for their backward pass.

    Args:
        model: holds the layers.
        layers: their module names.
    """
    for name in layers:
        layer: Any = model.get_submodule(name)
        layer.forward = _recomputing(layer.forward)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run
