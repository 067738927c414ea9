"""Model folder -> image rule, by the class of the image processor.

Settings that the combined processor of a family fixes, whatever the image processor's file says, are fixed here too:
InternVL always tiles. A loader that uses the image processor alone must pass them on. Gemma 3 pans and scans where the
image processor's file says so.
"""

from __future__ import annotations

import re
from typing import Any

from entrain_opt.errors import FAMILY_GUIDE, RuntimeConfigError
from entrain_opt.spec.folder import first_value, read_json
from entrain_opt.workload.media.anyres import AnyResolutionRule
from entrain_opt.workload.media.folder import ModelFiles, edges, setting, square, tower_side
from entrain_opt.workload.media.pan_and_scan import PanAndScanRule
from entrain_opt.workload.media.patch_rows import PatchRowRule
from entrain_opt.workload.media.rule import MediaRule
from entrain_opt.workload.media.smart_resize import SmartResizeRule
from entrain_opt.workload.media.splits import SplitRule
from entrain_opt.workload.media.text import TextCounter
from entrain_opt.workload.media.tiles import FixedRule, TileRule
from entrain_opt.workload.media.videos import pixel_budget

_CLASS_TOKEN_TOWERS = {"clip_vision_model", "clip_vision_text_model", "internvl_vision"}
_NATIVE_PROCESSORS = {"Qwen2VLImageProcessor", "Qwen3VLImageProcessor"}
_SQUARE_PROCESSORS = {"CLIPImageProcessor", "LlavaImageProcessor", "SiglipImageProcessor", "GotOcr2ImageProcessor"}
#: From which the resized long side of a thin image would not fit in memory, where only the short side has a target.
_MAX_CROPPED_RATIO = 200.0
_NEXT_RESOLUTIONS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def image_rule(files: ModelFiles, text: TextCounter) -> MediaRule:
    """The rule of a model's images, by the class of its image processor.

    Raises:
        RuntimeConfigError: the processor is unknown, or model and processor disagree.
    """
    settings, name = files.image_processor, files.image_processor_name
    if setting(settings, "do_resize", True) is not True:
        raise RuntimeConfigError(f"{files.folder}: do_resize: expected true, found {settings['do_resize']!r}.")
    if files.is_composed:
        _check_composed(files, name)
    match name:
        case "GotOcr2ImageProcessor":
            return _tile_rule(files, settings, text)
        case "SiglipImageProcessor":
            size = square(settings, "size", {"height": 224, "width": 224}, files.folder)
            return FixedRule(**_tower_counts(files, size))
        case "CLIPImageProcessor" | "LlavaImageProcessor":
            if not setting(settings, "do_center_crop", True):
                raise RuntimeConfigError(f"{files.folder}: do_center_crop: expected true for {name}, found false.")
            size = square(settings, "crop_size", {"height": 224, "width": 224}, files.folder)
            resizes_short_side = "height" not in (settings.get("size") or {})
            pads = name == "LlavaImageProcessor" and bool(setting(settings, "do_pad", False))
            limit = _MAX_CROPPED_RATIO if resizes_short_side and not pads else None
            return FixedRule(**_tower_counts(files, size), max_aspect_ratio=limit)
        case "LlavaNextImageProcessor" | "LlavaOnevisionImageProcessor":
            return _any_resolution_rule(files, settings, is_onevision=name == "LlavaOnevisionImageProcessor")
        case "Qwen2VLImageProcessor" | "Qwen3VLImageProcessor":
            return _smart_resize_rule(files, settings)
        case "Idefics3ImageProcessor" | "SmolVLMImageProcessor":
            return _split_rule(files, settings, text)
        case "Gemma3ImageProcessor":
            return _pan_and_scan_rule(files, settings, text)
        case "PixtralImageProcessor":
            return _patch_row_rule(files, settings, text)
    raise RuntimeConfigError(
        f"{files.folder}: image_processor_type: expected that of CLIP, SigLIP, LLaVA, LLaVA-NeXT, LLaVA-OneVision, "
        f"Qwen2-VL, Qwen3-VL, GotOcr2 (InternVL), Idefics3, SmolVLM, Gemma3 or Pixtral, found {name!r}. "
        f"To add it, write a MediaRule in entrain_opt/workload/media/: see {FAMILY_GUIDE}."
    )


def _check_composed(files: ModelFiles, name: str) -> None:
    """Raise RuntimeConfigError unless a composed model's tower takes what the image processor makes."""
    tower = str(files.vision.get("model_type"))
    is_native = tower.startswith(("qwen2_5_vl", "qwen2_5_omni", "qwen3_vl"))
    expected = _NATIVE_PROCESSORS if is_native else _SQUARE_PROCESSORS
    if name not in expected:
        raise RuntimeConfigError(
            f"{files.folder}: image_processor_type: expected one of {sorted(expected)} for the tower {tower!r} of a "
            f"composed model, found {name!r}."
        )


