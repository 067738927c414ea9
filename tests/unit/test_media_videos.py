"""Video rules equal the real video processors' functions, which run here though the processors need torchvision."""

from types import SimpleNamespace

import numpy as np
import pytest
from media_cases import as_text, borrowed, random_sizes, small_tokenizer, video_module, write_folder

from entrain_opt.errors import RuntimeConfigError, WorkloadError
from entrain_opt.workload.media import FrameSampling, MediaRule, media_rule

QWEN_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor"}


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def random_videos(count: int, seed: int = 0) -> list[tuple[int, float]]:
    """(frames, fps), short ones frequent."""
    rng = np.random.default_rng(seed)
    frames = np.exp(rng.uniform(0, np.log(6000), size=count)).astype(int)
    rates = rng.choice([1.0, 5.0, 12.5, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0], size=count)
    return [(int(number), float(rate)) for number, rate in zip(frames, rates, strict=True)]


def metadata(frames: int, fps: float | None):
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(total_num_frames=frames, fps=fps, duration=None if fps is None else frames / fps)


def qwen_folder(tmp_path, family, *, patch=14, video=None, **vision):
    config = {"model_type": family, "vision_config": {"patch_size": patch, "spatial_merge_size": 2, **vision}}
    files = {"preprocessor_config": {**QWEN_IMAGES, "patch_size": patch}}
    if video is not None:
        files["video_preprocessor_config"] = {"patch_size": patch, **video}
    return write_folder(tmp_path, config, **files)


# Which frames


def sampled(method: str, settings: dict):
    """What the real processor takes: a function of frames and fps."""
    from transformers.video_processing_utils import BaseVideoProcessor

    owner = {
        "uniform": BaseVideoProcessor,
        "qwen2": video_module("qwen2_vl").Qwen2VLVideoProcessor,
        "qwen3": video_module("qwen3_vl").Qwen3VLVideoProcessor,
        "internvl": video_module("internvl").InternVLVideoProcessor,
        "smolvlm": video_module("smolvlm").SmolVLMVideoProcessor,
    }[method]
    known = {"fps": None, "num_frames": None, "min_frames": 4, "max_frames": 768, "temporal_patch_size": 2}
    known |= {"initial_shift": True, **settings}
    method = borrowed(owner, "sample_frames", **known)
    # As the processor calls it: with its own settings as arguments.
    arguments = {name: known[name] for name in ("fps", "num_frames", "initial_shift")}
    return lambda frames, fps: np.asarray(method(metadata=metadata(frames, fps), **arguments))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("uniform", {"num_frames": 8}),
        ("uniform", {"fps": 2}),
        ("uniform", {}),
        ("qwen2", {"num_frames": 9}),
        ("qwen2", {"fps": 2}),
        ("qwen2", {"fps": 1, "min_frames": 6, "max_frames": 33}),
        ("qwen3", {"fps": 2}),
        ("qwen3", {"fps": 1, "max_frames": 31}),
        ("qwen3", {"num_frames": 12}),
        ("qwen3", {}),
        ("internvl", {"num_frames": 8}),
        ("internvl", {"fps": 1}),
        ("internvl", {"num_frames": 5, "initial_shift": 2}),
        ("smolvlm", {"fps": 1, "num_frames": 64}),
        ("smolvlm", {"fps": 2, "num_frames": 10}),
    ],
)
def test_frames_equal_the_processors(method, settings):
    wanted, rule = sampled(method, settings), FrameSampling(method=method, **settings)
    accepted = 0
    for frames, fps in [*random_videos(1000), (1, 30.0), (2, 30.0), (3, 30.0)]:
        try:
            expected = wanted(frames, fps)
        except (ValueError, ZeroDivisionError, RuntimeError):
            with pytest.raises(WorkloadError, match="video: expected at least as many frames as are sampled"):
                rule.indices(frames, fps)
            continue
        accepted += 1
        assert np.array_equal(rule.indices(frames, fps), expected), (frames, fps)
    assert accepted > 300


