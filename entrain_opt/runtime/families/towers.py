"""Vision towers that take squares of one size: CLIP and SigLIP."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from entrain_opt.runtime.families.base import INPUT, OUTPUT, UNUSED, Family, MediaUnit, Place


class SquareTowerFamily(Family):
    """A CLIP- or SigLIP-style tower on squares and a projector; features are those of one layer.

    Subclasses say where tower and projector are, and what becomes of the last layer's rows in `project`.
    """

    tower_name = "vision_tower"
    projector_names: tuple[str, ...] = ("multi_modal_projector",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vision = config.vision_config
        self.vision_layers: int = self.vision.num_hidden_layers
        self.uses_post_norm = False
        self.has_class_token: bool = self.vision.model_type == "clip_vision_model"

    def num_layers(self) -> dict[str, int]:
        return {"vision": self.vision_layers, "llm": self.llm_layers}

    def place_encoder(self, name: str) -> Place | None:
        rest = name.removeprefix(f"model.{self.tower_name}.")
        if rest != name:
            rest = rest.removeprefix("vision_model.")
            if match := re.match(r"encoder\.layers\.(\d+)\.", rest):
                layer = int(match[1])
                return Place("vision", layer if layer < self.vision_layers else UNUSED, "vision_tower")
            if rest.startswith(("embeddings.", "pre_layrnorm.")):
                return Place("vision", INPUT, "vision_tower")
            if rest.startswith("post_layernorm."):
                return Place("vision", OUTPUT if self.uses_post_norm else UNUSED, "vision_tower")
            return Place("vision", UNUSED, "vision_tower") if rest.startswith("head.") else None
        if name.startswith(tuple(f"model.{projector}." for projector in self.projector_names)):
            return Place("vision", OUTPUT, "projector")
        return None

    def rows_per_segment(self) -> int:
        """Rows of one square inside the tower: its patches, and CLIP's class token."""
        return int((self.vision.image_size // self.vision.patch_size) ** 2 + self.has_class_token)

    def encoder_shape(self, unit: MediaUnit, end: int) -> tuple[int, ...]:
        return (sum(unit.segments), self.rows_per_segment(), self.vision.hidden_size)

    def row_shape(self, module: str) -> tuple[int, ...]:
        return (self.vision.num_channels, self.vision.image_size, self.vision.image_size)

    def tower(self, model: nn.Module) -> Any:
        tower = getattr(model.model, self.tower_name)
        return getattr(tower, "vision_model", tower)

    def embed_pixels(self, tower: Any, pixels: Tensor) -> Tensor:
        """[tiles, channels, height, width] -> [tiles, rows, width]."""
        hidden: Tensor = tower.embeddings(pixels.to(tower.embeddings.patch_embedding.weight.dtype))
        return tower.pre_layrnorm(hidden) if hasattr(tower, "pre_layrnorm") else hidden

    def encode(self, model: nn.Module, hidden: Tensor, layers: tuple[int, int], unit: MediaUnit) -> Tensor:
        tower = self.tower(model)
        first, end = layers
        if first == 0:
            hidden = self.embed_pixels(tower, hidden)
        for layer in tower.encoder.layers[first:end]:
            hidden = layer(hidden, None)
        if end < self.vision_layers:
            return hidden
        if self.uses_post_norm:
            hidden = tower.post_layernorm(hidden)
        return self.project(model.model, hidden, unit)

    def project(self, inner: Any, hidden: Tensor, unit: MediaUnit) -> Tensor:
        """[tiles, rows, vision width] of the last layer -> [features, llm width]."""
        features: Tensor = inner.multi_modal_projector(hidden).flatten(0, 1)
        return features
