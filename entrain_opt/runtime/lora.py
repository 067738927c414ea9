"""LoRA adapters on the linear layers of a model, through `peft` (an optional package).

Adapters are put into the whole model on the meta device, before it is cut: they get names of their own inside the layer
they belong to (`...q_proj.lora_A.default.weight`), so placement, recompute, messages, optimizer and checkpoints treat
them like any other parameter. The weights around them keep their Hugging Face names in checkpoints.

Promise: adapters depend on (seed, name) only, as weights do; the model starts as the one without adapters; export
merges them. Price: planned for as if the whole part trained, so memory is overestimated.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.families import Family
from entrain_opt.spec.model import FREEZABLE_PARTS

_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Which linear layers get adapters; the parts that they are in train nothing else.

    Attributes:
        parts: `language_model`, `vision_tower`, or both.
        rank: of the product that is added to a weight.
        alpha: the product is scaled by alpha / rank.
        targets: last names of the linear layers (`q_proj`, ...); None takes every one inside the parts' layers.
    """

    parts: list[str] = field(default_factory=lambda: ["language_model"])
    rank: int = 8
    alpha: float = 16.0
    targets: list[str] | None = None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def check(self, frozen: Sequence[str]) -> None:
        """Raise RuntimeConfigError for a part that is unknown or frozen, a rank below 1, or a missing package."""
        for part in self.parts:
            if part not in FREEZABLE_PARTS or part == "projector":
                expected = [name for name in FREEZABLE_PARTS if name != "projector"]
                raise RuntimeConfigError(f"lora.parts: expected names from {expected}, found {part!r}.")
            if part in frozen:
                raise RuntimeConfigError(
                    f"lora.parts: {part!r} is in `frozen` too. Leave it out of `frozen`: beside adapters the part is "
                    "frozen anyway."
                )
        if not self.parts:
            raise RuntimeConfigError("lora.parts: expected at least one part, found none.")
        if self.rank < 1:
            raise RuntimeConfigError(f"lora.rank: expected at least 1, found {self.rank}.")
        if importlib.util.find_spec("peft") is None:
            raise RuntimeConfigError(
                "lora: needs the package peft, which is not installed: pip install entrain-opt[lora]"
            )


def is_adapter(parameter_name: str) -> bool:
    return parameter_name.endswith((_DOWN, _UP))


def plain_name(parameter_name: str) -> str:
    """A parameter's name in the model without adapters."""
    return parameter_name.replace(_BASE, ".")


def add_adapters(model: nn.Module, family: Family, lora: Lora) -> None:
    """Put adapters into a model.

    Raises:
        RuntimeConfigError: a target that no layer has.
    """
    from peft import LoraConfig, inject_adapter_in_model

    found, leaves = [], set()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        place = family.place(f"{name}.weight")
        if place.part in lora.parts and isinstance(place.position, int):
            leaf = name.rpartition(".")[2]
            leaves.add(leaf)
            if lora.targets is None or leaf in lora.targets:
                found.append(name)
    if unknown := sorted(set(lora.targets or ()) - leaves):
        raise RuntimeConfigError(
            f"lora.targets: {lora.parts} have the linear layers {sorted(leaves)}, found {unknown}."
        )
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=found, lora_dropout=0.0, bias="none")
    inject_adapter_in_model(config, model)


def draw_adapters(parameters: Mapping[str, nn.Parameter], seed: int) -> None:
    """Give adapters their first values: a uniform first factor, as LoRA's authors draw it, and a zero second one."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name.endswith(_UP):
                parameter.zero_()
            elif name.endswith(_DOWN):
                number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
                drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=torch.Generator().manual_seed(number))
                parameter.copy_(drawn)


def merge_adapters(
    weights: Mapping[str, Tensor], stored: Sequence[str], scale: float, read: Callable[[str], Tensor]
) -> None:
    """Add adapters to the weights that they belong to, in float32.

    Args:
        weights: of the model without adapters, by name; changed in place.
        stored: names of everything that was saved.
        scale: of the product.
        read: a saved tensor by name.
    """
    for name in stored:
        if name.endswith(_DOWN):
            prefix = name.removesuffix(_DOWN)
            added = read(prefix + _UP).float() @ read(name).float()
            weight = weights[f"{prefix}.weight"]
            weight.copy_(weight.float() + scale * added)
