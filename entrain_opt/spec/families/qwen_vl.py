"""Qwen2.5-VL and Qwen3-VL (dense and with experts)."""

from __future__ import annotations

from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec.families.fields import part
from entrain_opt.spec.families.parts import Parts, asks_to_tie
from entrain_opt.spec.families.qwen_vision import read_qwen2_5_vision, read_qwen3_vision
from entrain_opt.spec.families.text import read_text


def read_qwen2_5_vl(config: dict[str, Any], where: str) -> Parts:
    """Qwen2.5-VL; older configs hold the language model's fields at the top."""
    given = part(config, "text_config", where)
    flat = {key: value for key, value in config.items() if key != "model_type"} if given is None else given
    text = read_text(flat, f"{where}: text_config", default="qwen2_5_vl_text", fixed=True)
    vision = read_qwen2_5_vision(part(config, "vision_config", where), f"{where}: vision_config")
    return Parts(encoders=(vision,), text=text, tied=asks_to_tie(config, where) or text.tied)


def read_qwen3_vl(config: dict[str, Any], where: str) -> Parts:
    """Qwen3-VL, dense."""
    return _read_qwen3(config, where, "qwen3_vl_text")


def read_qwen3_vl_moe(config: dict[str, Any], where: str) -> Parts:
    """Qwen3-VL whose language model has experts."""
    return _read_qwen3(config, where, "qwen3_vl_moe_text")


def _read_qwen3(config: dict[str, Any], where: str, text_type: str) -> Parts:
    text = read_text(part(config, "text_config", where), f"{where}: text_config", default=text_type, fixed=True)
    vision = read_qwen3_vision(part(config, "vision_config", where), f"{where}: vision_config")
    if len(vision.deepstack_layers) > text.module.num_layers:
        raise RuntimeConfigError(
            f"{where}: vision_config.deepstack_visual_indexes: expected at most one for each of the "
            f"{text.module.num_layers} layers of the language model, found {list(vision.deepstack_layers)}."
        )
    return Parts(encoders=(vision,), text=text, tied=asks_to_tie(config, where))
