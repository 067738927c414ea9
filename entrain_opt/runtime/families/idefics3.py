"""Idefics3 and SmolVLM: tiles and the whole image, pixel shuffle, and the tiles' places written between features.

Every tile is whole, so no patch is masked. The text around the features belongs to the media item but not to the
features: see `workload/media/splits.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from entrain_opt.runtime.families.base import LLAMA_LIKE, MediaUnit
from entrain_opt.runtime.families.towers import SquareTowerFamily


class Idefics3Family(SquareTowerFamily):
    """`Idefics3ForConditionalGeneration` and `SmolVLMForConditionalGeneration`; a frame of a video is one tile."""

    executes_videos = True
    text_types = LLAMA_LIKE
    encoder_types = ("idefics3_vision", "smolvlm_vision")
    llm_name = "text_model"
    tower_name = "vision_model"
    projector_names = ("connector",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.uses_post_norm = True

    def features(self, patches: int, segments: int, tokens: int) -> int:
        return patches // int(self.config.scale_factor) ** 2

    def embed_pixels(self, tower: Any, pixels: Tensor) -> Tensor:
        side = self.vision.image_size // self.vision.patch_size
        mask = torch.ones(len(pixels), side, side, dtype=torch.bool, device=pixels.device)
        pixels = pixels.to(tower.embeddings.patch_embedding.weight.dtype)
        hidden: Tensor = tower.embeddings(pixel_values=pixels, patch_attention_mask=mask)
        return hidden

    def project(self, inner: Any, hidden: Tensor, unit: MediaUnit) -> Tensor:
        features: Tensor = inner.connector(hidden).flatten(0, 1)
        return features