def test_unknown_rates():
    assert len(FrameSampling().indices(7)) == 7
    owner = video_module("qwen3_vl").Qwen3VLVideoProcessor
    qwen3 = borrowed(owner, "sample_frames", fps=2, min_frames=4, max_frames=768)
    assert np.array_equal(qwen3(metadata(480, None)), FrameSampling(method="qwen3", fps=2).indices(480))
    for method in ("uniform", "qwen2", "internvl"):
        with pytest.raises(ValueError):
            sampled(method, {"fps": 2})(480, None)
        with pytest.raises(WorkloadError, match="the video's frames per second are unknown"):
            FrameSampling(method=method, fps=2).indices(480)
    with pytest.raises(WorkloadError, match="unknown"):
        FrameSampling(method="smolvlm", fps=1, num_frames=64).indices(480)


@pytest.mark.parametrize(("frames", "fps", "found"), [(0, 30.0, "at least 1 frame, found 0"), (5, 0.0, "found 0.0")])
def test_impossible_videos_are_refused(frames, fps, found):
    with pytest.raises(WorkloadError, match=found):
        FrameSampling().indices(frames, fps)


# Qwen


def sizes_and_lengths(count: int) -> list[tuple[int, int, int]]:
    lengths = np.random.default_rng(5).integers(1, 800, size=count).tolist()
    return [(length, *size) for length, size in zip(lengths, random_sizes(count), strict=True)]


@pytest.mark.parametrize(
    ("family", "video"),
    [
        ("qwen2_vl", None),
        ("qwen2_vl", {"size": {"shortest_edge": 3136, "longest_edge": 602112}}),
        ("qwen2_5_vl", {"min_pixels": 4 * 784, "max_pixels": 64 * 784}),
    ],
)
def test_qwen2_videos_equal_the_processor(family, video, tmp_path):
    owner = video_module("qwen2_vl").Qwen2VLVideoProcessor
    rule = media_rule(qwen_folder(tmp_path, family, video=video))
    assert rule.kinds == ("image", "video")
    video = video or {}
    size = video.get("size") or dict(owner.size)
    size = {
        "shortest_edge": video.get("min_pixels", size["shortest_edge"]),
        "longest_edge": video.get("max_pixels", size["longest_edge"]),
    }
    count = borrowed(owner, "get_num_of_video_patches", size=size, patch_size=14, merge_size=2, temporal_patch_size=2)
    assert_same_counts(rule, lambda *video: count(*video, {}), temporal=2)


@pytest.mark.parametrize("cap", [None, True])
@pytest.mark.parametrize("size", [None, {"shortest_edge": 4096, "longest_edge": 25165824}])
def test_qwen3_videos_equal_the_processor(cap, size, tmp_path, tokenizer):
    owner = video_module("qwen3_vl").Qwen3VLVideoProcessor
    video = {"cap_pixels_per_frame": cap, "do_sample_frames": False, **({"size": size} if size else {})}
    rule = media_rule(qwen_folder(tmp_path, "qwen3_vl", patch=16, video=video))
    count = borrowed(
        owner,
        "get_num_of_video_patches",
        size=size or owner.size,
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        cap_pixels_per_frame=cap,
        max_video_tokens=768,
    )
    assert_same_counts(rule, count, temporal=2)


