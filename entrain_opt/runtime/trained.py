"""Which parameters train, and with what settings.

Everything goes by the place that a family gives a parameter, so every rank finds the same answer for its own part. The
list of optimizer groups is the same on every rank, with empty groups where a rank holds none of their parameters, so
that schedulers and checkpoints see the same groups under every plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import Plan
from entrain_opt.runtime.families import INPUT, Family, Place
from entrain_opt.spec.model import FREEZABLE_PARTS


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Settings of some parts of a model; None takes the optimizer's own.

    Attributes:
        parts: of `vision_tower`, `projector`, `language_model` and so on, as in `frozen`.
        lr: learning rate.
        weight_decay: of these parts; norms and biases have none in any case, unless asked for.
    """

    parts: list[str]
    lr: float | None = None
    weight_decay: float | None = None


def check_groups(groups: Sequence[ParameterGroup], frozen: Sequence[str]) -> None:
    """Raise RuntimeConfigError for a part that is misspelled, frozen, or in two groups, or a rate without sense."""
    seen: set[str] = set()
    for index, group in enumerate(groups):
        field = f"parameter_groups[{index}]"
        for part in group.parts:
            if part not in FREEZABLE_PARTS:
                raise RuntimeConfigError(f"{field}.parts: expected names from {list(FREEZABLE_PARTS)}, found {part!r}.")
            if part in frozen:
                raise RuntimeConfigError(f"{field}.parts: {part!r} is frozen; leave it out here or in `frozen`.")
            if part in seen:
                raise RuntimeConfigError(f"{field}.parts: expected each part in one group, found {part!r} again.")
            seen.add(part)
        for name in ("lr", "weight_decay"):
            value = getattr(group, name)
            if value is not None and value < 0:
                raise RuntimeConfigError(f"{field}.{name}: expected at least 0, found {value}.")


def check_frozen_layers(frozen_layers: Mapping[str, int], family: Family) -> None:
    """Raise RuntimeConfigError for a module that the model lacks or a number of layers that it does not have."""
    known = family.num_layers()
    for module, count in frozen_layers.items():
        if module not in known:
            raise RuntimeConfigError(f"frozen_layers: expected modules from {sorted(known)}, found {module!r}.")
        if not 0 <= count <= known[module]:
            raise RuntimeConfigError(f"frozen_layers.{module}: expected 0 to {known[module]} layers, found {count}.")


def trains(place: Place, frozen: Sequence[str], frozen_layers: Mapping[str, int]) -> bool:
    """Whether a parameter trains.

    Args:
        place: of the parameter.
        frozen: parts that do not train.
        frozen_layers: {module: how many of its first layers do not train}; its embedding stands before them.
    """
    first = frozen_layers.get(place.module, 0)
    is_early = place.position == INPUT or (isinstance(place.position, int) and place.position < first)
    return place.part not in frozen and not (first > 0 and is_early)


#: Optimizers that update each value by itself (and its own history), so that a part of a tensor is enough.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


def updates_each_value(optimizer: Optimizer) -> bool:
    """Whether it is known to update each value by itself."""
    return isinstance(optimizer, tuple(getattr(torch.optim, name) for name in ELEMENTWISE))


def check_divisible(optimizer: Optimizer, plan: Plan) -> None:
    """Raise RuntimeConfigError for an optimizer that may look at a whole matrix, where it gets parts of one."""
    why = "the plan has tensor degrees above 1", "plan with tensor_degrees: [1]"
    if set(plan.degrees.tensor_degrees) == {1}:
        if not plan.shards_state:
            return
        why = "the plan shards its state over the replicas", "plan with data_parallel: all_reduce"
    if not updates_each_value(optimizer):
        raise RuntimeConfigError(
            f"model.optimizer: expected one that updates each value by itself, of {list(ELEMENTWISE)} in torch.optim "
            f"or derived from them, because {why[0]}; found {type(optimizer).__name__}. Choose "
            f"one of them, or {why[1]}."
        )


def optimizer_groups(
    parameters: Mapping[str, nn.Parameter],
    family: Family,
    groups: Sequence[ParameterGroup] = (),
    *,
    decay_norms_and_biases: bool = False,
) -> list[dict[str, Any]]:
    """What an optimizer takes: one group per entry of `groups` and one for the rest, norms and biases apart.

    Args:
        parameters: this rank's, by name; those that do not train are left out.
        family: says which part each belongs to.
        groups: checked settings.
        decay_norms_and_biases: keep parameters of one dimension in the groups that decay.
    """
    settings = [*groups, ParameterGroup(parts=[])]
    index_of_part = {part: index for index, group in enumerate(groups) for part in group.parts}
    members: list[tuple[list[nn.Parameter], list[nn.Parameter]]] = [([], []) for _ in settings]
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            index = index_of_part.get(family.place(name).part, len(groups))
            apart = parameter.ndim < 2 and not decay_norms_and_biases
            members[index][apart].append(parameter)
    found: list[dict[str, Any]] = []
    for group, (decayed, undecayed) in zip(settings, members, strict=True):
        given = {name: getattr(group, name) for name in ("lr", "weight_decay") if getattr(group, name) is not None}
        found.append({"params": decayed, **given})
        if not decay_norms_and_biases:
            found.append({"params": undecayed, **given, "weight_decay": 0.0})
    return found
