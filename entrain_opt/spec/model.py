"""What the planner must know of a model, read from its Hugging Face config; weights are never touched.

A model is a list of encoders (each with its projector) and one language model. The only numbers kept are
those that decide time, memory and where a cut is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrain_opt.errors import RuntimeConfigError

#: The parts of a model that can be frozen, by the names users write in a recipe.
FREEZABLE_PARTS = ("vision_tower", "projector", "language_model")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSpec:
    """One encoder with its projector, or the language model.

    `num_layers` counts the layers that are computed: an encoder whose features are taken two layers before its
    end has that many fewer. `input_*` is the patch or token embedding, `output_*` the projector or the final norm
    with the language-model head.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    gated_mlp: bool
    layer_parameters: int
    input_parameters: int
    output_parameters: int
    input_width: int = 0
    """Values per patch that the patch embedding multiplies; 0 for a table look-up."""
    vocabulary_size: int = 0
    """Rows of the language-model head; 0 for an encoder."""
    trained: bool = True
    """Whether the embedding and layers train."""
    output_trained: bool = True
    """Whether the projector (encoder) or norm and head (language model) train."""

    @property
    def parameters(self) -> int:
        return self.input_parameters + self.num_layers * self.layer_parameters + self.output_parameters

    @property
    def anything_trained(self) -> bool:
        return self.trained or self.output_trained


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Encoders and the language model they feed."""

    name: str
    family: str
    encoders: tuple[ModuleSpec, ...]
    llm: ModuleSpec
    max_tokens: int
    tied_embeddings: bool = False

    @property
    def modules(self) -> tuple[ModuleSpec, ...]:
        """Encoders first, the language model last: the order of the stages in a plan."""
        return (*self.encoders, self.llm)

    @property
    def parameters(self) -> int:
        return sum(module.parameters for module in self.modules)

    def module(self, name: str) -> ModuleSpec:
        for module in self.modules:
            if module.name == name:
                return module
        raise RuntimeConfigError(
            f"module: expected one of {[m.name for m in self.modules]} of model {self.name}, found {name!r}."
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, frozen: Sequence[str] = ()) -> ModelSpec:
        """Read `config.json` of a Hugging Face folder (or cached hub id).

        Args:
            folder: the model folder.
            frozen: parts that do not train, from `FREEZABLE_PARTS`.

        Raises:
            RuntimeConfigError: the folder has no config, the family is unknown, or a frozen part is misspelled.
        """
        from entrain_opt.spec.huggingface import read_model_spec

        return read_model_spec(folder, frozen=frozen)


def check_frozen(frozen: Sequence[str]) -> None:
    """Raise if a name is not one of the parts that can be frozen."""
    unknown: list[Any] = [name for name in frozen if name not in FREEZABLE_PARTS]
    if unknown:
        raise RuntimeConfigError(f"frozen: expected names from {list(FREEZABLE_PARTS)}, found {unknown}.")
    if set(FREEZABLE_PARTS) <= set(frozen):
        raise RuntimeConfigError("frozen: every part is frozen, so nothing would train; leave one out.")
