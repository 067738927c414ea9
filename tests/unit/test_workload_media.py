"""Sizes equal the real processors' and models' on random images; every accepted image has a patch and a token."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from entrain_opt.errors import RuntimeConfigError, WorkloadError
from entrain_opt.workload.media import CombinedRule, FixedRule, MediaRule, SmartResizeRule, TileRule, media_rule

MODELS = Path(__file__).resolve().parents[2] / "models"
SIDES = st.integers(1, 10_000)
TILES = TileRule(tile_width=112, tile_height=112, min_tiles=1, max_tiles=6, patches_per_tile=64, tokens_per_tile=64)
SMART = SmartResizeRule(patch_side=14, merge=2, min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
SMALL_BUDGET = SmartResizeRule(patch_side=14, merge=2, min_pixels=1, max_pixels=256 * 28 * 28)


def random_sizes(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Log-uniform sides from 1 to 10,000, so that small and thin images are frequent."""
    sides = np.exp(np.random.default_rng(seed).uniform(0, math.log(10_001), size=(count, 2))).astype(int)
    return [(int(width), int(height)) for width, height in np.clip(sides, 1, 10_000)]


def write_folder(folder: Path, config: dict, processor: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return folder


@given(width=SIDES, height=SIDES)
@pytest.mark.parametrize("rule", [TILES, SMART, SMALL_BUDGET, FixedRule(patches=577, tokens=576)])
def test_every_accepted_size_has_patches_and_tokens(rule: MediaRule, width, height):
    ratio = max(width, height) / min(width, height)
    if isinstance(rule, SmartResizeRule) and ratio > 200:
        with pytest.raises(WorkloadError, match=f"{width} x {height}"):
            rule.image(width, height)
        return
    size = rule.image(width, height)
    assert size.patches >= size.tokens >= 1
    assert 1 <= size.segments <= size.patches


@pytest.mark.parametrize(("min_tiles", "max_tiles", "side"), [(1, 6, 112), (1, 12, 448), (2, 9, 384), (1, 1, 112)])
def test_tiles_equal_the_processor(min_tiles, max_tiles, side):
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    processor = GotOcr2ImageProcessorPil(
        crop_to_patches=True, min_patches=min_tiles, max_patches=max_tiles, size={"height": side, "width": side}
    )
    rule = TileRule(
        tile_width=side,
        tile_height=side,
        min_tiles=min_tiles,
        max_tiles=max_tiles,
        patches_per_tile=7,
        tokens_per_tile=5,
    )
    for width, height in [*random_sizes(1000), (112, 112), (224, 224), (225, 224), (300, 200), (3, 4)]:
        tiles = processor.get_number_of_image_patches(height, width)
        size = rule.image(width, height)
        assert (size.segments, size.patches, size.tokens) == (tiles, 7 * tiles, 5 * tiles), (width, height)


@pytest.mark.parametrize("rule", [SMART, SmartResizeRule(patch_side=16, merge=2, min_pixels=65536, max_pixels=1 << 24)])
def test_smart_resize_equals_the_processor(rule):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=rule.patch_side,
        merge_size=rule.merge,
        size={"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels},
    )
    for width, height in [*random_sizes(1000), (27, 257), (14, 14), (1, 200)]:
        if max(width, height) / min(width, height) > 200:
            with pytest.raises(ValueError):
                processor.get_number_of_image_patches(height, width)
            continue
        assert rule.image(width, height).patches == processor.get_number_of_image_patches(height, width)


def test_thin_image_within_a_small_budget():
    assert SMALL_BUDGET.image(10_000, 51).tokens >= 1
    with pytest.raises(WorkloadError, match="aspect ratio of at most 200, found 2280 x 10"):
        SMART.image(2280, 10)


def test_shipped_processors_make_what_the_rules_say():
    """End to end on small real images, thin ones among them."""
    from transformers import AutoImageProcessor

    rng = np.random.default_rng(0)
    for name in ("tiny-llava", "qwen2_5-vit-llama3_2-1b"):
        processor = AutoImageProcessor.from_pretrained(MODELS / name)
        rule = media_rule(MODELS / name)
        for width, height in rng.integers(1, 400, size=(30, 2)).tolist():
            if max(width, height) / min(width, height) > 200:
                continue
            image = Image.fromarray(rng.integers(0, 256, size=(height, width, 3), dtype=np.uint8))
            made = processor(image, return_tensors="np")
            size = rule.image(width, height)
            if isinstance(rule, TileRule):
                assert len(made["pixel_values"]) == size.segments
            else:
                grid = made["image_grid_thw"][0]
                assert len(made["pixel_values"]) == grid.prod() == size.patches
                assert size.tokens == size.patches // 4


def test_segments_and_tokens_equal_the_model():
    import torch
    from transformers import AutoConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    vision_utils = pytest.importorskip("transformers.vision_utils")
    config = AutoConfig.from_pretrained(MODELS / "qwen2_5-vit-llama3_2-1b").vision_config
    config.depth, config.hidden_size, config.intermediate_size = 1, 64, 64
    combined = media_rule(MODELS / "qwen2_5-vit-llama3_2-1b")
    model = Qwen2_5_VisionTransformerPretrainedModel._from_config(config).eval()
    assert isinstance(combined, CombinedRule)
    rule = combined.image_rule
    assert isinstance(rule, SmartResizeRule)
    for width, height in [(30, 30), (112, 112), (150, 300), (340, 90), (900, 700)]:
        size = rule.image(width, height)
        columns, rows = (side // 14 for side in rule.resized(width, height))
        grid = torch.tensor([[1, rows, columns]])
        assert (
            vision_utils.get_vision_cu_seqlens(grid).diff().tolist() == [size.patches] == [size.patches] * size.segments
        )
        with torch.no_grad():
            features = model(torch.zeros(size.patches, 3 * 2 * 14 * 14), grid_thw=grid).pooler_output
        assert len(features) == size.tokens


@pytest.mark.parametrize("tower", ["clip_vision_model", "siglip_vision_model"])
@pytest.mark.parametrize("strategy", ["default", "full"])
def test_fixed_rule_equals_the_features_of_llava(tower, strategy, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    processor = {"image_processor_type": "CLIPImageProcessor" if "clip" in tower else "SiglipImageProcessorPil"}
    processor |= {"size": {"height": 56, "width": 56}, "crop_size": {"height": 56, "width": 56}}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "model_type": "llava",
        "vision_feature_select_strategy": strategy,
        "vision_config": {"model_type": tower, "image_size": 56, "patch_size": 14, **sizes},
        "text_config": {"model_type": "llama", "vocab_size": 16, **sizes},
    }
    write_folder(tmp_path, config, processor)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    with torch.no_grad():
        features = model.model.get_image_features(pixel_values=torch.zeros(1, 3, 56, 56)).pooler_output[0]
        positions = model.model.vision_tower(torch.zeros(1, 3, 56, 56)).last_hidden_state.shape[1]
    size = media_rule(tmp_path).image(640, 480)
    assert (size.patches, size.segments, size.tokens) == (positions, 1, len(features))


def test_rules_come_from_either_processor_file(tmp_path):
    config = json.loads((MODELS / "tiny-llava" / "config.json").read_text())
    processor = json.loads((MODELS / "tiny-llava" / "preprocessor_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    assert media_rule(tmp_path) == media_rule(MODELS / "tiny-llava") == TILES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_processor_type": "DonutImageProcessor"}, "found 'DonutImageProcessor'"),
        ({"size": {"height": 224, "width": 224}}, "224 x 224, vision_config.image_size is 112"),
        ({"do_resize": False}, "do_resize: expected true"),
        ({"size": {"longest_edge": 5}}, "size: expected height and width"),
    ],
)
def test_disagreeing_folders_raise(change, message, tmp_path):
    config = json.loads((MODELS / "tiny-llava" / "config.json").read_text())
    processor = json.loads((MODELS / "tiny-llava" / "preprocessor_config.json").read_text())
    with pytest.raises(RuntimeConfigError, match=message):
        media_rule(write_folder(tmp_path, config, {**processor, **change}))


def test_folder_without_processor_raises(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RuntimeConfigError, match=r"preprocessor_config\.json"):
        media_rule(tmp_path)
