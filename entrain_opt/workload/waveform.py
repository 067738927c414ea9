"""Samples of an audio clip: one channel, 32-bit floats, at the rate that a model takes.

PCM WAV is read with the standard library, everything else by the optional package `soundfile`; another rate is
converted by the optional package `soxr`. Channels are averaged.

Promise: exactly the number of samples that `workload.media` counts, `ceil(seconds * rate)`. Price: about 1 ms per
second of audio where the rate is converted, far less where it is not.
"""

from __future__ import annotations

import wave

import numpy as np
from numpy.typing import NDArray

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.audio import read_audio_seconds
from entrain_opt.workload.conversation import MediaItem
from entrain_opt.workload.optional import media_package

FloatArray = NDArray[np.float32]
_PCM_SCALE = {1: 1 << 7, 2: 1 << 15, 4: 1 << 31}


def read_waveform(item: MediaItem, rate: int) -> FloatArray:
    """[samples] of a clip in -1 to 1.

    Args:
        item: the clip.
        rate: samples per second wanted.

    Raises:
        WorkloadError: the clip is missing, empty, truncated or not audio.
        RuntimeConfigError: the format or its rate needs a package that is not installed.
    """
    read_audio_seconds(item)  # Names what is wrong with a broken file.
    found = _read_wav(item)
    values, own_rate = found if found is not None else _read_soundfile(item)
    samples = values.mean(axis=1, dtype=np.float32)
    if own_rate == rate:
        return samples
    return _fit(_resampled(samples, own_rate, rate, item), -(-len(samples) * rate // own_rate))


def _read_wav(item: MediaItem) -> tuple[FloatArray, int] | None:
    """[samples, channels] and the rate; None if it is no PCM WAV of 8, 16, 24 or 32 bits."""
    with item.open() as file:
        try:
            with wave.open(file) as opened:
                width, channels, rate = opened.getsampwidth(), opened.getnchannels(), opened.getframerate()
                content = opened.readframes(opened.getnframes())
        except (wave.Error, EOFError):
            return None
    if width == 3:
        # 24 bits become the upper three bytes of 32.
        wide = np.zeros((len(content) // 3, 4), dtype=np.uint8)
        wide[:, 1:] = np.frombuffer(content, dtype=np.uint8).reshape(-1, 3)
        content, width = wide.tobytes(), 4
    if width not in _PCM_SCALE:
        return None
    raw = np.frombuffer(content, dtype="u1" if width == 1 else f"<i{width}").astype(np.float64)
    values = (raw - (128 if width == 1 else 0)) / _PCM_SCALE[width]
    return values.astype(np.float32).reshape(-1, channels), rate


def _read_soundfile(item: MediaItem) -> tuple[FloatArray, int]:
    soundfile = media_package("soundfile", f"{item.path}: not a PCM WAV file; other audio")
    with item.open() as file:
        try:
            values, rate = soundfile.read(file, dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, RuntimeError) as error:
            raise WorkloadError(f"{item.path}: not a usable clip ({error}).") from error
    return values, int(rate)


def _resampled(samples: FloatArray, own_rate: int, rate: int, item: MediaItem) -> FloatArray:
    soxr = media_package("soxr", f"{item.path}: {own_rate} samples per second; the model takes {rate}, and converting")
    return np.asarray(soxr.resample(samples, own_rate, rate), dtype=np.float32)


def _fit(samples: FloatArray, count: int) -> FloatArray:
    """Exactly `count` samples: the converter's rounding of the last one is undone."""
    return np.pad(samples[:count], (0, max(0, count - len(samples))))
