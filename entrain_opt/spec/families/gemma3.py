"""Gemma 3: a SigLIP tower, pooling, a norm and one matrix; sliding and full attention in the language model.

The tokens of one picture see each other in both directions. SigLIP's pooling head, where a config has one, is unused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from entrain_opt.spec.families.fields import part
from entrain_opt.spec.families.parts import Parts, asks_to_tie
from entrain_opt.spec.families.text import read_text
from entrain_opt.spec.families.towers import read_tower


def read_gemma3(config: dict[str, Any], where: str) -> Parts:
    """Gemma 3 with pictures (4B and larger)."""
    text = read_text(part(config, "text_config", where), f"{where}: text_config", default="gemma3_text", fixed=True)
    vision = read_tower(part(config, "vision_config", where), f"{where}: vision_config", default="siglip_vision_model")
    projector = vision.hidden_size * text.module.hidden_size + vision.hidden_size
    return Parts(
        encoders=(replace(vision, output_parameters=vision.output_parameters + projector),),
        text=replace(text, module=replace(text.module, bidirectional_media=True)),
        tied=asks_to_tie(config, where, default=True),
    )
