"""LLaVA-NeXT and LLaVA-OneVision: any resolution by a grid of tiles, with padding removed and row ends marked.

1. Of the allowed resolutions, the one that keeps most of the image's pixels and wastes least is chosen.
2. The image is padded to it and cut into tiles; the whole image joins as one more tile.
3. Rows or columns of features that are all padding are dropped, and every remaining row ends with a newline feature.
4. OneVision shrinks the features (bilinear) where they exceed `max_tiles` tiles by more than 10 % per side.
   Where a sample has several images, OneVision takes each as one padded square and a newline.

Source: the LLaVA-NeXT and LLaVA-OneVision processors and models of Transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from entrain_opt.workload.media.rule import MediaRule, MediaSize, check_sides


@dataclass(frozen=True, kw_only=True, slots=True)
class AnyResolutionRule(MediaRule):
    """Tiles at one of several resolutions.

    Attributes:
        tile_side: pixels.
        grid_side: features per side of a tile.
        patches_per_tile: what the tower computes on, class token included.
        resolutions: allowed (height, width) in pixels.
        max_tiles: where OneVision starts to shrink; None for LLaVA-NeXT, which never does.
    """

    tile_side: int
    grid_side: int
    patches_per_tile: int
    resolutions: tuple[tuple[int, int], ...]
    max_tiles: int | None = None

    def image(self, width: int, height: int) -> MediaSize:
        check_sides(width, height)
        best_height, best_width = self.resolution(width, height)
        tiles = 1 + math.ceil(best_height / self.tile_side) * math.ceil(best_width / self.tile_side)
        tile_rows, tile_columns = best_height // self.tile_side, best_width // self.tile_side
        rows, columns = self._kept_features(width, height, tile_rows * self.grid_side, tile_columns * self.grid_side)
        tokens = self.grid_side**2 + rows * (columns + 1)
        return MediaSize(patches=tiles * self.patches_per_tile, segments=tiles, tokens=tokens)

    def images(self, sizes: Sequence[tuple[int, int]]) -> list[MediaSize]:
        if self.max_tiles is None or len(sizes) < 2:
            return [self.image(width, height) for width, height in sizes]
        for width, height in sizes:
            check_sides(width, height)
        square = MediaSize(patches=self.patches_per_tile, segments=1, tokens=self.grid_side**2 + 1)
        return [square] * len(sizes)

    def resolution(self, width: int, height: int) -> tuple[int, int]:
        """(height, width) of the allowed resolution that suits best; the first of equals."""

        def suitability(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - resolution[0] * resolution[1]

        return max(self.resolutions, key=suitability)

    def _kept_features(self, width: int, height: int, rows: int, columns: int) -> tuple[int, int]:
        """(rows, columns) of the tiles' features without padding, shrunk if they are too many."""
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        if self.max_tiles is not None:
            ratio = math.sqrt(rows * columns / (self.max_tiles * self.grid_side**2))
            if ratio > 1.1:
                return int(rows // ratio), int(columns // ratio)
        return rows, columns
