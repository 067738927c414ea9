"""Lengths of clips and videos come from headers, and a header that lies is noticed."""

import io
import sys
import wave
from pathlib import Path

import numpy as np
import pytest

from entrain_opt.errors import RuntimeConfigError, WorkloadError
from entrain_opt.workload.audio import read_audio_seconds
from entrain_opt.workload.conversation import ChatSample, MediaItem
from entrain_opt.workload.measure import media_sizes
from entrain_opt.workload.media import MediaRule, MediaSize
from entrain_opt.workload.video import VideoLength, read_video_length


def wav(num_samples: int, rate: int, channels: int = 1, sample_bytes: int = 2) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(sample_bytes)
        file.setframerate(rate)
        file.writeframes(bytes(num_samples * channels * sample_bytes))
    return buffer.getvalue()


def item(content: bytes, kind: str = "audio") -> MediaItem:
    return MediaItem(kind=kind, path=Path("clip"), content=content)


@pytest.mark.parametrize(
    ("rate", "channels", "sample_bytes"), [(8000, 1, 2), (44100, 2, 2), (16000, 1, 1), (48000, 6, 3)]
)
def test_seconds_are_samples_by_rate(rate, channels, sample_bytes, tmp_path):
    content = wav(rate * 3 // 2, rate, channels, sample_bytes)
    (tmp_path / "clip.wav").write_bytes(content)
    assert read_audio_seconds(item(content)) == 1.5
    assert read_audio_seconds(MediaItem(kind="audio", path=tmp_path / "clip.wav")) == 1.5


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes"),
        (wav(0, 8000), "no samples"),
        (wav(8000, 8000)[:9000], "truncated clip: the header says 8000 samples of 2 bytes, 8956 bytes follow"),
    ],
)
def test_bad_clips_are_named(content, reason):
    with pytest.raises(WorkloadError, match=f"clip: .*{reason}"):
        read_audio_seconds(item(content))


def test_missing_clip():
    with pytest.raises(WorkloadError, match=r"nowhere\.wav: file not found"):
        read_audio_seconds(MediaItem(kind="audio", path=Path("nowhere.wav")))


def test_other_formats_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RuntimeConfigError, match="pip install soundfile"):
        read_audio_seconds(item(b"fLaC" + bytes(100)))
    with pytest.raises(RuntimeConfigError, match="pip install av"):
        read_video_length(item(bytes(100), "video"))


def test_flac_and_ogg_with_soundfile():
    soundfile = pytest.importorskip("soundfile")
    for name in ("FLAC", "OGG"):
        buffer = io.BytesIO()
        soundfile.write(buffer, np.zeros(12000, dtype=np.float32), 8000, format=name)
        assert read_audio_seconds(item(buffer.getvalue())) == 1.5
    with pytest.raises(WorkloadError, match="not a usable clip"):
        read_audio_seconds(item(b"no audio at all"))


def test_video_with_av():
    av = pytest.importorskip("av")
    for container_format, codec in (("mp4", "mpeg4"), ("mpegts", "mpeg2video")):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=container_format) as container:
            stream = container.add_stream(codec, rate=25)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for value in range(10):
                frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), value * 20, dtype=np.uint8), format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        found = read_video_length(item(buffer.getvalue(), "video"))
        assert found == VideoLength(num_frames=10, width=64, height=48, fps=25.0)
    with pytest.raises(WorkloadError, match="not a usable video"):
        read_video_length(item(b"no video at all", "video"))


class TenTokensPerSecond(MediaRule):
    """Stands in for a model with an audio encoder; of several images each costs less."""

    @property
    def kinds(self):
        return ("image", "audio")

    def image(self, width, height):
        return MediaSize(patches=width, segments=1, tokens=height)

    def images(self, sizes):
        return [MediaSize(patches=1, segments=1, tokens=len(sizes)) for _ in sizes]

    def audio(self, seconds):
        if seconds > 30:
            raise WorkloadError(f"{seconds} s are too long")
        return MediaSize(patches=1, segments=1, tokens=int(seconds * 10))


def test_sizes_of_mixed_media_keep_their_order():
    from column_cases import noise

    image = MediaItem(kind="image", path=Path("p"), content=noise(8, 4))
    media = (item(wav(8000, 8000)), image, item(wav(16000, 8000)), image)
    sizes = media_sizes(ChatSample(id="a", messages=(), media=media), TenTokensPerSecond())
    assert [size.tokens for size in sizes] == [10, 2, 20, 2]
    with pytest.raises(WorkloadError, match=r"clip: 31\.0 s are too long"):
        media_sizes(ChatSample(id="a", messages=(), media=(item(wav(310, 10)),)), TenTokensPerSecond())
    with pytest.raises(WorkloadError, match="clip: the model takes image, audio, found video"):
        media_sizes(ChatSample(id="a", messages=(), media=(item(b"", "video"),)), TenTokensPerSecond())
