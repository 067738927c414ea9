"""Where each Hugging Face family is cut, and how its pieces run alone."""

from __future__ import annotations

from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.families.base import INPUT, OUTPUT, UNUSED, Family, Place
from entrain_opt.runtime.families.llava import LlavaFamily

_FAMILIES: dict[str, type[Family]] = {"llava": LlavaFamily}


def family_of(config: Any) -> Family:
    """The family that knows a config's model type, or RuntimeConfigError with the known ones."""
    if config.model_type not in _FAMILIES:
        raise RuntimeConfigError(
            f"model: cannot execute model_type {config.model_type!r}; expected one of {sorted(_FAMILIES)}. "
            "CONTRIBUTING.md says how to add a family."
        )
    return _FAMILIES[config.model_type](config)


__all__ = ["INPUT", "OUTPUT", "UNUSED", "Family", "Place", "family_of"]