def _tower_counts(files: ModelFiles, size: tuple[int, int]) -> dict[str, int]:
    """Patches and tokens of one image that fills the vision tower of a LLaVA or of a composed model."""
    _, grid_side = _checked_tower(files, size)
    patches = grid_side**2 + (files.vision.get("model_type") in _CLASS_TOKEN_TOWERS)
    if files.is_composed:
        tokens = grid_side**2
        for field, whole in (("stack", grid_side**2), ("merge", grid_side), ("pool", grid_side)):
            joined = files.stack("vision_projector", field)
            if whole % joined:
                raise RuntimeConfigError(
                    f"{files.folder}: vision_projector.{field}: expected a divisor of {whole} patches"
                    f"{' per side' * (field != 'stack')}, found {joined}."
                )
            tokens //= joined if field == "stack" else joined**2
        return {"patches": patches, "tokens": tokens}
    usual = "full" if files.family == "llava_onevision" else "default"
    drops_first = setting(files.config, "vision_feature_select_strategy", usual) == "default"
    return {"patches": patches, "tokens": patches - drops_first}


def _checked_tower(files: ModelFiles, size: tuple[int, int]) -> tuple[int, int]:
    """(pixels, patches) per side, if the processor makes images of that size."""
    image_side, grid_side = tower_side(files)
    if size != (image_side, image_side):
        raise RuntimeConfigError(
            f"{files.folder}: the processor makes images of {size[0]} x {size[1]}, vision_config.image_size is "
            f"{image_side}."
        )
    return image_side, grid_side


def _tile_rule(files: ModelFiles, settings: dict[str, Any], text: TextCounter) -> MediaRule:
    size = square(settings, "size", {"height": 384, "width": 384}, files.folder)
    min_tiles, max_tiles = setting(settings, "min_patches", 1), setting(settings, "max_patches", 12)
    if files.family == "internvl":
        image_side, grid_side = _checked_tower(files, size)
        strategy = setting(files.config, "vision_feature_select_strategy", "default")
        files.expect_equal("vision_feature_select_strategy", strategy, "default", "the class token of InternVL")
        tokens = int(grid_side * setting(files.config, "downsample_ratio", 0.5)) ** 2
        files.expect_equal(
            "image_seq_length", setting(files.processor, "image_seq_length", tokens), tokens, "config.json"
        )
        names = _special_tokens(files)
        return TileRule(
            tile_width=image_side,
            tile_height=image_side,
            min_tiles=min_tiles,
            max_tiles=max_tiles,
            patches_per_tile=grid_side**2 + 1,
            tokens_per_tile=tokens,
            opening=names.get("start_image_token", "<img>"),
            closing=names.get("end_image_token", "</img>"),
            text=text,
        )
    counts = _tower_counts(files, size)
    if not setting(settings, "crop_to_patches", False) or max_tiles < 2:
        return FixedRule(**counts)
    return TileRule(
        tile_width=size[0],
        tile_height=size[1],
        min_tiles=min_tiles,
        max_tiles=max_tiles,
        patches_per_tile=counts["patches"],
        tokens_per_tile=counts["tokens"],
    )


def _any_resolution_rule(files: ModelFiles, settings: dict[str, Any], *, is_onevision: bool) -> AnyResolutionRule:
    image_side, grid_side = tower_side(files)
    default = {"height": 384, "width": 384} if is_onevision else {"height": 224, "width": 224}
    crop = None if is_onevision else default
    tile = first_value(settings, "crop_size") or crop or first_value(settings, "size") or default
    size = square({"size": tile}, "size", default, files.folder)
    _checked_tower(files, size)
    counts = _tower_counts(files, size)
    if counts["tokens"] != grid_side**2:
        raise RuntimeConfigError(
            f"{files.folder}: vision_feature_select_strategy: expected one feature per patch of a {grid_side} x "
            f"{grid_side} grid, found {counts['tokens']}. Use `default` with a class token, `full` without."
        )
    sides = range(1, 7)
    known = [[384 * row, 384 * column] for row in sides for column in sides] if is_onevision else _NEXT_RESOLUTIONS
    resolutions = first_value(settings, "image_grid_pinpoints") or known
    expected = first_value(files.config, "image_grid_pinpoints") or resolutions
    files.expect_equal("image_grid_pinpoints", resolutions, expected, "config.json")
    max_tiles = None
    if is_onevision:
        written = first_value(files.processor, "vision_aspect_ratio") or files.config.get("vision_aspect_ratio")
        found = re.fullmatch(r"anyres_max_(\d+)", written or "anyres_max_9")
        if found is None:
            raise RuntimeConfigError(
                f"{files.folder}: vision_aspect_ratio: expected anyres_max_ and a number, found {written!r}."
            )
        max_tiles = int(found.group(1))
    return AnyResolutionRule(
        tile_side=image_side,
        grid_side=grid_side,
        patches_per_tile=counts["patches"],
        resolutions=tuple((int(height), int(width)) for height, width in resolutions),
        max_tiles=max_tiles,
    )


