"""InternVL: tiles and a thumbnail through a ViT with a class token, pixel shuffle, an MLP projector."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.families.base import INPUT, LLAMA_LIKE, OUTPUT, UNUSED, Family, MediaUnit, Place, feature_layer


class InternVLFamily(Family):
    """`InternVLForConditionalGeneration`; each frame of a video is one tile."""

    executes_videos = True
    text_types = LLAMA_LIKE
    encoder_types = ("internvl_vision",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vision = config.vision_config
        if config.vision_feature_select_strategy != "default":
            raise RuntimeConfigError(
                'model: config.vision_feature_select_strategy is expected to be "default", found '
                f"{config.vision_feature_select_strategy!r}."
            )
        self.vision_layers = feature_layer(config)
        # Only the feature layer -1 stands for the tower's output, after its norm.
        self.uses_norm = config.vision_feature_layer == -1
        self.rows = (_side(self.vision.image_size) // _side(self.vision.patch_size)) ** 2 + 1

    def num_layers(self) -> dict[str, int]:
        return {"vision": self.vision_layers, "llm": self.llm_layers}

    def place_encoder(self, name: str) -> Place | None:
        rest = name.removeprefix("model.vision_tower.")
        if rest == name:
            return Place("vision", OUTPUT, "projector") if name.startswith("model.multi_modal_projector.") else None
        if match := re.match(r"encoder\.layer\.(\d+)\.", rest):
            layer = int(match[1])
            return Place("vision", layer if layer < self.vision_layers else UNUSED, "vision_tower")
        if rest == "embeddings.mask_token":
            return Place("vision", UNUSED, "vision_tower")
        if rest.startswith("embeddings."):
            return Place("vision", INPUT, "vision_tower")
        if rest.startswith("layernorm."):
            return Place("vision", OUTPUT if self.uses_norm else UNUSED, "vision_tower")
        return None

    def image_settings(self) -> dict[str, Any]:
        return {"crop_to_patches": True}

    def features(self, patches: int, segments: int, tokens: int) -> int:
        side = int((patches // segments - 1) ** 0.5)
        return segments * int(side * self.config.downsample_ratio) ** 2

    def encoder_shape(self, unit: MediaUnit, end: int) -> tuple[int, ...]:
        return (sum(unit.segments), self.rows, self.vision.hidden_size)

    def row_shape(self, module: str) -> tuple[int, ...]:
        return (self.vision.num_channels, *[_side(self.vision.image_size)] * 2)

    def encode(self, model: nn.Module, hidden: Tensor, layers: tuple[int, int], unit: MediaUnit) -> Tensor:
        inner: Any = model.model
        tower = inner.vision_tower
        first, end = layers
        if first == 0:
            hidden = tower.embeddings(hidden.to(tower.embeddings.cls_token.dtype))
        for layer in tower.encoder.layer[first:end]:
            hidden = layer(hidden)
        if end < self.vision_layers:
            return hidden
        if self.uses_norm:
            hidden = tower.layernorm(hidden)
        return self.project(inner, hidden)

    def project(self, inner: Any, hidden: Tensor) -> Tensor:
        """[tiles, rows, vision width] of the last layer -> [features, llm width]."""
        side = int((self.rows - 1) ** 0.5)
        grid = hidden[:, 1:].reshape(len(hidden), side, side, -1)
        merged = inner.pixel_shuffle(grid, scale_factor=self.config.downsample_ratio)
        features: Tensor = inner.multi_modal_projector(merged.flatten(1, 2)).flatten(0, 1)
        return features


def _side(value: Any) -> int:
    """A side written as a number or as two equal ones."""
    return int(value[0] if isinstance(value, (list, tuple)) else value)
