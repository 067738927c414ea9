"""Idefics3 and SmolVLM: the longest edge is resized, the image cut into tiles, and every tile announced by its place.

1. The longest edge becomes `longest_edge`, the other follows and is made even; neither exceeds 4096 pixels.
2. Both sides grow to multiples of the tile. One tile: the image stands alone. More: all tiles, row by row, and the
   whole image as one more.
3. Text around the features: a fake token and `<row_r_col_c>` before each tile, a line break after each row, a fake
   token and `<global-img>` before the whole image, a fake token at the end.

SmolVLM's videos are sampled frames of one tile each, with a sentence before them and a time before each.

Source: the Idefics3 and SmolVLM image and video processors and processors of Transformers 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.media.frames import ASSUMED_FPS, FrameSampling, IntArray
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

_MAX_SIDE = 4096
_FAKE, _GLOBAL = "<fake_token_around_image>", "<global-img>"
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRule(MediaRule):
    """Tiles in reading order and the whole image.

    Attributes:
        longest_edge: pixels of the resized image; None where the image is never split.
        tile_side: pixels.
        patches_per_tile, tokens_per_tile: of each tile and of the whole image.
        text: counts the tokens of the tags.
    """

    longest_edge: int | None
    tile_side: int
    patches_per_tile: int
    tokens_per_tile: int
    text: TextCounter

    def image(self, width: int, height: int) -> MediaSize:
        rows, columns = self.grid(width, height)
        tiles = rows * columns + 1
        pieces = split_expansion(rows, columns, self.tokens_per_tile)
        return expansion_size(pieces, self.text, patches=tiles * self.patches_per_tile, segments=tiles)

    def image_expansion(self, width: int, height: int) -> Expansion:
        return split_expansion(*self.grid(width, height), self.tokens_per_tile)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of tiles beside the whole image; (0, 0) if the image fits one tile.

        Raises:
            WorkloadError: the processor refuses the size.
        """
        check_sides(width, height)
        if self.longest_edge is None:
            return 0, 0
        sides = _even_scaled(width, height, self.longest_edge)
        if max(sides) > _MAX_SIDE:
            sides = _scaled(*sides, _MAX_SIDE)
            sides = (max(1, sides[0]), max(1, sides[1]))
        sides = _scaled(*sides, math.ceil(max(sides) / self.tile_side) * self.tile_side)
        columns, rows = (math.ceil(side / self.tile_side) for side in sides)
        if rows * columns == 0:
            raise WorkloadError(
                f"image: {width} x {height} is so thin that its short side rounds to 0 pixels. "
                "Crop the image or leave it out (policy skip)."
            )
        return (rows, columns) if rows * columns > 1 else (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedFrameRule(MediaRule):
    """SmolVLM's videos.

    Attributes:
        patches_per_frame, tokens_per_frame: of every sampled frame.
        longest_edge: pixels of a frame's longer side, before it is made a square.
        side: pixels of that square.
        values: how its pixels are scaled.
        sampling: which frames.
        text: counts the tokens of the sentences and tags.
    """

    patches_per_frame: int
    tokens_per_frame: int
    longest_edge: int
    side: int
    values: FrameValues
    sampling: FrameSampling
    text: TextCounter

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("video",)

    def video(self, num_frames: int, width: int, height: int, fps: float | None = None) -> MediaSize:
        indices = self._indices(num_frames, width, height, fps)
        pieces = self._expansion(indices, num_frames, fps)
        patches = len(indices) * self.patches_per_frame
        return expansion_size(pieces, self.text, patches=patches, segments=len(indices))

    def video_expansion(self, num_frames: int, width: int, height: int, fps: float | None = None) -> Expansion:
        return self._expansion(self._indices(num_frames, width, height, fps), num_frames, fps)

    def video_frames(self, num_frames: int, width: int, height: int, fps: float | None = None) -> VideoFrames:
        indices = self._indices(num_frames, width, height, fps)
        return VideoFrames(
            indices=tuple(indices.tolist()),
            first_size=_even_scaled(width, height, min(self.longest_edge, _MAX_SIDE)),
            size=(self.side, self.side),
            values=self.values,
        )

    def _indices(self, num_frames: int, width: int, height: int, fps: float | None) -> IntArray:
        check_sides(width, height, what="video")
        return self.sampling.indices(num_frames, fps)

    def _expansion(self, indices: IntArray, num_frames: int, fps: float | None) -> Expansion:
        rate = fps or ASSUMED_FPS
        length = timedelta(seconds=int(num_frames / rate))
        lead = (
            f"You are provided the following series of {number_words(len(indices))} frames from a {length} "
            "[H:MM:SS] video.\n"
        )
        pieces: list[str | int] = []
        for second in (indices / rate).tolist():
            time = f"\nFrame from {int(second // 60):02d}:{int(second % 60):02d}:"
            pieces += [f"{_FAKE if pieces else lead}{time}{_FAKE}{_GLOBAL}", self.tokens_per_frame]
        return (*pieces, f"{_FAKE}\n\n")


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """(width, height) of the same shape whose longer side is `longest`; the other is rounded down."""
    ratio = width / height
    return (longest, int(longest / ratio)) if width >= height else (int(longest * ratio), longest)


def _even_scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """The same, the other side made even and at least 1."""
    sides = _scaled(width, height, longest)
    sides = (sides[0], sides[1] + sides[1] % 2) if width >= height else (sides[0] + sides[0] % 2, sides[1])
    return max(1, sides[0]), max(1, sides[1])


def split_expansion(rows: int, columns: int, tokens_per_tile: int) -> Expansion:
    """Tags and features of an image of `rows` x `columns` tiles; 0 x 0 is the whole image alone."""
    pieces: list[str | int] = []
    for row in range(rows):
        for column in range(columns):
            line_break = "\n" if row and not column else ""
            pieces += [f"{line_break}{_FAKE}<row_{row + 1}_col_{column + 1}>", tokens_per_tile]
    return (*pieces, f"{chr(10) * 2 if pieces else ''}{_FAKE}{_GLOBAL}", tokens_per_tile, _FAKE)


def number_words(number: int) -> str:
    """A number below a million in English words, as SmolVLM writes its count of frames."""
    if number >= 1000:
        thousands, rest = divmod(number, 1000)
        joint = "" if not rest else " and " if rest < 100 else ", "
        return f"{number_words(thousands)} thousand{joint}{number_words(rest) if rest else ''}"
    if number >= 100:
        hundreds, rest = divmod(number, 100)
        return f"{_ONES[hundreds]} hundred" + (f" and {number_words(rest)}" if rest else "")
    if number >= 20:
        tens, rest = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[rest]}" if rest else "")
    return _ONES[number]
