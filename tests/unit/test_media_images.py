"""Image rules of every family equal the real processors, and the models where they make features of their own."""

import json
import pickle

import numpy as np
import pytest
from media_cases import as_text, blank, borrowed, processing_module, random_sizes, small_tokenizer, write_folder
from PIL import Image

from entrain_opt.errors import RuntimeConfigError, WorkloadError
from entrain_opt.workload.media import (
    AnyResolutionRule,
    CombinedRule,
    MediaRule,
    PanAndScanRule,
    SplitRule,
    TextCounter,
    media_rule,
)

SIZES = [*random_sizes(2000), (1, 1), (1, 10_000), (10_000, 1), (10_000, 10_000)]
SMALL_SIZES = [*random_sizes(30, seed=1, longest=1500), (1, 1), (1, 1500), (1500, 1), (1500, 1500)]
TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def image_rule(rule: MediaRule) -> MediaRule:
    return rule.image_rule if isinstance(rule, CombinedRule) and rule.image_rule else rule


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 10_007 + height).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


# LLaVA-NeXT and LLaVA-OneVision


def llava_next_folder(tmp_path, *, side=336, patch=14, resolutions=None, strategy="default", tower="clip_vision_model"):
    resolutions = resolutions or [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    config = {
        "model_type": "llava_next",
        "image_grid_pinpoints": resolutions,
        "vision_feature_select_strategy": strategy,
        "vision_config": {"model_type": tower, "image_size": side, "patch_size": patch, **TINY},
        "text_config": {"model_type": "llama", "vocab_size": 16, **TINY},
    }
    processor = {
        "image_processor_type": "LlavaNextImageProcessor",
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        "image_grid_pinpoints": resolutions,
    }
    return write_folder(tmp_path, config, preprocessor_config=processor)


def onevision_folder(tmp_path, *, side=384, patch=14, most=9):
    resolutions = [[side * row, side * column] for row in range(1, 7) for column in range(1, 7)]
    config = {
        "model_type": "llava_onevision",
        "image_grid_pinpoints": resolutions,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": f"anyres_max_{most}",
        "vision_config": {"model_type": "siglip_vision_model", "image_size": side, "patch_size": patch, **TINY},
        "text_config": {"model_type": "qwen2", "vocab_size": 16, **TINY},
    }
    processor = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": side, "width": side},
        "image_grid_pinpoints": resolutions,
    }
    return write_folder(tmp_path, config, preprocessor_config=processor)


