"""LLaVA, LLaVA-NeXT and LLaVA-OneVision: a CLIP or SigLIP tower, two linear layers, any language model.

The projector takes features of `vision_feature_layer`, so layers behind it and the tower's last norm get no gradient:
they count as unused, with SigLIP's pooling head. The newline embedding of the tiled ones counts with the projector.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from entrain_opt.spec.families.fields import Fields, part
from entrain_opt.spec.families.parts import Parts, asks_to_tie
from entrain_opt.spec.families.text import read_text
from entrain_opt.spec.families.towers import cut_tower, read_tower

_CLIP_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_SIGLIP_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "vision_use_head": False,
}


def read_llava(config: dict[str, Any], where: str) -> Parts:
    """LLaVA 1.5 and models in its form."""
    return _read(config, where, text_ties=True)


def read_llava_next(config: dict[str, Any], where: str) -> Parts:
    """LLaVA-NeXT (1.6)."""
    return _read(config, where, has_newline=True)


def read_llava_onevision(config: dict[str, Any], where: str) -> Parts:
    """LLaVA-OneVision."""
    return _read(
        config, where, tower="siglip_vision_model", absent=_SIGLIP_SO400M, text="qwen2", has_newline=True,
        text_ties=True, feature_layer=-1,
    )  # fmt: skip


def _read(
    config: dict[str, Any],
    where: str,
    *,
    tower: str = "clip_vision_model",
    absent: dict[str, Any] = _CLIP_LARGE,
    text: str = "llama",
    has_newline: bool = False,
    text_ties: bool = False,
    feature_layer: int = -2,
) -> Parts:
    top = Fields(config, {"vision_feature_layer": feature_layer, "multimodal_projector_bias": True}, where)
    language = read_text(part(config, "text_config", where), f"{where}: text_config", default=text)
    vision = read_tower(part(config, "vision_config", where), f"{where}: vision_config", default=tower, absent=absent)
    vision, num_features = cut_tower(vision, top.get("vision_feature_layer"), where, "vision_feature_layer")
    out = language.module.hidden_size
    projector = vision.hidden_size * num_features * out + out * out + 2 * out * top.flag("multimodal_projector_bias")
    return Parts(
        encoders=(replace(vision, output_parameters=projector + out * has_newline),),
        text=language,
        tied=asks_to_tie(config, where) or (text_ties and language.tied),
    )
