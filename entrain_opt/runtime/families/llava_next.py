"""LLaVA-NeXT and LLaVA-OneVision: any resolution by a grid of tiles.

The last encoder stage projects all tiles at once, drops the padding of each image and ends each row of features with a
newline embedding, which trains with the projector. It must know the images' sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from entrain_opt.runtime.families.base import OUTPUT, MediaUnit, Place
from entrain_opt.runtime.families.llava import LlavaFamily


class LlavaNextFamily(LlavaFamily):
    """`LlavaNextForConditionalGeneration`."""

    needs_shapes = True

    def place_encoder(self, name: str) -> Place | None:
        if name == "model.image_newline":
            return Place("vision", OUTPUT, "projector")
        return super().place_encoder(name)

    def project(self, inner: Any, hidden: Tensor, unit: MediaUnit) -> Tensor:
        projected = inner.multi_modal_projector(self.select(hidden))
        of_items = torch.split(projected, list(unit.segments))
        return torch.cat(self.pack(inner, of_items, list(unit.shapes)))

    def pack(self, inner: Any, of_items: Any, sizes: list[tuple[int, ...]]) -> list[Tensor]:
        """Features of each image, given (height, width) in pixels: without padding, with newlines."""
        packed: list[Tensor] = inner.pack_image_features(
            of_items,
            sizes,
            vision_feature_select_strategy=self.config.vision_feature_select_strategy,
            image_newline=inner.image_newline,
        )[0]
        return packed


class LlavaOnevisionFamily(LlavaNextFamily):
    """`LlavaOnevisionForConditionalGeneration`; frames of a video are pooled, and one newline ends them all."""

    executes_videos = True

    def pack(self, inner: Any, of_items: Any, sizes: list[tuple[int, ...]]) -> list[Tensor]:
        return [self._pack_one(inner, item, size) for item, size in zip(of_items, sizes, strict=True)]

    def _pack_one(self, inner: Any, item: Tensor, size: tuple[int, ...]) -> Tensor:
        """Features of an image, given (height, width), or of a video, given (frames,)."""
        if len(size) == 1:
            return torch.cat([inner.apply_pooling(item).flatten(0, 1), inner.image_newline[None]])
        packed: Tensor = inner.pack_image_features(
            [item],
            [size],
            image_newline=inner.image_newline,
            vision_aspect_ratio=self.config.vision_aspect_ratio,
        )[0][0]
        return packed
