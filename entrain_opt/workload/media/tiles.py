"""Squares of one size: one per image (CLIP, SigLIP), a grid of tiles (GOT-OCR2, InternVL), or one per video frame.

Sources: the CLIP, SigLIP and GOT-OCR2 image processors and the InternVL processor of Transformers 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

from entrain_opt.workload.media.frames import FrameSampling, IntArray
from entrain_opt.workload.media.rule import (
    Expansion,
    FrameValues,
    MediaRule,
    MediaSize,
    VideoFrames,
    check_sides,
    expansion_size,
)
from entrain_opt.workload.media.text import TextCounter


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedRule(MediaRule):
    """CLIP and SigLIP: every image is resized to one square.

    Attributes:
        patches: per image.
        tokens: per image.
        max_aspect_ratio: where the short side is resized and the long side cropped, the resized image of a thin strip
            would not fit in memory; None where both sides are resized.
    """

    patches: int
    tokens: int
    max_aspect_ratio: float | None = None

    def image(self, width: int, height: int) -> MediaSize:
        check_sides(width, height, self.max_aspect_ratio)
        return MediaSize(patches=self.patches, segments=1, tokens=self.tokens)


@cache
def _grids(min_tiles: int, max_tiles: int) -> list[tuple[int, int]]:
    """(columns, rows) of every grid, smallest first; the order decides between equally near grids."""
    sides = range(1, max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides]
    return sorted((g for g in grids if min_tiles <= g[0] * g[1] <= max_tiles), key=lambda g: g[0] * g[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class TileRule(MediaRule):
    """GOT-OCR2 tiling: the image is resized to a grid of tiles; a thumbnail joins if there are several.

    Attributes:
        tile_width, tile_height: pixels of one tile.
        min_tiles, max_tiles: of the grid, without the thumbnail.
        patches_per_tile, tokens_per_tile: of every tile and the thumbnail.
        opening, closing: text around an image's tokens; none by default.
        text: counts their tokens.
    """

    tile_width: int
    tile_height: int
    min_tiles: int
    max_tiles: int
    patches_per_tile: int
    tokens_per_tile: int
    opening: str = ""
    closing: str = ""
    text: TextCounter = field(default_factory=TextCounter)

    def image(self, width: int, height: int) -> MediaSize:
        tiles = self._tiles(width, height)
        pieces = self._expansion(tiles)
        return expansion_size(pieces, self.text, patches=tiles * self.patches_per_tile, segments=tiles)

    def image_expansion(self, width: int, height: int) -> Expansion:
        return self._expansion(self._tiles(width, height))

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(columns, rows): the grid whose aspect ratio is nearest.

        Among equally near grids a larger one wins while it has less than twice the pixels of the image.
        """
        if self.max_tiles < 2:
            return 1, 1
        best, best_difference = (1, 1), math.inf
        for columns, rows in _grids(self.min_tiles, self.max_tiles):
            difference = abs(width / height - columns / rows)
            is_not_excessive = width * height > 0.5 * self.tile_height * self.tile_width * columns * rows
            if difference < best_difference or (difference == best_difference and is_not_excessive):
                best, best_difference = (columns, rows), difference
        return best

    def _tiles(self, width: int, height: int) -> int:
        check_sides(width, height)
        columns, rows = self.grid(width, height)
        return columns * rows + (columns * rows > 1)

    def _expansion(self, tiles: int) -> Expansion:
        tokens = tiles * self.tokens_per_tile
        return (self.opening, tokens, self.closing) if self.opening or self.closing else (tokens,)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameSquareRule(MediaRule):
    """Videos whose sampled frames each become one square: LLaVA-OneVision and InternVL.

    Attributes:
        patches_per_frame, tokens_per_frame: of every sampled frame.
        side: pixels of a frame's square.
        values: how its pixels are scaled.
        sampling: which frames.
        newline_tokens: once, after the last frame.
        opening, closing: text around each frame's tokens.
        names_frames: whether "Frame1: " and so on, one a line, stands before each.
        text: counts the tokens of the texts.
    """

    patches_per_frame: int
    tokens_per_frame: int
    side: int
    values: FrameValues
    sampling: FrameSampling
    newline_tokens: int = 0
    opening: str = ""
    closing: str = ""
    names_frames: bool = False
    text: TextCounter = field(default_factory=TextCounter)

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("video",)

    def video(self, num_frames: int, width: int, height: int, fps: float | None = None) -> MediaSize:
        frames = len(self._indices(num_frames, width, height, fps))
        patches = frames * self.patches_per_frame
        return expansion_size(self._expansion(frames), self.text, patches=patches, segments=frames)

    def video_expansion(self, num_frames: int, width: int, height: int, fps: float | None = None) -> Expansion:
        return self._expansion(len(self._indices(num_frames, width, height, fps)))

    def video_frames(self, num_frames: int, width: int, height: int, fps: float | None = None) -> VideoFrames:
        indices = self._indices(num_frames, width, height, fps)
        return VideoFrames(indices=tuple(indices.tolist()), size=(self.side, self.side), values=self.values)

    def video_shape(self, num_frames: int, width: int, height: int, fps: float | None = None) -> tuple[int, ...]:
        """(frames,)."""
        return (len(self._indices(num_frames, width, height, fps)),)

    def _indices(self, num_frames: int, width: int, height: int, fps: float | None) -> IntArray:
        check_sides(width, height, what="video")
        return self.sampling.indices(num_frames, fps)

    def _expansion(self, frames: int) -> Expansion:
        if not self.names_frames:
            return (frames * self.tokens_per_frame + self.newline_tokens,)
        pieces: list[str | int] = []
        for frame in range(frames):
            line = f"{self.closing if frame else ''}{chr(10) if frame else ''}Frame{frame + 1}: {self.opening}"
            pieces += [line, self.tokens_per_frame]
        return (*pieces, self.closing)
