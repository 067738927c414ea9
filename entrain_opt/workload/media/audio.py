"""Whisper-style audio: a clip becomes mel frames, a convolution halves them, encoder positions are joined to tokens.

Qwen2-Audio pads every clip to the whole window (30 s) and computes on all of it; Qwen2.5-Omni computes on the clip's
own frames, chunk by chunk. The extractor cuts what exceeds its window, and so does the count
here. A clip too short for one token (320 samples or fewer at the usual settings) raises.

Source: the Whisper feature extractor and the Qwen2-Audio and Qwen2.5-Omni processors and models of Transformers 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.media.rule import MediaRule, MediaSize

#: Seconds are a quotient of samples and rate: what is within this of a whole number of samples is that number.
_SAMPLE_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class WhisperRule(MediaRule):
    """Clips of the Qwen audio families.

    Attributes:
        sampling_rate: samples per second that the extractor takes; clips are resampled to it.
        hop_samples: samples per mel frame.
        max_frames: mel frames of the whole window.
        positions_per_token: encoder positions behind each token.
        padded_positions: encoder positions that every clip fills; None where only its own frames are computed.
        chunk_frames: mel frames that are convolved together; None for the whole clip.
    """

    sampling_rate: int = 16_000
    hop_samples: int = 160
    max_frames: int = 3_000
    positions_per_token: int = 2
    padded_positions: int | None = None
    chunk_frames: int | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("audio",)

    def audio(self, seconds: float) -> MediaSize:
        if not (math.isfinite(seconds) and seconds > 0):
            raise WorkloadError(f"audio: expected a clip longer than 0 seconds, found {seconds}.")
        frames = self.mel_frames(seconds)
        chunk = self.chunk_frames or frames
        whole, rest = divmod(frames, chunk)
        positions = whole * _halved(chunk) + _halved(rest)
        tokens = _halved(frames) // self.positions_per_token
        if tokens < 1:
            fewest_samples = (2 * self.positions_per_token - 2) * self.hop_samples + 1
            raise WorkloadError(
                f"audio: {seconds:g} seconds are too short for one token (at least "
                f"{fewest_samples / self.sampling_rate:g}). Leave it out (policy skip)."
            )
        return MediaSize(patches=self.padded_positions or positions, segments=1, tokens=tokens)

    def audio_shape(self, seconds: float) -> tuple[int, ...]:
        """(mel frames of the clip itself,)."""
        return (self.mel_frames(seconds),)

    def mel_frames(self, seconds: float) -> int:
        """Frames of a clip; what exceeds the window is cut by the extractor."""
        samples = math.ceil(seconds * self.sampling_rate - _SAMPLE_TOLERANCE)
        return min(math.ceil(samples / self.hop_samples), self.max_frames)


def _halved(frames: int) -> int:
    """Output length of the convolution of stride 2."""
    return (frames + 1) // 2