def _smart_resize_rule(files: ModelFiles, settings: dict[str, Any]) -> SmartResizeRule:
    size = edges(settings, "size", {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, files.folder)
    patch_side, merge = setting(settings, "patch_size", 14), setting(settings, "merge_size", 2)
    files.expect_equal("patch_size", patch_side, setting(files.vision, "patch_size", patch_side), "vision_config")
    files.expect_equal("spatial_merge_size", merge, setting(files.vision, "spatial_merge_size", merge), "vision_config")
    min_pixels, max_pixels = pixel_budget(
        files,
        first_value(settings, "min_pixels") or size["shortest_edge"],
        first_value(settings, "max_pixels") or size["longest_edge"],
    )
    return SmartResizeRule(
        patch_side=patch_side,
        merge=merge,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
    )


def _split_rule(files: ModelFiles, settings: dict[str, Any], text: TextCounter) -> SplitRule:
    tile_side = edges(settings, "max_image_size", {"longest_edge": 364}, files.folder)["longest_edge"]
    longest_edge = edges(settings, "size", {"longest_edge": 4 * 364}, files.folder)["longest_edge"]
    _, grid_side = _checked_tower(files, (tile_side, tile_side))
    tokens = grid_side**2 // setting(files.config, "scale_factor", 2) ** 2
    files.expect_equal("image_seq_len", setting(files.processor, "image_seq_len", tokens), tokens, "config.json")
    return SplitRule(
        longest_edge=longest_edge if setting(settings, "do_image_splitting", True) else None,
        tile_side=tile_side,
        patches_per_tile=grid_side**2,
        tokens_per_tile=tokens,
        text=text,
    )


def _pan_and_scan_rule(files: ModelFiles, settings: dict[str, Any], text: TextCounter) -> PanAndScanRule:
    size = square(settings, "size", {"height": 224, "width": 224}, files.folder)
    _, grid_side = _checked_tower(files, size)
    tokens = setting(files.config, "mm_tokens_per_image", 256)
    written = first_value(files.processor, "image_seq_length") or tokens
    files.expect_equal("image_seq_length", written, tokens, "config.mm_tokens_per_image")
    names = _special_tokens(files)
    crops = first_value(settings, "pan_and_scan_max_num_crops") or 4
    return PanAndScanRule(
        patches_per_square=grid_side**2,
        tokens_per_square=tokens,
        text=text,
        opening=names.get("boi_token", "<start_of_image>"),
        closing=names.get("eoi_token", "<end_of_image>"),
        max_crops=crops if settings.get("do_pan_and_scan") else 0,
        min_crop_side=first_value(settings, "pan_and_scan_min_crop_size") or 256,
        min_ratio=first_value(settings, "pan_and_scan_min_ratio_to_activate") or 1.2,
    )


def _patch_row_rule(files: ModelFiles, settings: dict[str, Any], text: TextCounter) -> PatchRowRule:
    patch_side = setting(files.vision, "patch_size", 16)
    merge = setting(files.config, "spatial_merge_size", 2) if files.family == "mistral3" else 1
    # The combined processor hands its own patch size to the image processor.
    files.expect_equal("patch_size", setting(files.processor, "patch_size", patch_side), patch_side, "vision_config")
    written = setting(files.processor, "spatial_merge_size", merge)
    files.expect_equal("spatial_merge_size", written, merge, "config.json")
    return PatchRowRule(
        patch_side=patch_side,
        merge=merge,
        longest_edge=edges(settings, "size", {"longest_edge": 1024}, files.folder)["longest_edge"],
        text=text,
        row_break=files.processor.get("image_break_token") or "[IMG_BREAK]",
        closing=files.processor.get("image_end_token") or "[IMG_END]",
    )


def _special_tokens(files: ModelFiles) -> dict[str, str]:
    """Named special tokens that the tokenizer's settings list."""
    path = files.folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    named = settings.get("extra_special_tokens")
    names = {**settings, **(named if isinstance(named, dict) else {})}
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in names.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}
