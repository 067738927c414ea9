"""One reader per family: from a Hugging Face config to encoders, projectors and language model.

A reader takes the parsed config.json and the name to use in messages. To add a family: write its reader in a file of
its own out of the towers and language models here, and list it below by `model_type`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from entrain_opt.spec.families.composed import COMPOSED_TYPE, read_composed
from entrain_opt.spec.families.gemma3 import read_gemma3
from entrain_opt.spec.families.idefics3 import read_idefics3, read_smolvlm
from entrain_opt.spec.families.internvl import read_internvl
from entrain_opt.spec.families.llava import read_llava, read_llava_next, read_llava_onevision
from entrain_opt.spec.families.mistral3 import read_mistral3
from entrain_opt.spec.families.parts import Parts, asks_to_tie
from entrain_opt.spec.families.qwen_audio import read_omni, read_qwen2_audio, read_thinker
from entrain_opt.spec.families.qwen_vl import read_qwen2_5_vl, read_qwen3_vl, read_qwen3_vl_moe
from entrain_opt.spec.families.text import TEXT_TYPES, read_text

__all__ = ["COMPOSED_TYPE", "FAMILIES", "Parts"]


def _read_language_model(config: dict[str, Any], where: str) -> Parts:
    """A language model alone: no encoder."""
    text = read_text(config, where, default="")
    return Parts(encoders=(), text=text, tied=asks_to_tie(config, where, default=text.tied))


FAMILIES: dict[str, Callable[[dict[str, Any], str], Parts]] = {
    COMPOSED_TYPE: read_composed,
    "gemma3": read_gemma3,
    "idefics3": read_idefics3,
    "internvl": read_internvl,
    "llava": read_llava,
    "llava_next": read_llava_next,
    "llava_onevision": read_llava_onevision,
    "mistral3": read_mistral3,
    "qwen2_5_omni": read_omni,
    "qwen2_5_omni_thinker": read_thinker,
    "qwen2_5_vl": read_qwen2_5_vl,
    "qwen2_audio": read_qwen2_audio,
    "qwen3_vl": read_qwen3_vl,
    "qwen3_vl_moe": read_qwen3_vl_moe,
    "smolvlm": read_smolvlm,
    **dict.fromkeys(
        (name for name in TEXT_TYPES if not name.endswith("_text") or name == "gemma3_text"), _read_language_model
    ),
}
