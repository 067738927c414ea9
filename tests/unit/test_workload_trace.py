"""Traces with images, audio and videos become tables of the sizes that the model's rules give."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from media_cases import write_folder

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.media import FixedRule, media_rule
from entrain_opt.workload.samples import MEDIA_KINDS
from entrain_opt.workload.trace import read_trace


@pytest.fixture
def rule(tmp_path):
    """Of a model with all kinds, which samples videos at two frames a second."""
    config = {"model_type": "qwen2_5_omni_thinker", "audio_config": {}, "vision_config": {"patch_size": 14}}
    both = {"feature_extractor_type": "WhisperFeatureExtractor", "image_processor_type": "Qwen2VLImageProcessor"}
    video = {"do_sample_frames": True, "fps": 2}
    return media_rule(
        write_folder(tmp_path / "omni", config, preprocessor_config=both, video_preprocessor_config=video)
    )


def write_trace(path: Path, **columns) -> Path:
    rows = {
        "sample_id": ["a", "b", "c"],
        "image_sizes": pa.array([[[300, 200], [40, 40]], [], []], type=pa.list_(pa.list_(pa.int32()))),
        "text_words": [10, 0, 3],
        **columns,
    }
    pq.write_table(pa.table(rows), path)
    return path


def test_all_kinds_in_one_trace(rule, tmp_path):
    path = write_trace(
        tmp_path / "t.parquet",
        audio_seconds=[4.0, None, 12.5],
        video_frames=[None, None, 300],
        video_size=pa.array([None, None, [640, 480]], type=pa.list_(pa.int32())),
        video_fps=[None, None, 25.0],
    )
    table = read_trace(path, rule)
    assert [MEDIA_KINDS[kind] for kind in table.media_kind] == ["image", "image", "audio", "audio", "video"]
    assert table.media_counts.tolist() == [3, 0, 2]
    sizes = [rule.image(300, 200), rule.image(40, 40), rule.audio(4.0), rule.audio(12.5), rule.video(300, 640, 480, 25)]
    assert table.media_tokens.tolist() == [size.tokens for size in sizes]
    assert table.media_patches.tolist() == [size.patches for size in sizes]
    assert table.media_segments.tolist() == [size.segments for size in sizes]
    assert sizes[-1].segments == 12


def test_unknown_rates_are_the_callers(rule, tmp_path):
    video = {
        "video_frames": [None, 300, None],
        "video_size": pa.array([None, [640, 480], None], type=pa.list_(pa.int32())),
    }
    path = write_trace(tmp_path / "t.parquet", **video)
    with pytest.raises(WorkloadError, match=r"t\.parquet: sample b: .*frames per second are unknown.*video_fps"):
        read_trace(path, rule)
    table = read_trace(path, rule, video_fps=30)
    assert table.media_tokens[-1] == rule.video(300, 640, 480, 30).tokens
    path = write_trace(tmp_path / "t.parquet", **{**video, "video_size": [None, None, None]})
    with pytest.raises(WorkloadError, match="sample b: video_size: expected"):
        read_trace(path, rule, video_fps=30)


def test_a_clip_without_a_token_is_named(rule, tmp_path):
    path = write_trace(tmp_path / "t.parquet", audio_seconds=[1.0, 1.0, 0.01])
    with pytest.raises(WorkloadError, match=r"sample c: audio: 0\.01 seconds are too short"):
        read_trace(path, rule)


@pytest.mark.parametrize(
    ("columns", "kind"),
    [({"audio_seconds": [1.0, None, None]}, "audio"), ({"video_frames": [None, 3, None]}, "video")],
)
def test_kinds_that_the_model_lacks(columns, kind, tmp_path):
    path = write_trace(tmp_path / "t.parquet", **columns)
    with pytest.raises(WorkloadError, match=f"holds {kind}, the model takes image"):
        read_trace(path, FixedRule(patches=5, tokens=4))


def test_images_under_an_audio_model(tmp_path):
    config = {"model_type": "qwen2_audio", "audio_config": {}}
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor"}
    rule = media_rule(write_folder(tmp_path / "audio", config, preprocessor_config=extractor))
    with pytest.raises(WorkloadError, match="holds image, the model takes audio"):
        read_trace(write_trace(tmp_path / "t.parquet"), rule)
    without = pa.array([[], [], None], type=pa.list_(pa.list_(pa.int32())))
    path = write_trace(tmp_path / "t.parquet", image_sizes=without, audio_seconds=[1.0, 40.0, None])
    assert read_trace(path, rule).media_tokens.tolist() == [25, 750]