def test_llava_next_equals_the_processor(tmp_path, tokenizer):
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    rule = media_rule(llava_next_folder(tmp_path))
    assert rule.kinds == ("image",)
    processor = LlavaNextProcessor(
        LlavaNextImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    counts = processor._get_num_multimodal_tokens(image_sizes=[(height, width) for width, height in SIZES])
    for size, tokens in zip(SIZES, counts["num_image_tokens"], strict=True):
        assert rule.image(*size).tokens == tokens, size
    for size in SMALL_SIZES:
        made = processor(images=noise(*size), text="<image>")
        found = rule.image(*size)
        assert len(made["pixel_values"][0]) == found.segments
        assert (found.tokens, found.patches) == (len(made["input_ids"][0]), found.segments * 577)


def test_llava_onevision_equals_the_processor(tmp_path, tokenizer):
    from transformers import LlavaOnevisionProcessor
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    combined = media_rule(onevision_folder(tmp_path))
    assert combined.kinds == ("image", "video")
    images = LlavaOnevisionImageProcessorPil()
    known = {
        "image_processor": images,
        "num_image_tokens": 729,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
        "image_token": "<image>",
    }
    known["_get_unpadded_features"] = borrowed(LlavaOnevisionProcessor, "_get_unpadded_features", **known)
    count = borrowed(LlavaOnevisionProcessor, "_get_number_of_features", **known)
    for width, height in SIZES:
        assert combined.image(width, height).tokens == count(height, width, 384, 384), (width, height)
    known["_get_number_of_features"] = count
    replace = borrowed(LlavaOnevisionProcessor, "replace_image_token", **known)
    for size in SMALL_SIZES[::3]:
        made = images(noise(*size), return_tensors="np")
        found = combined.image(*size)
        assert len(made["pixel_values"][0]) == found.segments
        assert (found.tokens, found.patches) == (replace(made, 0).count("<image>"), found.segments * 729)
    several = [(300, 200), (10, 500), (40, 40)]
    made = images([[noise(*size) for size in several]], return_tensors="np")
    assert made["pixel_values"].shape[:2] == (3, 1)
    for index, size in enumerate(combined.images(several)):
        assert (size.segments, size.patches, size.tokens) == (1, 729, replace(made, index).count("<image>"))
    assert combined.images(several[:1]) == [combined.image(300, 200)]
    assert combined.images([]) == []


@pytest.mark.parametrize("patch", [4, 7])
def test_any_resolution_equals_the_features_of_llava_next(patch, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    resolutions = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
    folder = llava_next_folder(tmp_path, side=28, patch=patch, resolutions=resolutions)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).eval()
    processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=resolutions
    )
    rule = media_rule(folder)
    for size in random_sizes(20, seed=2, longest=300):
        made = processor(noise(*size), return_tensors="pt")
        with torch.no_grad():
            features = model.model.get_image_features(made["pixel_values"], made["image_sizes"]).pooler_output
        assert len(features[0]) == rule.image(*size).tokens == rule.image(*size).features


@pytest.mark.parametrize("most", [2, 9])
def test_any_resolution_equals_the_features_of_llava_onevision(most, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    folder = onevision_folder(tmp_path, side=28, patch=4, most=most)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).eval()
    pinpoints = [[28 * row, 28 * column] for row in range(1, 7) for column in range(1, 7)]
    processor = LlavaOnevisionImageProcessorPil(size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints)
    rule = media_rule(folder)
    for size in [*random_sizes(20, seed=3, longest=600), (170, 170)]:
        made = processor(noise(*size), return_tensors="pt")
        with torch.no_grad():
            features = model.model.get_image_features(made["pixel_values"], made["image_sizes"]).pooler_output
        assert len(features[0]) == rule.image(*size).tokens
        assert made["pixel_values"].shape[1] == rule.image(*size).segments


# Idefics3 and SmolVLM


