"""Qwen2.5-VL: a native-resolution tower with windows, and positions with three axes in the language model.

The images of a unit lie in one row of patches, in the order of their windows from the first layer to the last. Windows,
segments and rotary angles follow from the grids of the images, which every encoder stage knows; nothing but the row
itself crosses a boundary.

A video is a picture of several frames, two to a patch, whose positions follow its time, or in Qwen3-VL as many
pictures, because times stand between them in the text.

A sample's positions restart at zero; an image takes a grid of positions (frame, row, column), and what follows it
starts after the longest side. Every language-model stage needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from entrain_opt.runtime.families.base import INPUT, OUTPUT, Family, IntArray, MediaUnit, Place, consecutive_runs
from entrain_opt.workload.media.rule import FrameValues


class NativeResolutionFamily(Family):
    """What the Qwen-VL families share: places, grids and positions."""

    needs_shapes = True
    reads_text_everywhere = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vision = config.vision_config
        self.merge: int = self.vision.spatial_merge_size

    def num_layers(self) -> dict[str, int]:
        return {"vision": self.vision.depth, "llm": self.llm_layers}

    def place_encoder(self, name: str) -> Place | None:
        rest = name.removeprefix("model.visual.")
        if rest == name:
            return None
        if rest.startswith("blocks."):
            return Place("vision", int(rest.split(".")[1]), "vision_tower")
        if rest.startswith(("patch_embed.", "pos_embed.")):
            return Place("vision", INPUT, "vision_tower")
        return Place("vision", OUTPUT, "projector") if rest.startswith("merger.") else None

    def disk_names(self, parameter_name: str) -> list[str]:
        name, llm = parameter_name, "model.language_model."
        older = name.replace(llm, "model.") if name.startswith(llm) else name.removeprefix("model.")
        return [name, older]

    def video_rows(self, frames: Sequence[Any], processor: Any, values: FrameValues | None) -> Tensor:
        """[P, values]: the image processor makes an image of `temporal` equal frames; here each gets its own."""
        temporal: int = self.vision.temporal_patch_size
        rows = processor(images=list(frames), do_resize=False, return_tensors="pt")["pixel_values"]
        # One block of patches per frame; the last frame fills its group.
        own = rows.view(len(frames), -1, self.vision.in_channels, temporal, self.vision.patch_size**2)[:, :, :, 0]
        own = torch.cat([own, own[-1:].expand(-len(frames) % temporal, -1, -1, -1)])
        groups = own.unflatten(0, (-1, temporal))  # [groups, temporal, patches of a frame, channels, pixels]
        return groups.permute(0, 2, 3, 1, 4).reshape(-1, rows.shape[1])

    def encoder_shape(self, unit: MediaUnit, end: int) -> tuple[int, ...]:
        return (sum(unit.patches), self.vision.hidden_size)

    def input_rows(self, unit: MediaUnit) -> tuple[int, ...]:
        return unit.patches

    def row_shape(self, module: str) -> tuple[int, ...]:
        return (self.vision.in_channels * self.vision.temporal_patch_size * self.vision.patch_size**2,)

    def grids(self, unit: MediaUnit, device: torch.device) -> Tensor:
        """[items, 3] frames, rows and columns of patches."""
        return torch.tensor([shape[:3] for shape in unit.shapes], dtype=torch.long, device=device)

    def position_ids(self, num_tokens: int, media: Sequence[tuple[IntArray, tuple[int, ...]]]) -> IntArray:
        positions = np.empty((3, num_tokens), dtype=np.int64)
        row = position = 0
        for rows, (frames, height, width, *nanoseconds) in media:
            for run in consecutive_runs(rows):
                text = int(run[0]) - row
                positions[:, row : row + text] = np.arange(position, position + text)
                position, row = position + text, int(run[0])
                sides = (frames * len(run) // len(rows), height // self.merge, width // self.merge)
                grid = np.indices(sides)
                if nanoseconds and sides[0] > 1:
                    grid[0] = self._group_positions(sides[0], nanoseconds[0])[:, None, None]
                positions[:, row : row + len(run)] = grid.reshape(3, -1) + position
                position, row = position + max(sides[1:]), row + len(run)
        positions[:, row:] = np.arange(position, position + num_tokens - row)
        return positions

    def _group_positions(self, groups: int, nanoseconds: int) -> IntArray:
        """Positions of a video's groups of frames: time in units of the model, in the precision that it takes."""
        step = np.float32(self.vision.tokens_per_second) * np.float32(nanoseconds / 1e9)
        return (np.arange(groups, dtype=np.float32) * step).astype(np.int64)


class Qwen25VLFamily(NativeResolutionFamily):
    """`Qwen2_5_VLForConditionalGeneration`."""

    executes_videos = True

    def encode(self, model: nn.Module, hidden: Tensor, layers: tuple[int, int], unit: MediaUnit) -> Tensor:
        from transformers.vision_utils import (
            get_vision_cu_seqlens,
            get_vision_position_ids,
            get_vision_window_index,
        )

        visual: Any = model.model.visual  # type: ignore[union-attr]
        grids = self.grids(unit, hidden.device)
        order, window_offsets = get_vision_window_index(
            grids,
            spatial_merge_size=self.merge,
            window_size=self.vision.window_size,
            patch_size=self.vision.patch_size,
        )
        segment_offsets = get_vision_cu_seqlens(grids)
        order = order.to(hidden.device)
        first, end = layers
        if first == 0:
            weight = visual.patch_embed.proj.weight
            hidden = self._reordered(visual.patch_embed(hidden.to(weight.dtype)), order)
        rotary = visual.rotary_pos_emb(hidden, get_vision_position_ids(grids, self.merge))
        rotary = tuple(self._reordered(angles, order) for angles in rotary)
        for index in range(first, end):
            is_full = index in self.vision.fullatt_block_indexes
            offsets = segment_offsets if is_full else window_offsets
            hidden = visual.blocks[index](hidden, cu_seqlens=offsets, position_embeddings=rotary)
        if end < self.vision.depth:
            return hidden
        features: Tensor = visual.merger(hidden)[torch.argsort(order)]
        return features

    def _reordered(self, rows: Tensor, order: Tensor) -> Tensor:
        """[P, ...] with the patches of each token together, tokens in the given order."""
        tokens = rows.reshape(len(order), self.merge**2, -1)
        return tokens[order].reshape(len(rows), -1)
