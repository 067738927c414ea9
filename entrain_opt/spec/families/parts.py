"""What a family's reader hands back, and what several of them do alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from entrain_opt.spec.families.fields import Fields
from entrain_opt.spec.families.text import TextModel
from entrain_opt.spec.model import ModuleSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A model, before anything is frozen.

    Attributes:
        encoders: with their projectors.
        text: the language model.
        tied: whether its head is its embedding.
    """

    encoders: tuple[ModuleSpec, ...]
    text: TextModel
    tied: bool


def asks_to_tie(config: Mapping[str, Any], where: str, *, default: bool = False) -> bool:
    """`tie_word_embeddings` at the top of a config, where Transformers looks first."""
    return Fields(config, {"tie_word_embeddings": default}, where).flag("tie_word_embeddings")
