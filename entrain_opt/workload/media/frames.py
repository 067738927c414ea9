"""Which frames of a video a processor takes.

Promise: the indices that the video processor of the same name takes from a video of that many frames and that rate; a
video that it refuses raises. Loader and planner ask the same function.

Sources: `sample_frames` of the Qwen2-VL, Qwen3-VL, InternVL and SmolVLM video processors of Transformers 5, and the
default that the others share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from entrain_opt.errors import WorkloadError

IntArray = NDArray[np.int64]
Method = Literal["all", "uniform", "qwen2", "qwen3", "internvl", "smolvlm"]
#: What Qwen3-VL assumes of a video whose rate is unknown, and SmolVLM's timestamps where every frame is taken.
ASSUMED_FPS = 24.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameSampling:
    """How frames are chosen.

    Attributes:
        method: whose way; `all` takes every frame.
        fps: frames wanted per second of video.
        num_frames: frames wanted per video; for `smolvlm` the most.
        min_frames, max_frames: limits where fps decides.
        multiple: the number taken is a multiple of this (`qwen2`).
        initial_shift: first frame (`internvl`); None is the middle of the first interval.
    """

    method: Method = "all"
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    multiple: int = 2
    initial_shift: float | None = None

    def indices(self, num_frames: int, fps: float | None = None) -> IntArray:
        """[frames taken] of a video of `num_frames` at `fps` (None: unknown).

        Raises:
            WorkloadError: the video has no frames or too few, or its rate is needed and unknown.
        """
        if num_frames < 1:
            raise WorkloadError(f"video: expected at least 1 frame, found {num_frames}.")
        if fps is not None and not (math.isfinite(fps) and fps > 0):
            raise WorkloadError(f"video: expected more than 0 frames per second, found {fps}.")
        match self.method:
            case "all":
                return np.arange(num_frames)
            case "uniform":
                return self._uniform(num_frames, fps)
            case "qwen2":
                return self._qwen2(num_frames, fps)
            case "qwen3":
                return self._qwen3(num_frames, fps)
            case "internvl":
                return self._internvl(num_frames, fps)
            case "smolvlm":
                return self._smolvlm(num_frames, fps)

    def _uniform(self, total: int, fps: float | None) -> IntArray:
        wanted = self.num_frames
        if wanted is None:
            wanted = max(1, int(total / _known(fps) * self.fps)) if self.fps is not None else total
        _check_wanted(wanted, total)
        return np.arange(wanted) * total // wanted

    def _qwen2(self, total: int, fps: float | None) -> IntArray:
        if self.num_frames is not None:
            wanted = round(self.num_frames / self.multiple) * self.multiple
        else:
            limit = min(self.max_frames, total) // self.multiple * self.multiple
            by_rate = total / _known(fps) * (self.fps or 0)
            wanted = math.floor(min(max(by_rate, self.min_frames), limit) / self.multiple) * self.multiple
        _check_wanted(wanted, total)
        return _steps(0.0, total, total / wanted)

    def _qwen3(self, total: int, fps: float | None) -> IntArray:
        wanted = self.num_frames
        if wanted is None and self.fps is not None:
            wanted = min(max(int(total / (fps or ASSUMED_FPS) * self.fps), self.min_frames), self.max_frames, total)
        elif wanted is None:
            wanted = min(max(total, self.min_frames), self.max_frames)
        return np.linspace(0, total - 1, wanted).round().astype(np.int64)

    def _internvl(self, total: int, fps: float | None) -> IntArray:
        wanted = self.num_frames if self.num_frames is not None else int(total / _known(fps) * (self.fps or 0))
        _check_wanted(wanted, total)
        shift = total / wanted / 2 if self.initial_shift is None else self.initial_shift
        return _steps(shift, total, total / wanted)

    def _smolvlm(self, total: int, fps: float | None) -> IntArray:
        """The first and last second are left out of a video that is long enough."""
        rate, limit, wanted_rate = _known(fps), self.num_frames or 0, self.fps or 0.0
        seconds = total / rate
        wanted = max(1, min(round(wanted_rate * seconds), limit))
        first, last = 0, total - 1
        if seconds - 2 > limit * wanted_rate:
            first, last = int(rate), min(int(total - rate), total - 1)
            if first >= last:
                first, last = 0, total - 1
        return np.unique(np.linspace(first, last, wanted, dtype=np.int64))


def _known(fps: float | None) -> float:
    if fps is None:
        raise WorkloadError(
            "video: frames are sampled by time, but the video's frames per second are unknown. "
            "Give them (video_fps of a trace), or take a fixed number (num_frames of the video processor)."
        )
    return fps


def _check_wanted(wanted: int, total: int) -> None:
    if not 1 <= wanted <= total:
        raise WorkloadError(
            f"video: expected at least as many frames as are sampled, and one at least; found {total} frames, "
            f"{wanted} sampled. Leave it out (policy skip) or sample fewer frames (fps, num_frames of the processor)."
        )


def _steps(first: float, total: int, step: float) -> IntArray:
    """first, first + step, ... below total; rounding may add one, and the processors keep it."""
    count = math.ceil((total - first) / step)
    return (first + np.arange(count) * step).astype(np.float32).astype(np.int64)
