"""Idefics3 and SmolVLM: a SigLIP-like tower without head, pixel shuffle, one linear layer without bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from entrain_opt.spec.families.fields import Fields, part
from entrain_opt.spec.families.parts import Parts, asks_to_tie
from entrain_opt.spec.families.text import read_text
from entrain_opt.spec.families.towers import read_tower


def read_idefics3(config: dict[str, Any], where: str) -> Parts:
    """Idefics3."""
    return _read(config, where, "idefics3_vision")


def read_smolvlm(config: dict[str, Any], where: str) -> Parts:
    """SmolVLM and SmolVLM2."""
    return _read(config, where, "smolvlm_vision")


def _read(config: dict[str, Any], where: str, tower: str) -> Parts:
    scale = Fields(config, {"scale_factor": 2}, where).count("scale_factor")
    text = read_text(part(config, "text_config", where), f"{where}: text_config", default="llama")
    vision = read_tower(part(config, "vision_config", where), f"{where}: vision_config", default=tower, fixed=True)
    projector = vision.hidden_size * scale**2 * text.module.hidden_size
    return Parts(
        encoders=(replace(vision, output_parameters=vision.output_parameters + projector),),
        text=text,
        tied=asks_to_tie(config, where),
    )
