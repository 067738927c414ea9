"""Samples of clips: PCM of every width, channels, rates, and exactly as many samples as the media rule counts."""

import io
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from entrain_opt.errors import RuntimeConfigError, WorkloadError
from entrain_opt.workload.audio import read_audio_seconds
from entrain_opt.workload.conversation import MediaItem
from entrain_opt.workload.media import WhisperRule
from entrain_opt.workload.waveform import read_waveform

TONE = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000) * 0.5


def clip(values, width, rate=8000):
    """A WAV file of [samples, channels] values in -1 to 1."""
    scaled = np.round(np.asarray(values).reshape(len(values), -1) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    if width == 1:
        content = (scaled + 128).astype("u1").tobytes()
    elif width == 3:
        content = scaled.astype("<i4").view("u1").reshape(-1, 4)[:, :3].tobytes()
    else:
        content = scaled.astype(f"<i{width}").tobytes()
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(scaled.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content)
    return MediaItem(kind="audio", path=Path("clip.wav"), content=buffer.getvalue())


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_width_gives_the_same_wave(width):
    samples = read_waveform(clip(TONE, width), 8000)
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, TONE, atol=2 / 2 ** (8 * width - 1) + 1e-6)


def test_channels_are_averaged():
    samples = read_waveform(clip(np.stack([TONE, -TONE / 2], axis=1), 2), 8000)
    np.testing.assert_allclose(samples, TONE / 4, atol=1e-4)


@pytest.mark.parametrize(("rate", "num_samples"), [(8000, 8000), (44100, 4411), (22050, 1), (48000, 12_345)])
def test_as_many_samples_as_the_rule_counts(rate, num_samples):
    pytest.importorskip("soxr")
    item = clip(np.resize(TONE, num_samples), 2, rate)
    samples = read_waveform(item, 16_000)
    rule = WhisperRule()
    assert min(-(-len(samples) // rule.hop_samples), rule.max_frames) == rule.mel_frames(read_audio_seconds(item))


def test_rate_is_converted():
    pytest.importorskip("soxr")
    samples = read_waveform(clip(TONE, 2), 16_000)
    expected = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000) * 0.5
    np.testing.assert_allclose(samples[500:-500], expected[500:-500], atol=5e-3)


def test_missing_package_and_broken_file(monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(RuntimeConfigError, match=r"8000 samples per second.*takes 16000.*pip install soxr"):
        read_waveform(clip(TONE, 2), 16_000)
    with pytest.raises(WorkloadError, match="0 bytes"):
        read_waveform(MediaItem(kind="audio", path=Path("clip.wav"), content=b""), 16_000)
