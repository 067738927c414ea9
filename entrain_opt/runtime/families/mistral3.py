"""Mistral 3 (Mistral Small 3.1 and 3.2): Pixtral's native-resolution tower, a merger of 2 x 2 patches, a Mistral.

The images of a unit lie in one row of patches, each attending to its own image only; rotary angles follow from row and
column. Every encoder stage must know the images' grids; nothing but the row itself crosses a boundary.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import torch
from torch import Tensor, nn

from entrain_opt.runtime.attention import PACKED_ATTENTION
from entrain_opt.runtime.families.base import INPUT, LLAMA_LIKE, OUTPUT, UNUSED, Family, MediaUnit, Place, feature_layer


class Mistral3Family(Family):
    """`Mistral3ForConditionalGeneration` with one feature layer."""

    needs_shapes = True
    text_types = LLAMA_LIKE
    encoder_types = ("pixtral",)
    encoder_attention = PACKED_ATTENTION

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vision = config.vision_config
        self.merge: int = config.spatial_merge_size
        self.vision_layers = feature_layer(config)

    def num_layers(self) -> dict[str, int]:
        return {"vision": self.vision_layers, "llm": self.llm_layers}

    def place_encoder(self, name: str) -> Place | None:
        if name.startswith("model.multi_modal_projector."):
            return Place("vision", OUTPUT, "projector")
        rest = name.removeprefix("model.vision_tower.")
        if rest == name:
            return None
        if match := re.match(r"transformer\.layers\.(\d+)\.", rest):
            layer = int(match[1])
            return Place("vision", layer if layer < self.vision_layers else UNUSED, "vision_tower")
        return Place("vision", INPUT, "vision_tower") if rest.startswith(("patch_conv.", "ln_pre.")) else None

    def image_settings(self) -> dict[str, Any]:
        # Sides are multiples of what becomes one token.
        return {"patch_size": self.vision.patch_size * self.merge}

    def arrange(self, pixels: Tensor) -> Tensor:
        side = self.vision.patch_size
        patches = nn.functional.unfold(pixels, kernel_size=side, stride=side)  # [1, values of a patch, patches]
        return patches[0].T

    def input_rows(self, unit: MediaUnit) -> tuple[int, ...]:
        return unit.patches

    def row_shape(self, module: str) -> tuple[int, ...]:
        return (self.vision.num_channels * self.vision.patch_size**2,)

    def features(self, patches: int, segments: int, tokens: int) -> int:
        return patches // self.merge**2

    def encoder_shape(self, unit: MediaUnit, end: int) -> tuple[int, ...]:
        return (sum(unit.patches), self.vision.hidden_size)

    def encode(self, model: nn.Module, hidden: Tensor, layers: tuple[int, int], unit: MediaUnit) -> Tensor:
        inner: Any = model.model
        tower, side = inner.vision_tower, self.vision.patch_size
        first, end = layers
        if first == 0:
            weight = tower.patch_conv.weight
            squares = hidden.to(weight.dtype).view(len(hidden), self.vision.num_channels, side, side)
            hidden = tower.ln_pre(tower.patch_conv(squares).flatten(1))
        positions = torch.cat([_grid(rows, columns, hidden.device) for rows, columns in unit.shapes])
        rotary = tower.patch_positional_embedding(hidden, positions)
        offsets = [0, *itertools.accumulate(unit.patches)]
        row = hidden.unsqueeze(0)
        for layer in tower.transformer.layers[first:end]:
            row = layer(row, None, position_embeddings=rotary, segment_offsets=offsets)
        hidden = row.squeeze(0)
        if end < self.vision_layers:
            return hidden
        sizes = [(rows * side, columns * side) for rows, columns in unit.shapes]
        features: Tensor = inner.multi_modal_projector(hidden, sizes)
        return features


def _grid(rows: int, columns: int, device: torch.device) -> Tensor:
    """[rows * columns, 2] row and column of each patch."""
    return torch.cartesian_prod(torch.arange(rows, device=device), torch.arange(columns, device=device))