def assert_same_counts(rule: MediaRule, count, *, temporal: int) -> None:
    accepted = 0
    for frames, width, height in sizes_and_lengths(2000):
        try:
            patches = count(frames, height, width)
        except ValueError:
            with pytest.raises(WorkloadError, match=r"aspect ratio of at most 200|at least 2 sampled frames"):
                rule.video(frames, width, height)
            continue
        accepted += 1
        size = rule.video(frames, width, height)
        assert (size.patches, size.features) == (patches, patches // 4), (frames, width, height)
        assert size.segments == -(-frames // temporal)
    assert accepted > 1200


def test_qwen2_frames_share_the_budget_of_a_clip(tmp_path, monkeypatch):
    """With cap_pixels_per_frame the processor's own `resize`, on shapes in place of frames."""
    from transformers.image_utils import SizeDict
    from transformers.video_processing_utils import BaseVideoProcessor

    owner = video_module("qwen2_vl").Qwen2VLVideoProcessor
    monkeypatch.setattr(BaseVideoProcessor, "resize", lambda self, image, size, resample: size)
    processor = object.__new__(owner)
    processor.max_video_tokens = 9000
    rule = media_rule(qwen_folder(tmp_path, "qwen2_vl", video={"cap_pixels_per_frame": True, "max_video_tokens": 9000}))
    found = set()
    for frames, width, height in [(4, 1000, 700), (100, 1000, 700), (700, 640, 480), (3, 50, 60), (60, 200, 5000)]:
        size = processor.resize(
            SimpleNamespace(shape=(1, frames, 3, height, width)),
            SizeDict(shortest_edge=128 * 784, longest_edge=768 * 784),
            None,
            factor=28,
            temporal_factor=2,
            cap_pixels_per_frame=True,
        )
        assert rule.video_rule.resized(frames, width, height) == (size.width, size.height)
        assert rule.video(frames, width, height).patches == -(-frames // 2) * size.width * size.height // 196
        found.add((size.width, size.height))
    assert len(found) == 5


def test_segments_of_videos_equal_the_model(tmp_path):
    import torch

    vision_utils = pytest.importorskip("transformers.vision_utils")
    rule = media_rule(qwen_folder(tmp_path, "qwen2_5_vl", window_size=112, fullatt_block_indexes=[1]))
    for frames, width, height in [(2, 300, 200), (7, 500, 900), (1, 60, 60)]:
        size = rule.video(frames, width, height)
        columns, rows = (side // 14 for side in rule.video_rule.resized(frames, width, height))
        lengths = vision_utils.get_vision_cu_seqlens(torch.tensor([[-(-frames // 2), rows, columns]])).diff()
        assert (len(lengths), int(lengths.sum()), lengths.unique().tolist()) == (
            size.segments,
            size.patches,
            [size.patches // size.segments],
        )


def test_qwen3_writes_the_times_that_its_processor_writes(tmp_path, tokenizer):
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    folder = qwen_folder(
        tmp_path, "qwen3_vl", patch=16, video={"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
    )
    estimate = media_rule(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    rule = media_rule(folder)
    replace = borrowed(
        Qwen3VLProcessor,
        "replace_video_token",
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=borrowed(Qwen3VLProcessor, "_calculate_timestamps"),
    )
    for (frames, fps), (width, height) in zip(random_videos(60, seed=3), random_sizes(60, longest=1500), strict=True):
        if frames < 2 or max(width, height) > 100 * min(width, height):
            continue
        indices = rule.video_rule.sampling.indices(frames, fps)
        columns, rows = (side // 16 for side in rule.video_rule.resized(len(indices), width, height))
        details = metadata(frames, fps)
        details.frames_indices = indices
        grid = np.array([[-(-len(indices) // 2), rows, columns]])
        text = replace({"video_grid_thw": grid, "video_metadata": [details]}, 0)
        assert as_text(rule.video_expansion(frames, width, height, fps), "<|video_pad|>") == text
        size = rule.video(frames, width, height, fps)
        assert size.tokens == len(tokenizer(text)["input_ids"])
        assert size.features == text.count("<|video_pad|>")
        # Without a tokenizer as Qwen's own does it: digits one by one, and `<`, `.`, ` seconds`, `>`, start, end.
        digits = sum(letter.isdigit() for letter in text)
        assert estimate.video(frames, width, height, fps).markers == digits + 6 * grid[0, 0]


# LLaVA-OneVision, InternVL, SmolVLM


def test_onevision_videos_equal_processor_and_model(tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, LlavaOnevisionProcessor

    tiny = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "model_type": "llava_onevision",
        "vision_feature_select_strategy": "full",
        "image_grid_pinpoints": [[36, 36]],
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 36, "patch_size": 7, **tiny},
        "text_config": {"model_type": "qwen2", "vocab_size": 16, **tiny},
    }
    size = {"height": 36, "width": 36}
    processor = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": size,
        "image_grid_pinpoints": [[36, 36]],
    }
    rule = media_rule(write_folder(tmp_path, config, preprocessor_config=processor))
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    replace = borrowed(LlavaOnevisionProcessor, "replace_video_token", num_image_tokens=25, video_token="<video>")
    for frames in (1, 2, 7):
        pixels = torch.zeros(1, frames, 3, 36, 36)
        size = rule.video(frames, 640, 480)
        assert size.tokens == replace({"pixel_values_videos": pixels}, 0).count("<video>")
        assert (size.patches, size.segments) == (25 * frames, frames)
        with torch.no_grad():
            features = model.model.get_video_features(
                pixels, vision_feature_layer=-1, vision_feature_select_strategy="full"
            ).pooler_output
        assert features.shape[:2].numel() == size.tokens


def test_internvl_videos_equal_the_processor(tmp_path, tokenizer):
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    config = {
        "model_type": "internvl",
        "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
    }
    images = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 448, "width": 448}}
    video = {"do_sample_frames": True, "num_frames": 12}
    folder = write_folder(tmp_path, config, preprocessor_config=images, video_preprocessor_config=video)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    rule = media_rule(folder)
    replace = borrowed(
        InternVLProcessor,
        "replace_video_token",
        image_seq_length=256,
        start_image_token="<img>",
        end_image_token="</img>",
        image_token="<IMG_CONTEXT>",
    )
    text = replace({"pixel_values_videos": [np.zeros((12, 3, 1, 1))]}, 0)
    assert as_text(rule.video_expansion(100, 640, 480), "<IMG_CONTEXT>") == text
    size = rule.video(100, 640, 480)
    assert (size.tokens, size.features) == (len(tokenizer(text)["input_ids"]), 12 * 256)
    assert (size.patches, size.segments) == (12 * 1025, 12)
    with pytest.raises(WorkloadError, match="found 11 frames, 12 sampled"):
        rule.video(11, 640, 480)


def smolvlm_folder(tmp_path, tokenizer):
    config = {"model_type": "smolvlm", "scale_factor": 4, "vision_config": {"image_size": 512, "patch_size": 16}}
    settings = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 2048},
        "max_image_size": {"longest_edge": 512},
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
    }
    folder = write_folder(tmp_path, config, preprocessor_config=settings)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_smolvlm_videos_equal_the_processor(tmp_path, tokenizer, monkeypatch):
    from transformers.models.smolvlm import processing_smolvlm as module

    from entrain_opt.workload.media.splits import number_words

    monkeypatch.setattr(module, "num2words", number_words)
    monkeypatch.setattr(module, "DEFAULT_VIDEO_INTRO", video_module("smolvlm").DEFAULT_VIDEO_INTRO, raising=False)
    rule = media_rule(smolvlm_folder(tmp_path, tokenizer))
    replace = borrowed(
        module.SmolVLMProcessor,
        "replace_video_token",
        image_seq_len=64,
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )
    for frames, fps in random_videos(60, seed=4):
        details = metadata(frames, fps)
        details.frames_indices = rule.video_rule.sampling.indices(frames, fps)
        count = len(details.frames_indices)
        text = replace({"pixel_values": np.zeros((1, count, 3, 1, 1)), "video_metadata": [details]}, 0)
        assert as_text(rule.video_expansion(frames, 640, 480, fps), "<image>") == text
        size = rule.video(frames, 640, 480, fps)
        assert (size.tokens, size.features) == (len(tokenizer(text)["input_ids"]), 64 * count)
        assert (size.patches, size.segments) == (1024 * count, count)


def test_numbers_in_words():
    from entrain_opt.workload.media.splits import number_words

    known = {0: "zero", 7: "seven", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred"}
    known |= {101: "one hundred and one", 768: "seven hundred and sixty-eight", 1000: "one thousand"}
    known |= {1005: "one thousand and five", 12_345: "twelve thousand, three hundred and forty-five"}
    assert {number: number_words(number) for number in known} == known


def test_numbers_in_words_equal_the_package():
    num2words = pytest.importorskip("num2words").num2words
    from entrain_opt.workload.media.splits import number_words

    for number in [*range(3000), 99_999, 100_000, 123_456]:
        assert number_words(number) == num2words(number)


# Settings


@pytest.mark.parametrize(
    ("family", "video", "message"),
    [
        ("qwen3_vl", {"num_frames": 8}, "expected one of fps and num_frames, found fps 2, num_frames 8"),
        ("qwen2_vl", {"do_sample_frames": True, "fps": 1, "num_frames": 8}, "found fps 1, num_frames 8"),
        ("qwen2_vl", {"do_sample_frames": True}, "expected one of fps and num_frames, found fps None"),
        ("qwen2_vl", {"patch_size": 16}, "patch_size: the processor has 16, vision_config makes it 14"),
        ("qwen2_vl", {"min_pixels": 10, "max_pixels": 5}, "0 < min_pixels <= max_pixels, found 10, 5"),
    ],
)
def test_settings_that_the_processor_refuses(family, video, message, tmp_path):
    with pytest.raises(RuntimeConfigError, match=message):
        media_rule(qwen_folder(tmp_path, family, patch=14, video=video))
