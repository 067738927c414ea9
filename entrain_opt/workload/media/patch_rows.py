"""Pixtral and Mistral 3: native resolution up to a longest edge, a break after every row of tokens.

1. An image whose longer side exceeds `longest_edge` shrinks to it, its sides rounded down.
2. Both sides grow to the next multiple of a token's side, `merge` patches.
3. Each row of tokens ends with a break token, the last one with an end token.

Source: the Pixtral image processor and processor of Transformers 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.media.rule import Expansion, MediaRule, MediaSize, check_sides, expansion_size
from entrain_opt.workload.media.text import TextCounter


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchRowRule(MediaRule):
    """Rows of patches.

    Attributes:
        patch_side: pixels.
        merge: patches per side of a token.
        longest_edge: pixels.
        text: counts the tokens of break and end.
        row_break, closing: what stands behind each row, and behind the last.
    """

    patch_side: int
    merge: int
    longest_edge: int
    text: TextCounter
    row_break: str = "[IMG_BREAK]"
    closing: str = "[IMG_END]"

    def image(self, width: int, height: int) -> MediaSize:
        rows, columns = self.token_grid(width, height)
        patches = rows * columns * self.merge**2
        return expansion_size(self._expansion(rows, columns), self.text, patches=patches, segments=1)

    def image_expansion(self, width: int, height: int) -> Expansion:
        return self._expansion(*self.token_grid(width, height))

    def image_shape(self, width: int, height: int) -> tuple[int, ...]:
        """(rows, columns) of patches."""
        rows, columns = self.token_grid(width, height)
        return rows * self.merge, columns * self.merge

    def token_grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of tokens.

        Raises:
            WorkloadError: the shorter side would shrink to nothing.
        """
        check_sides(width, height)
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        sides = [math.floor(side / ratio) if ratio > 1 else side for side in (height, width)]
        if min(sides) < 1:
            raise WorkloadError(
                f"image: {width} x {height} is so thin that its shorter side vanishes where the longer one becomes "
                f"{self.longest_edge} pixels. Crop the image or leave it out (policy skip)."
            )
        token_side = self.patch_side * self.merge
        rows, columns = (math.ceil(side / token_side) for side in sides)
        return rows, columns

    def _expansion(self, rows: int, columns: int) -> Expansion:
        row: tuple[str | int, ...] = (columns, self.row_break)
        return (*row * (rows - 1), columns, self.closing)