def split_folder(tmp_path, family, *, side, edge, patch, scale, tokenizer=None, **settings):
    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[family]
    config = {
        "model_type": family,
        "scale_factor": scale,
        "vision_config": {"image_size": side, "patch_size": patch},
    }
    processor = {
        "image_processor_type": f"{name}ImageProcessor",
        "size": {"longest_edge": edge},
        "max_image_size": {"longest_edge": side},
        **settings,
    }
    folder = write_folder(tmp_path, config, preprocessor_config=processor)
    if tokenizer is not None:
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("family", "side", "edge"),
    [
        ("idefics3", 364, 1456),
        ("smolvlm", 512, 2048),
        ("smolvlm", 384, 1000),
        ("idefics3", 364, 6000),
        ("smolvlm", 64, 97),
        ("smolvlm", 28, 196),
    ],
)
def test_splits_equal_the_processor(family, side, edge, tmp_path, monkeypatch):
    """The processor's own path, on images that occupy no memory: resizing is replaced by its result's shape."""
    from transformers.image_processing_backends import PilBackend
    from transformers.image_utils import SizeDict
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    def resize(self, image, size, **_):
        if not (size.height and size.width):
            raise ValueError(size)
        return blank(size.width, size.height)

    monkeypatch.setattr(PilBackend, "resize", resize)
    processor = {"idefics3": Idefics3ImageProcessorPil, "smolvlm": SmolVLMImageProcessorPil}[family]()
    rule = image_rule(media_rule(split_folder(tmp_path, family, side=side, edge=edge, patch=2, scale=2)))
    assert isinstance(rule, SplitRule)
    refused = 0
    for width, height in SIZES:
        try:
            made = processor._preprocess(
                [[blank(width, height)]],
                do_resize=True,
                size=SizeDict(longest_edge=edge),
                resample=None,
                do_rescale=False,
                rescale_factor=1.0,
                do_normalize=False,
                image_mean=None,
                image_std=None,
                do_pad=False,
                do_image_splitting=True,
                max_image_size={"longest_edge": side},
                return_row_col_info=True,
                return_tensors=None,
            )
        except ValueError:
            refused += 1
            with pytest.raises(WorkloadError, match=f"{width} x {height} is so thin"):
                rule.image(width, height)
            continue
        rows, columns = made["rows"][0][0], made["cols"][0][0]
        assert rule.grid(width, height) == (rows, columns), (width, height)
        size = rule.image(width, height)
        assert size.segments == len(made["pixel_values"][0])
        assert size.patches == size.segments * (side // 2) ** 2
        assert size.features == size.segments * (side // 4) ** 2
    # A tall image whose short side became 1 pixel loses it, because 196 * (1 / 196) < 1.
    assert (refused > 0) == (edge == 196)
    assert refused < len(SIZES) // 4


def test_splits_are_announced_as_the_processors_do(tmp_path, tokenizer):
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    images = Idefics3ImageProcessorPil(size={"longest_edge": 1456}, max_image_size={"longest_edge": 364})
    processor = Idefics3Processor(images, small_tokenizer(), image_seq_len=169)
    sizes = {"side": 364, "edge": 1456, "patch": 14, "scale": 2}
    rule = media_rule(split_folder(tmp_path / "a", "idefics3", tokenizer=tokenizer, **sizes))
    estimate = media_rule(split_folder(tmp_path / "b", "idefics3", **sizes))
    for size in SMALL_SIZES[::4]:
        made = processor(images=noise(*size), text="<image>", add_special_tokens=False)
        found = rule.image(*size)
        assert (len(made["input_ids"][0]), len(made["pixel_values"][0])) == (found.tokens, found.segments)
        assert list(made["input_ids"][0]).count(processor.image_token_id) == found.features
        rows, columns = image_rule(rule).grid(*size)
        text = get_image_prompt_string(
            rows, columns, 169, "<fake_token_around_image>", image_token="<image>", global_image_token="<global-img>"
        )
        assert as_text(rule.image_expansion(*size), "<image>") == text
    # Most tokenizers know each tag and two line breaks as one token; then the processor's own formula is the estimate.
    counts = borrowed(
        Idefics3Processor,
        "_get_num_multimodal_tokens",
        image_processor=images,
        image_seq_len=169,
        tokenizer=lambda text, add_special_tokens: {"input_ids": [0]},
        _merge_kwargs=lambda **_: {"images_kwargs": {}},
    )(image_sizes=[(height, width) for width, height in SIZES])
    for size, tokens in zip(SIZES, counts["num_image_tokens"], strict=True):
        assert estimate.image(*size).tokens == tokens, size


def test_images_that_are_not_split(tmp_path):
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    sizes = {"side": 64, "edge": 256, "patch": 16, "scale": 2}
    rule = media_rule(split_folder(tmp_path, "smolvlm", do_image_splitting=False, **sizes))
    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": 256}, max_image_size={"longest_edge": 64}, do_image_splitting=False
    )
    for size in [(1, 1), (500, 3), (3, 500), (400, 300)]:
        made = processor(noise(*size), return_tensors="np")
        assert made["pixel_values"].shape[:2] == (1, rule.image(*size).segments) == (1, 1)


# InternVL


def internvl_folder(tmp_path, tokenizer=None, **settings):
    config = {
        "model_type": "internvl",
        "downsample_ratio": 0.5,
        "vision_config": {"model_type": "internvl_vision", "image_size": [448, 448], "patch_size": [14, 14]},
    }
    processor = {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 448, "width": 448}, **settings}
    folder = write_folder(tmp_path, config, preprocessor_config=processor)
    if tokenizer is not None:
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_internvl_equals_the_processor(tmp_path, tokenizer):
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl.processing_internvl import InternVLProcessor

    # The combined processor tiles whatever the image processor's file says.
    rule = media_rule(internvl_folder(tmp_path, tokenizer, crop_to_patches=False, max_patches=12))
    images = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, max_patches=12)
    known = {
        "image_processor": images,
        "image_seq_length": 256,
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "image_token": "<IMG_CONTEXT>",
        "_merge_kwargs": lambda **_: {"images_kwargs": InternVLProcessor.images_kwargs},
    }
    counts = borrowed(InternVLProcessor, "_get_num_multimodal_tokens", **known)(
        image_sizes=[(height, width) for width, height in SIZES]
    )
    for size, tokens, tiles in zip(SIZES, counts["num_image_tokens"], counts["num_image_patches"], strict=True):
        found = rule.image(*size)
        assert (found.tokens, found.segments, found.patches) == (tokens, tiles, tiles * 1025), size
    for size in SMALL_SIZES[::6]:
        made = images(noise(*size), crop_to_patches=True, return_tensors="np")
        text = borrowed(InternVLProcessor, "replace_image_token", **known)(made, 0)
        assert as_text(rule.image_expansion(*size), "<IMG_CONTEXT>") == text
        assert len(tokenizer(text)["input_ids"]) == rule.image(*size).tokens


