"""Gemma 3: every image is one square; with pan and scan, a long image adds crops along its longer side.

Each square stands between line breaks and a start and an end token; with crops, a sentence introduces them.

Source: the Gemma 3 image processor and processor of Transformers 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from entrain_opt.workload.media.rule import Expansion, MediaRule, MediaSize, check_sides, expansion_size
from entrain_opt.workload.media.text import TextCounter


@dataclass(frozen=True, kw_only=True, slots=True)
class PanAndScanRule(MediaRule):
    """Squares and crops.

    Attributes:
        patches_per_square, tokens_per_square: of the image and of each crop.
        text: counts the tokens of the texts around them.
        opening, closing: start and end token of a square.
        max_crops: 0 without pan and scan.
        min_crop_side: pixels.
        min_ratio: of longer to shorter side, from which crops are made.
    """

    patches_per_square: int
    tokens_per_square: int
    text: TextCounter
    opening: str = "<start_of_image>"
    closing: str = "<end_of_image>"
    max_crops: int = 0
    min_crop_side: int = 256
    min_ratio: float = 1.2

    def image(self, width: int, height: int) -> MediaSize:
        crops = self.num_crops(width, height)
        squares = crops + 1
        pieces = self._expansion(crops)
        return expansion_size(pieces, self.text, patches=squares * self.patches_per_square, segments=squares)

    def image_expansion(self, width: int, height: int) -> Expansion:
        return self._expansion(self.num_crops(width, height))

    def num_crops(self, width: int, height: int) -> int:
        """Crops beside the whole image."""
        check_sides(width, height)
        short, long = sorted((width, height))
        if self.max_crops == 0 or long / short < self.min_ratio:
            return 0
        wanted = min(long // self.min_crop_side, math.floor(long / short + 0.5))
        crops = min(self.max_crops, max(2, wanted))
        return crops if min(math.ceil(long / crops), short) >= self.min_crop_side else 0

    def _expansion(self, crops: int) -> Expansion:
        start, end = f"\n\n{self.opening}", f"{self.closing}\n\n"
        if not crops:
            return (start, self.tokens_per_square, end)
        pieces: list[str | int] = [f"Here is the original image {start}", self.tokens_per_square]
        for crop in range(crops):
            joint = " " if crop else " and here are some crops to help you see better "
            pieces += [f"{end}{joint}{start}", self.tokens_per_square]
        return (*pieces, end)
