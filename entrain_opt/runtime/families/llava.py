"""LLaVA: a CLIP- or SigLIP-style tower on fixed-size tiles, an MLP projector, a Llama-style language model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from entrain_opt.runtime.families.base import LLAMA_LIKE, MediaUnit, feature_layer
from entrain_opt.runtime.families.towers import SquareTowerFamily


class LlavaFamily(SquareTowerFamily):
    """`LlavaForConditionalGeneration` with one feature layer."""

    text_types = LLAMA_LIKE
    encoder_types = ("clip_vision_model", "siglip_vision_model")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vision_layers = feature_layer(config)

    def project(self, inner: Any, hidden: Tensor, unit: MediaUnit) -> Tensor:
        features: Tensor = inner.multi_modal_projector(self.select(hidden)).flatten(0, 1)
        return features

    def select(self, hidden: Tensor) -> Tensor:
        """Rows that become features: CLIP's class token is dropped by the strategy "default"."""
        return hidden[:, 1:] if self.config.vision_feature_select_strategy == "default" else hidden
