"""Qwen2-Audio, and the thinker of Qwen2.5-Omni, which hears and sees.

Of a whole Qwen2.5-Omni only the thinker is read: talker and vocoder are not trained here and not counted. Its audio
projection is part of the encoder's weights and counts as the projector.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec.families.audio import read_audio
from entrain_opt.spec.families.fields import part
from entrain_opt.spec.families.parts import Parts, asks_to_tie
from entrain_opt.spec.families.qwen_vision import read_qwen2_5_vision
from entrain_opt.spec.families.text import read_text


def read_qwen2_audio(config: dict[str, Any], where: str) -> Parts:
    """Qwen2-Audio; Transformers never ties its head."""
    text = read_text(part(config, "text_config", where), f"{where}: text_config", default="qwen2")
    audio, _ = read_audio(part(config, "audio_config", where), f"{where}: audio_config", default="qwen2_audio_encoder")
    out = text.module.hidden_size
    projector = audio.hidden_size * out + out
    return Parts(
        encoders=(replace(audio, output_parameters=audio.output_parameters + projector),), text=text, tied=False
    )


def read_thinker(config: dict[str, Any], where: str) -> Parts:
    """The thinker of Qwen2.5-Omni."""
    text = read_text(
        part(config, "text_config", where), f"{where}: text_config", default="qwen2_5_omni_text", fixed=True
    )
    audio, _ = read_audio(
        part(config, "audio_config", where),
        f"{where}: audio_config",
        default="qwen2_5_omni_audio_encoder",
        fixed=True,
    )
    vision = read_qwen2_5_vision(part(config, "vision_config", where), f"{where}: vision_config")
    return Parts(encoders=(audio, vision), text=text, tied=asks_to_tie(config, where))


def read_omni(config: dict[str, Any], where: str) -> Parts:
    """A whole Qwen2.5-Omni: its thinker.

    Raises:
        RuntimeConfigError: it has none.
    """
    thinker = part(config, "thinker_config", where)
    if thinker is None:
        raise RuntimeConfigError(f"{where}: thinker_config: expected the config of the thinker, found none.")
    return read_thinker(thinker, f"{where}: thinker_config")