def test_internvl_equals_the_features_of_the_model():
    import torch
    from transformers import InternVLConfig, InternVLModel

    vision = {"image_size": [56, 56], "patch_size": [14, 14], **TINY}
    text = {"model_type": "qwen2", "vocab_size": 16, **TINY}
    model = InternVLModel(InternVLConfig(vision_config=vision, text_config=text, downsample_ratio=0.5)).eval()
    with torch.no_grad():
        features = model.get_image_features(torch.zeros(3, 3, 56, 56)).pooler_output
        positions = model.vision_tower(torch.zeros(1, 3, 56, 56)).last_hidden_state.shape[1]
    assert (features.shape[:2], positions) == ((3, 4), 17)


# Gemma 3


def gemma_folder(tmp_path, tokenizer=None, **settings):
    config = {
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "vision_config": {"image_size": 896, "patch_size": 14},
    }
    processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}, **settings}
    folder = write_folder(tmp_path, config, preprocessor_config=processor, processor_config={"image_seq_length": 256})
    if tokenizer is not None:
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(("least", "most", "ratio"), [(256, 4, 1.2), (64, 9, 1.0), (16, 2, 3.0)])
def test_pan_and_scan_equals_the_processor(least, most, ratio):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    rule = PanAndScanRule(
        patches_per_square=4096,
        tokens_per_square=256,
        text=TextCounter(),
        max_crops=most,
        min_crop_side=least,
        min_ratio=ratio,
    )
    processor = Gemma3ImageProcessorPil()
    for width, height in SIZES:
        crops = processor.pan_and_scan(blank(width, height), least, most, ratio)
        assert rule.num_crops(width, height) == len(crops), (width, height)
        assert all(crop.size for crop in crops)


@pytest.mark.parametrize("crops", [True, False])
def test_gemma_writes_what_its_processor_writes(crops, tmp_path, tokenizer):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    rule = media_rule(gemma_folder(tmp_path, tokenizer, do_pan_and_scan=crops, pan_and_scan_min_crop_size=None))
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = Gemma3Processor(images, small_tokenizer("<image_soft_token>"))
    for size in [(40, 60), (600, 600), (900, 600), (600, 1500), (1500, 300)]:
        made = processor(
            images=noise(*size),
            text="<start_of_image>",
            images_kwargs={"do_pan_and_scan": crops},
            add_special_tokens=False,
        )
        found = rule.image(*size)
        assert (found.tokens, found.segments) == (len(made["input_ids"][0]), len(made["pixel_values"]))
        assert (found.features, found.patches) == (256 * found.segments, 4096 * found.segments)
        assert as_text(rule.image_expansion(*size), "<image_soft_token>") == processor.replace_image_token(
            {"num_crops": [found.segments - 1]}, 0
        )


