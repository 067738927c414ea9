"""A model of few layers, each of which costs what one of the whole model's does.

Of each module some layers stay: at least one of every kind (`ModuleSpec.layer_kinds`), more of the kinds that most
layers belong to. An encoder gets one more in front, so that the layers in the middle neither embed nor project, and
more behind: one, or as many as the features that enter several language-model layers are taken from.

Promise: the family and the `ModelSpec` of the short config describe the same layers. Price: one small file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrain_opt.runtime.families import Family, family_of
from entrain_opt.runtime.families.composed_model import register_composed
from entrain_opt.spec.model import ModelSpec, ModuleSpec

#: Layers of each module that stay, and the bytes of weights above which fewer do.
MOST_LAYERS, MOST_WEIGHT_BYTES = 3, 256 << 20
#: Fields of a config that count its layers; the first that is there holds.
_COUNTS = ("depth", "encoder_layers", "num_hidden_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortModel:
    """A shortened model.

    Attributes:
        family: of the short config.
        spec: of the same.
        layers: {module: first and end of the layers that stand for the whole model's}.
    """

    family: Family
    spec: ModelSpec
    layers: dict[str, tuple[int, int]]


def shorten(model_folder: Path, short_folder: Path, *, frozen: Sequence[str], weight_bytes: int) -> ShortModel:
    """Write the config of a short model, and read it as the runtime and the planner do.

    Args:
        model_folder: of the whole model.
        short_folder: where the short config is written.
        frozen: parts that do not train.
        weight_bytes: per parameter.
    """
    from transformers import AutoConfig

    register_composed()
    config = AutoConfig.from_pretrained(model_folder)
    whole = ModelSpec.from_pretrained(model_folder)
    layers = {}
    for module in whole.modules:
        chosen = typical_layers(module, max(1, MOST_WEIGHT_BYTES // (module.layer_parameters * weight_bytes)))
        if module is whole.llm:
            _keep_text_layers(config.text_config, module, chosen)
            layers[module.name] = (0, len(chosen))
        else:
            _keep_encoder_layers(config, module.name, chosen)
            layers[module.name] = (1, 1 + len(chosen))
    config.save_pretrained(short_folder)
    spec = ModelSpec.from_pretrained(short_folder, frozen=frozen)
    return ShortModel(family=family_of(config), spec=spec, layers=layers)


def typical_layers(module: ModuleSpec, most: int) -> list[int]:
    """Layers that stand for all: at least one of each kind, and at most `MOST_LAYERS` and `most` where that allows."""
    kinds = module.kinds
    counts = [1] * len(kinds)
    while sum(counts) < min(MOST_LAYERS, most, module.num_layers):
        shares = [
            len(kind.layers) / (count + 1) if count < len(kind.layers) else 0.0
            for kind, count in zip(kinds, counts, strict=True)
        ]
        counts[shares.index(max(shares))] += 1
    return sorted(layer for kind, count in zip(kinds, counts, strict=True) for layer in kind.layers[:count])


def _keep_text_layers(text: Any, module: ModuleSpec, chosen: list[int]) -> None:
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in chosen]
    if hasattr(text, "mlp_only_layers"):
        sparse = {layer for kind in module.kinds if kind.num_experts for layer in kind.layers}
        text.mlp_only_layers = [index for index, layer in enumerate(chosen) if layer not in sparse]
        text.decoder_sparse_step = 1
    text.num_hidden_layers = len(chosen)


def _keep_encoder_layers(config: Any, name: str, chosen: list[int]) -> None:
    part = getattr(config, f"{name}_config")
    deep = list(getattr(part, "deepstack_visual_indexes", None) or ())
    count = 1 + len(chosen) + max(1, len(deep))
    if deep:
        part.deepstack_visual_indexes = list(range(count - len(deep), count))
    if getattr(part, "fullatt_block_indexes", None) is not None:
        full = set(part.fullatt_block_indexes)
        part.fullatt_block_indexes = [1 + index for index, layer in enumerate(chosen) if layer in full]
    setattr(part, next(field for field in _COUNTS if hasattr(part, field)), count)
    # The feature layer -1 may stand for more than the last layer: its output behind a norm.
    if getattr(config, "vision_feature_layer", -1) != -1:
        config.vision_feature_layer = count
