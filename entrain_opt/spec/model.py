"""What the planner must know of a model, read from its Hugging Face config; weights are never touched.

A model is a list of encoders (each with its projector) and one language model. The only numbers kept are
those that decide time, memory and where a cut is possible. Where layers of one module differ (windows in some of them,
experts in some of them), `layer_kinds` says which; where they are all plain and alike, it is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from entrain_opt.errors import RuntimeConfigError

#: The parts of a model that can be frozen, by the names users write in a recipe.
FREEZABLE_PARTS = ("vision_tower", "audio_tower", "projector", "language_model")
#: The part that freezes an encoder's embedding and layers, by the encoder's name.
TOWER_PARTS = {"vision": "vision_tower", "audio": "audio_tower"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWindow:
    """Where a query sees less than its whole segment.

    Attributes:
        shape: `blocks` cuts a segment into chunks one after another; `squares` cuts the grid of a picture into squares;
            `sliding` lets each token see itself and the last tokens before it (causal).
        keys: that a query sees at most, in patches or tokens; a square number for `squares`.
    """

    shape: Literal["blocks", "squares", "sliding"]
    keys: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """Layers of a module that are alike.

    Attributes:
        name: what sets them apart, for tables.
        layers: their indices, ascending.
        parameters: that one layer holds.
        active_parameters: of them, those that one token goes through; fewer where a router picks some of the experts.
        intermediate_size: inner values of the feed-forward part per token (of all experts that a token goes to).
        num_experts: that a router chooses from; 0 for a dense layer.
        window: None where attention covers the whole segment.
    """

    name: str
    layers: tuple[int, ...]
    parameters: int
    active_parameters: int
    intermediate_size: int
    num_experts: int = 0
    window: AttentionWindow | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleSpec:
    """One encoder with its projector, or the language model.

    `num_layers` counts the layers that are computed: an encoder whose features are taken two layers before its
    end has that many fewer. `input_*` is the patch or token embedding, `output_*` the projector or the final norm
    with the language-model head.

    `layer_parameters` and `intermediate_size` are means over the layers, rounded up, where `layer_kinds` differ.
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
    unused_parameters: int = 0
    """In the checkpoint, but on no path to the loss: never loaded, computed or counted in `parameters`."""
    layer_kinds: tuple[LayerKind, ...] = ()
    """Every layer in one kind; empty if all are dense, alike and attend to whole segments."""
    deepstack_layers: tuple[int, ...] = ()
    """Encoder layers behind which features are also projected and added inside the language model's first layers."""
    bidirectional_media: bool = False
    """Whether the language model's tokens of one picture see each other in both directions."""
    drops_inside: bool = False
    """Whether attention or feed-forward drop values while they train, between the matrices of a layer."""

    def __post_init__(self) -> None:
        if self.layer_kinds and sorted(i for kind in self.layer_kinds for i in kind.layers) != [
            *range(self.num_layers)
        ]:
            raise RuntimeConfigError(
                f"module {self.name}: layer_kinds: expected each of layers 0 to {self.num_layers - 1} in exactly one "
                f"kind, found {[(kind.name, kind.layers) for kind in self.layer_kinds]}."
            )

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """`layer_kinds`, spelled out where all layers are alike."""
        if self.layer_kinds:
            return self.layer_kinds
        return (
            LayerKind(
                name="full",
                layers=tuple(range(self.num_layers)),
                parameters=self.layer_parameters,
                active_parameters=self.layer_parameters,
                intermediate_size=self.intermediate_size,
            ),
        )

    def kind_counts(self, first: int, end: int) -> tuple[tuple[LayerKind, int], ...]:
        """The kinds among layers `first` to `end` - 1, and how many layers of each."""
        counted = ((kind, sum(first <= layer < end for layer in kind.layers)) for kind in self.kinds)
        return tuple((kind, count) for kind, count in counted if count)

    def parameters_of_layers(self, first: int, end: int) -> int:
        """What layers `first` to `end` - 1 hold, all experts included."""
        return sum(count * kind.parameters for kind, count in self.kind_counts(first, end))

    @property
    def parameters(self) -> int:
        return self.input_parameters + self.parameters_of_layers(0, self.num_layers) + self.output_parameters

    @property
    def active_parameters(self) -> int:
        """`parameters` less the experts that one token does not go through: what computing is counted from."""
        idle = sum(
            count * (kind.parameters - kind.active_parameters) for kind, count in self.kind_counts(0, self.num_layers)
        )
        return self.parameters - idle

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

    @property
    def active_parameters(self) -> int:
        """What one token goes through; less than `parameters` where layers have experts."""
        return sum(module.active_parameters for module in self.modules)

    @property
    def unused_parameters(self) -> int:
        """In the checkpoint, but on no path to the loss."""
        return sum(module.unused_parameters for module in self.modules)

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


def check_frozen(frozen: Sequence[str], parts: Sequence[str] = FREEZABLE_PARTS) -> None:
    """Raise RuntimeConfigError if a name is not a part that can be frozen, or nothing would train.

    Args:
        frozen: names that a user wrote.
        parts: that the model has.
    """
    if unknown := [name for name in frozen if name not in FREEZABLE_PARTS]:
        raise RuntimeConfigError(f"frozen: expected names from {list(FREEZABLE_PARTS)}, found {unknown}.")
    if absent := [name for name in frozen if name not in parts]:
        raise RuntimeConfigError(f"frozen: the model has the parts {list(parts)}, found {absent}. Leave that out.")
    if set(parts) <= set(frozen):
        raise RuntimeConfigError("frozen: every part is frozen, so nothing would train; leave one out.")