# Mistral 3


def mistral3_folder(tmp_path, tokenizer=None, *, edge=1540, merge=2, **settings):
    config = {
        "model_type": "mistral3",
        "spatial_merge_size": merge,
        "vision_config": {"model_type": "pixtral", "patch_size": 14},
    }
    processor = {"image_processor_type": "PixtralImageProcessorFast", "size": {"longest_edge": edge}, "patch_size": 14}
    combined = {"patch_size": 14, "spatial_merge_size": merge, **settings}
    folder = write_folder(tmp_path, config, preprocessor_config=processor, processor_config=combined)
    if tokenizer is not None:
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(("edge", "merge"), [(1540, 2), (1024, 1), (97, 2)])
def test_mistral3_equals_the_processor(edge, merge, tmp_path):
    from transformers.image_utils import ChannelDimension
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    rule = media_rule(mistral3_folder(tmp_path, edge=edge, merge=merge))
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    owner = processing_module("pixtral", "processing").PixtralProcessor
    write = borrowed(owner, "replace_image_token", patch_size=14, spatial_merge_size=merge, **names)
    refused = 0
    for index, (width, height) in enumerate(SIZES):
        made = get_resize_output_image_size(blank(width, height), edge, 14 * merge, ChannelDimension.FIRST)
        if 0 in made:
            refused += 1
            with pytest.raises(WorkloadError, match=f"{width} x {height} is so thin"):
                rule.image(width, height)
            continue
        size = rule.image(width, height)
        assert (size.patches, size.segments) == (made[0] * made[1] // 14**2, 1), (width, height)
        assert rule.image_shape(width, height) == (made[0] // 14, made[1] // 14)
        if index % 10 == 0:
            text = write({"image_sizes": [made]}, 0)
            assert as_text(rule.image_expansion(width, height), "[IMG]") == text
            assert (size.features, size.tokens) == (text.count("[IMG]"), text.count("["))
    assert 0 < refused < len(SIZES) // 3


def test_mistral3_files_that_disagree_are_refused(tmp_path):
    with pytest.raises(RuntimeConfigError, match=r"spatial_merge_size: the processor has 1, config\.json makes it 2"):
        media_rule(mistral3_folder(tmp_path, spatial_merge_size=1))
    with pytest.raises(RuntimeConfigError, match="patch_size: the processor has 16, vision_config makes it 14"):
        media_rule(mistral3_folder(tmp_path, patch_size=16))


# All


@pytest.mark.parametrize(
    "text", ["\n\n", "\n", "<fake_token_around_image><row_1_col_2>", "<12.5 seconds>", "</img>", "[IMG_BREAK]"]
)
def test_text_without_a_tokenizer_counts_as_common_tokenizers_do(text):
    expected = {"[IMG_BREAK]": 1, "\n\n": 1, "\n": 1, "<12.5 seconds>": 7, "</img>": 1}
    assert TextCounter().count(text) == expected.get(text, 2)


def test_unusable_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(RuntimeConfigError, match=r"tokenizer\.json: expected a tokenizer"):
        TextCounter.of_folder(tmp_path).count("a")


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_other_kinds_are_refused(kind, tmp_path):
    rule = media_rule(gemma_folder(tmp_path))
    assert rule.kinds == ("image",)
    with pytest.raises(WorkloadError, match=f"the model takes image, found (a )?{kind}"):
        rule.audio(1.0) if kind == "audio" else rule.video(10, 20, 20, 30.0)


@pytest.mark.parametrize("side", [0, -3])
def test_impossible_sides_are_refused(side, tmp_path):
    folders = [
        llava_next_folder(tmp_path / "a"),
        onevision_folder(tmp_path / "b"),
        internvl_folder(tmp_path / "c"),
        gemma_folder(tmp_path / "d"),
        split_folder(tmp_path / "e", "smolvlm", side=64, edge=256, patch=16, scale=2),
    ]
    for folder in folders:
        with pytest.raises(WorkloadError, match=f"at least 1 pixel, found 5 x {side}"):
            media_rule(folder).image(5, side)
        with pytest.raises(WorkloadError, match=f"at least 1 pixel, found 5 x {side}"):
            media_rule(folder).images([(5, 5), (5, side)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "full"}, "expected one feature per patch of a 24 x 24 grid, found 577"),
        ({"tower": "siglip_vision_model"}, "found 575"),
    ],
)
def test_llava_next_towers_that_make_another_grid_are_refused(change, message, tmp_path):
    with pytest.raises(RuntimeConfigError, match=message):
        media_rule(llava_next_folder(tmp_path, **change))


