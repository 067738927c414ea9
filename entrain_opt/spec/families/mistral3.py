"""Mistral 3 (Mistral Small 3.1 and 3.2): Pixtral's tower, a norm, a merger of patches, two linear layers, a Mistral.

The projector takes features of `vision_feature_layer`; layers behind it are unused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from entrain_opt.spec.families.fields import Fields, known_type, part
from entrain_opt.spec.families.parts import Parts, asks_to_tie
from entrain_opt.spec.families.text import read_text
from entrain_opt.spec.families.towers import cut_tower
from entrain_opt.spec.model import ModuleSpec

_PIXTRAL = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": 3, "patch_size": 16,
}  # fmt: skip
#: What the model takes where a config has no such part.
_ABSENT_VISION = {"patch_size": 14}
_ABSENT_TEXT = {
    "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 131072,
    "sliding_window": None,
}  # fmt: skip


def read_mistral3(config: dict[str, Any], where: str) -> Parts:
    """Mistral 3 with pictures."""
    given = {"vision_feature_layer": -1, "spatial_merge_size": 2, "multimodal_projector_bias": False}
    top = Fields(config, given, where)
    text_config, vision_config = part(config, "text_config", where), part(config, "vision_config", where)
    text = read_text(_ABSENT_TEXT if text_config is None else text_config, f"{where}: text_config", default="mistral")
    vision = _read_pixtral(_ABSENT_VISION if vision_config is None else vision_config, f"{where}: vision_config")
    vision, num_features = cut_tower(vision, top.get("vision_feature_layer"), where, "vision_feature_layer")
    hidden, out = vision.hidden_size, text.module.hidden_size
    merger = hidden + hidden * top.count("spatial_merge_size") ** 2 * hidden
    linear = hidden * num_features * out + out * out + 2 * out * top.flag("multimodal_projector_bias")
    return Parts(
        encoders=(replace(vision, output_parameters=merger + linear),),
        text=text,
        tied=asks_to_tie(config, where, default=True),
    )


def _read_pixtral(given: Mapping[str, Any], where: str) -> ModuleSpec:
    known_type(given, where, ("pixtral",), default="pixtral")
    vision = Fields(given, _PIXTRAL, where)
    hidden, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    head = vision.share("num_attention_heads", hidden, "hidden_size")
    width = vision.count("num_channels") * vision.count("patch_size") ** 2
    return ModuleSpec(
        name="vision",
        num_layers=vision.count("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // head,
        head_size=head,
        gated_mlp=True,
        layer_parameters=4 * hidden * hidden + 3 * hidden * inner + 2 * hidden,
        input_parameters=width * hidden + hidden,
        output_parameters=0,
        input_width=width,
        drops_inside=vision.drops("attention_dropout"),
    )
