"""A whole composed model with its weights, outside of any plan."""

from __future__ import annotations

from pathlib import Path

import torch

from entrain_opt.runtime.families.composed import ComposedFamily
from entrain_opt.runtime.families.composed_model import ComposedConfig, ComposedModel
from entrain_opt.runtime.weights import fill_weights


def load_composed(folder: Path, *, seed: int | None, dtype: torch.dtype) -> ComposedModel:
    """Build a composed model and read or draw its weights; see `ComposedModel.from_pretrained`."""
    family = ComposedFamily(ComposedConfig.from_pretrained(folder))
    with torch.device("meta"):
        model: ComposedModel = family.new_model()
    constant = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    fill_weights(model, {}, family, folder, seed=seed, dtype=dtype)
    for name in constant:  # Fixed position tables.
        model.get_parameter(name).requires_grad_(False)
    return model.eval()