def test_disagreeing_settings_are_refused(tmp_path):
    folder = onevision_folder(tmp_path)
    write_folder(folder, {**read(folder, "config"), "vision_aspect_ratio": "square"})
    with pytest.raises(RuntimeConfigError, match="anyres_max_ and a number, found 'square'"):
        media_rule(folder)
    folder = onevision_folder(tmp_path)
    write_folder(folder, {**read(folder, "config"), "image_grid_pinpoints": [[384, 384]]})
    with pytest.raises(RuntimeConfigError, match="image_grid_pinpoints: the processor has"):
        media_rule(folder)
    folder = gemma_folder(tmp_path)
    write_folder(folder, read(folder, "config"), processor_config={"image_seq_length": 64})
    with pytest.raises(RuntimeConfigError, match=r"image_seq_length: the processor has 64, .* makes it 256"):
        media_rule(folder)


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_rules_are_values(tmp_path):
    """Equal folders give equal rules, which travel to other processes."""
    for folder in (onevision_folder(tmp_path / "a"), internvl_folder(tmp_path / "b", small_tokenizer())):
        rule = media_rule(folder)
        assert pickle.loads(pickle.dumps(rule)) == rule == media_rule(folder)
        assert hash(rule) == hash(media_rule(folder))
    assert isinstance(image_rule(media_rule(onevision_folder(tmp_path / "a"))), AnyResolutionRule)


def test_null_is_a_default(tmp_path):
    """Transformers writes null for what is not set."""
    plain = media_rule(internvl_folder(tmp_path / "a"))
    assert (
        media_rule(internvl_folder(tmp_path / "b", crop_to_patches=None, max_patches=None, min_patches=None)) == plain
    )
    folder = internvl_folder(tmp_path / "c")
    named = {"extra_special_tokens": {"start_image_token": "<s>", "end_image_token": {"content": "<e>"}}}
    write_folder(folder, read(folder, "config"), tokenizer_config=named)
    assert media_rule(folder).image_expansion(10, 10) == ("<s>", 256, "<e>")
    folder = onevision_folder(tmp_path / "d")
    config = {**read(folder, "config"), "vision_feature_select_strategy": None, "vision_aspect_ratio": None}
    assert media_rule(write_folder(folder, config)) == media_rule(onevision_folder(tmp_path / "e"))


@pytest.mark.parametrize("size", [224, {"height": 224, "width": 224}])
def test_a_size_of_another_kind_is_named(size, tmp_path):
    config = {"model_type": "qwen2_vl", "vision_config": {"patch_size": 14}}
    folder = write_folder(
        tmp_path, config, preprocessor_config={"image_processor_type": "Qwen2VLImageProcessor", "size": size}
    )
    with pytest.raises(RuntimeConfigError, match="size: expected shortest_edge and longest_edge, found"):
        media_rule(folder)
