"""InternVL (Transformers' form, `internvl`): its own tower, pixel shuffle, a norm and two linear layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec.families.fields import Fields, part
from entrain_opt.spec.families.parts import Parts, asks_to_tie
from entrain_opt.spec.families.text import read_text
from entrain_opt.spec.families.towers import cut_tower, read_tower


def read_internvl(config: dict[str, Any], where: str) -> Parts:
    """InternVL 2.5, 3 and 3.5."""
    top = Fields(config, {"vision_feature_layer": -1, "downsample_ratio": 0.5}, where)
    ratio = top.get("downsample_ratio")
    if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise RuntimeConfigError(f"{where}: downsample_ratio: expected a number above 0 and up to 1, found {ratio!r}.")
    text = read_text(part(config, "text_config", where), f"{where}: text_config", default="qwen2")
    vision = read_tower(
        part(config, "vision_config", where), f"{where}: vision_config", default="internvl_vision", fixed=True
    )
    # The last feature is taken behind the tower's norm, every other one before it.
    if top.get("vision_feature_layer") != -1:
        vision, _ = cut_tower(vision, top.get("vision_feature_layer"), where, "vision_feature_layer")
    merged, out = vision.hidden_size * int(1 / ratio) ** 2, text.module.hidden_size
    projector = 2 * merged + merged * out + out + out * out + out
    return Parts(
        encoders=(replace(vision, output_parameters=vision.output_parameters + projector),),
        text=text,
        tied=asks_to_tie(config, where, default=True),
    )
