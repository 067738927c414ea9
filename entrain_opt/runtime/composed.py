"""A whole composed model with its weights, outside of any plan."""

from __future__ import annotations

from pathlib import Path

import torch

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.families.composed import ComposedFamily
from entrain_opt.runtime.families.composed_model import ComposedConfig, ComposedModel
from entrain_opt.runtime.weights import load_safetensors, materialize, tie, weight_homes


def load_composed(folder: Path, *, seed: int | None, dtype: torch.dtype) -> ComposedModel:
    """Build a composed model and read or draw its weights; see `ComposedModel.from_pretrained`."""
    family = ComposedFamily(ComposedConfig.from_pretrained(folder))
    with torch.device("meta"):
        model: ComposedModel = family.new_model()
    homes, drawn = weight_homes(model, family, folder)
    if drawn and seed is None:
        raise RuntimeConfigError(
            f"model: {folder} has no weights of {sorted(drawn)}. Save the model with its weights, or give a seed to "
            "draw them from."
        )
    materialize(model, {}, seed=seed if drawn else None, dtype=dtype)
    tie(model, family.tied())
    for part, home in homes:
        load_safetensors(model, family, home, part=part)
    return model.eval()
