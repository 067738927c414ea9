"""What the runtime asks of a model family.

A family answers two questions and holds no state but the config: which stage owns a parameter, and what a stage
computes. Everything else (weights, messages, gradients, checkpoints) is the same for all families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

#: Positions of a parameter within its module, besides a layer index.
INPUT, OUTPUT, UNUSED = "input", "output", "unused"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lives.

    `position` is a layer index, `INPUT` (first stage of the module), `OUTPUT` (last stage), or `UNUSED`: the model has
    the parameter but no training loss reaches it; the last stage keeps it so that nothing is lost on export.
    """

    module: str
    position: int | str
    part: str
    """Which freezable part it belongs to: `vision_tower`, `projector` or `language_model`."""


class Family(Protocol):
    """One Hugging Face model type."""

    def __init__(self, config: Any) -> None: ...

    def build(self) -> nn.Module:
        """The whole model on the current default device (meta, usually), attention set up for packed rows."""

    def num_layers(self) -> dict[str, int]:
        """Computed layers of each module."""

    def place(self, parameter_name: str) -> Place:
        """Where a parameter lives; raises RuntimeConfigError for one that the family does not know."""

    def disk_names(self, parameter_name: str) -> list[str]:
        """Names under which checkpoints of this family store a parameter, most likely first."""

    def tied(self) -> dict[str, str]:
        """Parameters that are the same tensor as another one: {name: owner}."""

    def encoder_width(self) -> int:
        """Hidden size between encoder stages."""

    def llm_width(self) -> int:
        """Hidden size between language-model stages, and of the features."""

    def encoder_rows(self, num_patches: int) -> int:
        """Rows of the sequence that one attention segment of this many patches has inside the encoder."""

    def encode(self, model: nn.Module, hidden: Tensor, layers: tuple[int, int]) -> Tensor:
        """Run encoder layers; a stage from layer 0 takes pixels, the last one returns features.

        Args:
            model: the rank's model.
            hidden: [tiles, channels, height, width] into layer 0, else [tiles, rows, encoder width].
            layers: first layer and one past the last.

        Returns:
            [tiles, rows, encoder width], or [tokens, llm width] after the last layer and the projector.
        """

    def embed(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, llm width]."""

    def decode(
        self,
        model: nn.Module,
        hidden: Tensor,
        position_ids: Tensor,
        segment_offsets: list[int],
        layers: tuple[int, int],
    ) -> Tensor:
        """Run language-model layers on one packed row: [tokens, llm width] -> the same."""

    def logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Final norm and head: [tokens, llm width] -> [tokens, vocabulary]."""
