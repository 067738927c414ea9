"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: native resolution within a pixel budget; frames of a video in temporal pairs.

An image's sides are rounded to multiples of patch * merge. A video's sampled frames are grouped by `temporal` (the last
one repeats to fill a group); Qwen2-VL gives every frame the image's kind of budget, Qwen3-VL one budget to the whole
clip, and writes a timestamp before each group. The encoder attends within a group.

Source: the smart resize of the Qwen2-VL image and video processors and of the Qwen3-VL video processor, and the texts
of the Qwen3-VL processor, of Transformers 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.media.frames import ASSUMED_FPS, FrameSampling, IntArray
from entrain_opt.workload.media.rule import (
    Expansion,
    MediaRule,
    MediaSize,
    VideoFrames,
    check_sides,
    expansion_size,
)
from entrain_opt.workload.media.text import TextCounter

#: The processors' own guard.
MAX_ASPECT_RATIO = 200.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SmartResizeRule(MediaRule):
    """Images: sides are rounded to multiples of patch * merge within a pixel budget.

    Attributes:
        patch_side: pixels.
        merge: patches per token and side.
        min_pixels, max_pixels: of the resized image.
    """

    patch_side: int
    merge: int
    min_pixels: int
    max_pixels: int

    def image(self, width: int, height: int) -> MediaSize:
        columns, rows = (side // self.patch_side for side in self.resized(width, height))
        return MediaSize(patches=columns * rows, segments=1, tokens=columns * rows // self.merge**2)

    def image_shape(self, width: int, height: int) -> tuple[int, ...]:
        """(1, rows, columns) of the grid of patches."""
        columns, rows = (side // self.patch_side for side in self.resized(width, height))
        return 1, rows, columns

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that the processor resizes to, each at least one merged patch."""
        check_sides(width, height, MAX_ASPECT_RATIO)
        return resized_sides(
            width,
            height,
            factor=self.patch_side * self.merge,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SmartResizeVideoRule(MediaRule):
    """Videos of the Qwen-VL families.

    Attributes:
        patch_side, merge: as for images.
        temporal: frames per group.
        min_pixels, max_pixels: of a resized frame, or of the clip where `clip_budget`.
        sampling: which frames.
        clip_budget: Qwen3-VL's way.
        max_video_tokens: Qwen2-VL: merged patches of a whole clip, of which 90 % are shared evenly by its frames;
            Qwen3-VL: of one frame. None where the processor does not cap (`cap_pixels_per_frame`).
        timestamps: counts the tokens of the times; None where none are written.
        opening, closing: text around each group, where times are written.
    """

    patch_side: int
    merge: int
    temporal: int
    min_pixels: int
    max_pixels: int
    sampling: FrameSampling
    clip_budget: bool = False
    max_video_tokens: int | None = None
    timestamps: TextCounter | None = None
    opening: str = "<|vision_start|>"
    closing: str = "<|vision_end|>"

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("video",)

    def video(self, num_frames: int, width: int, height: int, fps: float | None = None) -> MediaSize:
        indices = self.sampling.indices(num_frames, fps)
        columns, rows = (side // self.patch_side for side in self.resized(len(indices), width, height))
        groups = math.ceil(len(indices) / self.temporal)
        patches = groups * columns * rows
        if self.timestamps is None:
            return MediaSize(patches=patches, segments=groups, tokens=patches // self.merge**2)
        pieces = self._expansion(indices, columns * rows // self.merge**2, fps)
        return expansion_size(pieces, self.timestamps, patches=patches, segments=groups)

    def video_shape(self, num_frames: int, width: int, height: int, fps: float | None = None) -> tuple[int, ...]:
        """(groups of frames, rows and columns of patches, nanoseconds from one group to the next)."""
        frames = self.video_frames(num_frames, width, height, fps)
        columns, rows = (side // self.patch_side for side in frames.size)
        groups = math.ceil(len(frames.indices) / self.temporal)
        rate = ASSUMED_FPS if fps is None else len(frames.indices) / num_frames * fps
        return groups, rows, columns, round(1e9 * self.temporal / rate)

    def video_frames(self, num_frames: int, width: int, height: int, fps: float | None = None) -> VideoFrames:
        indices = self.sampling.indices(num_frames, fps)
        return VideoFrames(indices=tuple(indices.tolist()), size=self.resized(len(indices), width, height))

    def video_expansion(self, num_frames: int, width: int, height: int, fps: float | None = None) -> Expansion:
        if self.timestamps is None:
            return (self.video(num_frames, width, height, fps).tokens,)
        indices = self.sampling.indices(num_frames, fps)
        columns, rows = (side // self.patch_side for side in self.resized(len(indices), width, height))
        return self._expansion(indices, columns * rows // self.merge**2, fps)

    def resized(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """(width, height) of the frames of a clip of `num_frames` sampled frames.

        Raises:
            WorkloadError: the processor refuses it.
        """
        factor = self.patch_side * self.merge
        if not self.clip_budget:
            check_sides(width, height, MAX_ASPECT_RATIO, what="video")
            max_pixels = self.max_pixels
            if self.max_video_tokens is not None:
                total = int(self.max_video_tokens * factor * factor * 0.9)
                share = total * self.temporal // num_frames
                max_pixels = max(min(max_pixels, share), int(self.min_pixels * 1.05))
            return resized_sides(width, height, factor=factor, min_pixels=self.min_pixels, max_pixels=max_pixels)
        check_sides(width, height, what="video")
        if num_frames < self.temporal:
            raise WorkloadError(
                f"video: expected at least {self.temporal} sampled frames, found {num_frames}. "
                "Leave it out (policy skip), or give it as an image."
            )
        if min(width, height) < factor:
            scale = max(factor / width, factor / height)
            width, height = int(width * scale), int(height * scale)
        check_sides(width, height, MAX_ASPECT_RATIO, what="video")
        max_pixels = self.max_pixels
        if self.max_video_tokens is not None:
            per_frame = min(self.max_video_tokens * factor * factor, self.max_pixels // num_frames)
            max_pixels = max(per_frame, int(self.min_pixels * 1.05)) * num_frames
        return resized_sides(
            width,
            height,
            factor=factor,
            min_pixels=self.min_pixels,
            max_pixels=max_pixels,
            num_frames=num_frames,
            counted_frames=round(num_frames / self.temporal) * self.temporal,
        )

    def _expansion(self, indices: IntArray, tokens_per_group: int, fps: float | None) -> Expansion:
        """A group's time is the mean of its first and last frame's."""
        repeats = np.repeat(indices[-1:], -len(indices) % self.temporal)
        seconds = np.concatenate([indices, repeats]).reshape(-1, self.temporal) / (fps or ASSUMED_FPS)
        pieces: list[str | int] = []
        for time in ((seconds[:, 0] + seconds[:, -1]) / 2).tolist():
            pieces += [f"{self.closing if pieces else ''}<{time:.1f} seconds>{self.opening}", tokens_per_group]
        return (*pieces, self.closing)


def resized_sides(
    width: int,
    height: int,
    *,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    num_frames: int = 1,
    counted_frames: int = 1,
) -> tuple[int, int]:
    """(width, height) as multiples of `factor`, at least one each, such that all frames fit in the budget.

    Args:
        width, height: of one frame, in pixels.
        factor: pixels.
        min_pixels, max_pixels: of all frames together.
        num_frames: by which the sides are scaled.
        counted_frames: by which the budget is judged.
    """
    sides = [round(side / factor) * factor for side in (width, height)]
    pixels = num_frames * height * width
    if counted_frames * sides[0] * sides[1] > max_pixels:
        scale = math.sqrt(pixels / max_pixels)
        sides = [math.floor(side / scale / factor) * factor for side in (width, height)]
    elif counted_frames * sides[0] * sides[1] < min_pixels:
        scale = math.sqrt(min_pixels / pixels)
        sides = [math.ceil(side * scale / factor) * factor for side in (width, height)]
    return max(factor, sides[0]), max(factor, sides[1])
