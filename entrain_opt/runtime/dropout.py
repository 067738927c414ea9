"""Dropout whose masks do not depend on which rank computes a layer.

A layer with dropout draws from a generator seeded by (seed, step, replica, module, microbatch, part, layer), in place
of whatever random numbers its process has used before. So loss and gradients are the same for every split of the layers
over stages and ranks, every schedule, with and without recompute, and after a resume.

Limits: masks follow rows of a microbatch, so another assignment (other numbers of replicas or microbatches, another
policy) draws other masks; and dropout outside of layers (on embeddings) follows the process's own generator.
Price: one copy of the generator's state per layer and microbatch, only where a layer has dropout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(slots=True)
class DropoutKey:
    """What the masks of the running computation depend on, besides the layer.

    Attributes:
        seed, step: of the run; the step is the optimizer's.
        unit: (replica, module, microbatch, part).
    """

    seed: int = 0
    step: int = 0
    unit: tuple[int, str, int, int] = (0, "", 0, 0)

    def number(self, layer: str) -> int:
        content = repr((self.seed, self.step, self.unit, layer)).encode()
        return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1


def has_dropout(module: nn.Module) -> bool:
    """Whether a module drops anything while it trains."""
    for part in module.modules():
        if isinstance(part, nn.Dropout) and part.p > 0:
            return True
        for name in ("attention_dropout", "dropout", "attn_dropout"):
            value = getattr(part, name, 0.0)
            if isinstance(value, float) and value > 0:
                return True
    return False


def seed_dropout(model: nn.Module, layers: Iterable[str], key: DropoutKey) -> None:
    """Make those of the layers that have dropout draw their masks as the key says; after `recompute_layers`.

    Args:
        model: holds the layers.
        layers: their module names.
        key: read at each call.
    """
    for name in layers:
        layer: Any = model.get_submodule(name)
        if has_dropout(layer):
            layer.forward = _seeded(layer, layer.forward, name, key)


def _seeded(layer: nn.Module, forward: Callable[..., Any], name: str, key: DropoutKey) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return forward(*args, **kwargs)
        devices = {value.device for value in args if isinstance(value, torch.Tensor) and value.device.type == "cuda"}
        indices = sorted(device.index or 0 for device in devices)
        with torch.random.fork_rng(devices=indices):
            # Not torch.manual_seed, which spends milliseconds on kinds of devices that are not in use.
            torch.default_generator.manual_seed(key.number(name))
            for index in indices:
                with torch.cuda.device(index):
                    torch.cuda.manual_seed(key.number(name))
            return forward(*args, **kwargs)

    return run
