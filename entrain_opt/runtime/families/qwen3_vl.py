"""Qwen3-VL: features of several encoder layers enter several language-model layers (deepstack).

The rows after some encoder layers are kept; at the encoder's end a merger of its own makes features of each, and the
i-th of them is added to the language model's rows after its i-th layer. All travel inside the one tensor that crosses
each boundary (V vision width):

- between encoder stages, [P, V * (1 + kept)]: the rows, and beside them those kept so far;
- to the language model, [F, W * (1 + deep)]: the usual features and the deep ones side by side;
- between language-model stages, [T, W * (1 + rest)]: the rows, and the deep features that later layers still need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from entrain_opt.runtime.families.base import OUTPUT, MediaUnit, Place, Span
from entrain_opt.runtime.families.qwen2_5_vl import NativeResolutionFamily


class Qwen3VLFamily(NativeResolutionFamily):
    """`Qwen3VLForConditionalGeneration`."""

    executes_videos = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.deep_layers: list[int] = list(self.vision.deepstack_visual_indexes)

    def place_encoder(self, name: str) -> Place | None:
        rest = name.removeprefix("model.visual.deepstack_merger_list.")
        if rest != name:
            return Place("vision", OUTPUT, "projector")
        return super().place_encoder(name)

    def encoder_shape(self, unit: MediaUnit, end: int) -> tuple[int, ...]:
        kept = sum(layer < end for layer in self.deep_layers)
        return (sum(unit.patches), self.vision.hidden_size * (1 + kept))

    def features(self, patches: int, segments: int, tokens: int) -> int:
        return patches // self.merge**2  # A video's other tokens are its times.

    def feature_width(self) -> int:
        return self.llm_width() * (1 + len(self.deep_layers))

    def encode(self, model: nn.Module, hidden: Tensor, layers: tuple[int, int], unit: MediaUnit) -> Tensor:
        from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

        visual: Any = model.model.visual  # type: ignore[union-attr]
        grids = self.grids(unit, hidden.device)
        first, end = layers
        if first == 0:
            hidden = self._embed_patches(visual, hidden, grids)
        hidden, *kept = torch.split(hidden, self.vision.hidden_size, dim=1)
        offsets = get_vision_cu_seqlens(grids)
        rotary = visual.rotary_pos_emb(hidden, get_vision_position_ids(grids, self.merge))
        for index in range(first, end):
            hidden = visual.blocks[index](hidden, cu_seqlens=offsets, position_embeddings=rotary)
            if index in self.deep_layers:
                kept.append(hidden)
        if end < self.vision.depth:
            return torch.cat([hidden, *kept], dim=1)
        deep = [merger(rows.contiguous()) for merger, rows in zip(visual.deepstack_merger_list, kept, strict=True)]
        return torch.cat([visual.merger(hidden), *deep], dim=1)

    def _embed_patches(self, visual: Any, pixels: Tensor, grids: Tensor) -> Tensor:
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights

        indices, weights = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=self.merge,
        )
        hidden: Tensor = visual.patch_embed(pixels.to(visual.patch_embed.proj.weight.dtype))
        places = (visual.pos_embed(indices) * weights[:, :, None]).sum(1)
        return hidden + places.to(hidden.dtype)

    def embed(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        embedded = super().embed(model, input_ids)
        return nn.functional.pad(embedded, (0, self.feature_width() - self.llm_width()))

    def llm_shape(self, num_tokens: int, end: int) -> tuple[int, ...]:
        rest = len(self.deep_layers) - min(end, len(self.deep_layers))
        return (num_tokens, self.llm_width() * (1 + rest))

    def decode(
        self,
        model: nn.Module,
        hidden: Tensor,
        position_ids: Tensor,
        segment_offsets: list[int],
        layers: tuple[int, int],
        spans: Sequence[Span] = (),
    ) -> Tensor:
        rows, *deep = torch.split(hidden, self.llm_width(), dim=1)
        first, end = layers
        while deep and first < end:
            rows = super().decode(model, rows, position_ids, segment_offsets, (first, first + 1)) + deep.pop(0)
            first += 1
        if first < end:
            rows = super().decode(model, rows, position_ids, segment_offsets, (first, end))
        return torch.cat([rows, *deep], dim=1) if deep else rows
