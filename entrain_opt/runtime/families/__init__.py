"""Where each Hugging Face family is cut, and how its pieces run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from entrain_opt.errors import FAMILY_GUIDE, RuntimeConfigError
from entrain_opt.runtime.families.base import INPUT, OUTPUT, UNUSED, Family, MediaUnit, Place, Span
from entrain_opt.runtime.families.composed import ComposedFamily
from entrain_opt.runtime.families.composed_model import register_composed
from entrain_opt.runtime.families.gemma3 import Gemma3Family
from entrain_opt.runtime.families.idefics3 import Idefics3Family
from entrain_opt.runtime.families.internvl import InternVLFamily
from entrain_opt.runtime.families.llava import LlavaFamily
from entrain_opt.runtime.families.llava_next import LlavaNextFamily, LlavaOnevisionFamily
from entrain_opt.runtime.families.mistral3 import Mistral3Family
from entrain_opt.runtime.families.qwen2_5_vl import Qwen25VLFamily
from entrain_opt.runtime.families.qwen2_audio import Qwen2AudioFamily
from entrain_opt.runtime.families.qwen3_vl import Qwen3VLFamily
from entrain_opt.spec.families import COMPOSED_TYPE

_FAMILIES: dict[str, type[Family]] = {
    COMPOSED_TYPE: ComposedFamily,
    "gemma3": Gemma3Family,
    "idefics3": Idefics3Family,
    "internvl": InternVLFamily,
    "llava": LlavaFamily,
    "llava_next": LlavaNextFamily,
    "llava_onevision": LlavaOnevisionFamily,
    "mistral3": Mistral3Family,
    "qwen2_5_vl": Qwen25VLFamily,
    "qwen2_audio": Qwen2AudioFamily,
    "qwen3_vl": Qwen3VLFamily,
    "smolvlm": Idefics3Family,
}


def family_of(config: Any) -> Family:
    """The family that knows a config's model type, or RuntimeConfigError with the known ones."""
    if config.model_type not in _FAMILIES:
        raise RuntimeConfigError(
            f"model: cannot execute model_type {config.model_type!r}; expected one of {sorted(_FAMILIES)}. To add it, "
            "write a subclass of `Family` (entrain_opt/runtime/families/base.py) with `num_layers`, `place_encoder`, "
            "`encoder_shape`, `row_shape` and `encode`, and register it in entrain_opt/runtime/families/__init__.py: "
            f"see {FAMILY_GUIDE}."
        )
    family = _FAMILIES[config.model_type]
    encoder = family.encoder_configs[0] if family.encoder_configs else ""
    _check_part(family, config, "text_config", family.text_types, "`embed`, `decode` and `logits`")
    _check_part(family, config, encoder, family.encoder_types, "`place_encoder`, `encoder_shape` and `encode`")
    return family(config)


def _check_part(family: type[Family], config: Any, part: str, known: tuple[str, ...] | None, methods: str) -> None:
    """Raise RuntimeConfigError for a part that would be executed as if it were another one."""
    found = getattr(getattr(config, part, None), "model_type", None)
    if known is not None and found not in known:
        raise RuntimeConfigError(
            f"model: {part}.model_type: {family.__name__} executes {sorted(known)}, found {found!r}. To add it, write "
            f"{methods} for it in a subclass ({family.__module__.replace('.', '/')}.py): see {FAMILY_GUIDE}."
        )


def read_family(folder: str | Path) -> Family:
    """The family of a model folder.

    Raises:
        RuntimeConfigError: no config, or an unknown family.
    """
    from transformers import AutoConfig

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise RuntimeConfigError(f"model: no config.json in {folder}; expected a folder in Hugging Face format.")
    register_composed()
    return family_of(AutoConfig.from_pretrained(folder))


__all__ = ["INPUT", "OUTPUT", "UNUSED", "Family", "MediaUnit", "Place", "Span", "family_of", "read_family"]
