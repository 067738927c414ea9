"""How many patches and tokens a media item becomes: the only home of these formulas.

A rule is read from the JSON configs of a model folder, without torch and without the processor itself. Planner,
assigner and loader all ask the same rule, so the counts they use are one number.

Promise: equal to the Transformers processor of the same name and to the number of features the model makes, for every
size that the processor accepts; at least one patch and one token for sides from 1 pixel on. A size that a processor
refuses (aspect ratio) raises here, before training. Price: a few microseconds per image.

Sources: the image processors of Transformers 5 (GotOcr2, SigLIP, CLIP, Qwen2-VL).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from entrain_opt.errors import RuntimeConfigError, WorkloadError
from entrain_opt.spec.folder import find_model_folder, first_value, read_json

_FALLBACK_SUFFIXES = ("Pil", "Fast")
_CLASS_TOKEN_TOWERS = {"clip_vision_model", "clip_vision_text_model"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSize:
    """What one media item costs.

    Attributes:
        patches: what the encoder computes on (a class token counts).
        segments: attention segments that the patches fall into: tiles, frames or windows.
        tokens: what the language model sees.
    """

    patches: int
    segments: int
    tokens: int


class MediaRule(ABC):
    """Sizes of the media items that one model takes."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The media kinds that have a rule."""
        return ("image",)

    @abstractmethod
    def image(self, width: int, height: int) -> MediaSize:
        """The cost of an image of `width` x `height` pixels.

        Raises:
            WorkloadError: the processor refuses this size.
        """

    def images(self, sizes: Sequence[tuple[int, int]]) -> list[MediaSize]:
        """The costs of all images of one sample, given as (width, height), in order. Raises as `image` does."""
        return [self.image(width, height) for width, height in sizes]

    def audio(self, seconds: float) -> MediaSize:
        """The cost of an audio clip. Raises WorkloadError if the model takes no audio."""
        raise WorkloadError(f"the model takes {', '.join(self.kinds)}, found audio of {seconds} seconds.")

    def video(self, num_frames: int, width: int, height: int, fps: float | None = None) -> MediaSize:
        """The cost of a video file. Raises WorkloadError if the model takes no videos."""
        raise WorkloadError(f"the model takes {', '.join(self.kinds)}, found a video of {num_frames} frames.")


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedRule(MediaRule):
    """CLIP and SigLIP: every image is resized to one square.

    Attributes:
        patches: per image.
        tokens: per image.
        max_aspect_ratio: where the short side is resized and the long side cropped, the resized image of a thin strip
            would not fit in memory; None where both sides are resized.
    """

    patches: int
    tokens: int
    max_aspect_ratio: float | None = None

    def image(self, width: int, height: int) -> MediaSize:
        _check_sides(width, height, self.max_aspect_ratio)
        return MediaSize(patches=self.patches, segments=1, tokens=self.tokens)


@cache
def _grids(min_tiles: int, max_tiles: int) -> list[tuple[int, int]]:
    """(columns, rows) of every grid, smallest first; the order decides between equally near grids."""
    sides = range(1, max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides]
    return sorted((g for g in grids if min_tiles <= g[0] * g[1] <= max_tiles), key=lambda g: g[0] * g[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class TileRule(MediaRule):
    """GOT-OCR2 tiling: the image is resized to a grid of tiles; a thumbnail joins if there are several.

    Attributes:
        tile_width, tile_height: pixels of one tile.
        min_tiles, max_tiles: of the grid, without the thumbnail.
        patches_per_tile, tokens_per_tile: of every tile and the thumbnail.
    """

    tile_width: int
    tile_height: int
    min_tiles: int
    max_tiles: int
    patches_per_tile: int
    tokens_per_tile: int

    def image(self, width: int, height: int) -> MediaSize:
        _check_sides(width, height, None)
        columns, rows = self.grid(width, height)
        tiles = columns * rows + (columns * rows > 1)
        return MediaSize(patches=tiles * self.patches_per_tile, segments=tiles, tokens=tiles * self.tokens_per_tile)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(columns, rows): the grid whose aspect ratio is nearest.

        Among equally near grids a larger one wins while it has less than twice the pixels of the image.
        """
        if self.max_tiles < 2:
            return 1, 1
        best, best_difference = (1, 1), math.inf
        for columns, rows in _grids(self.min_tiles, self.max_tiles):
            difference = abs(width / height - columns / rows)
            is_not_excessive = width * height > 0.5 * self.tile_height * self.tile_width * columns * rows
            if difference < best_difference or (difference == best_difference and is_not_excessive):
                best, best_difference = (columns, rows), difference
        return best


@dataclass(frozen=True, kw_only=True, slots=True)
class SmartResizeRule(MediaRule):
    """Qwen2-VL family: sides are rounded to multiples of patch * merge within a pixel budget.

    Attributes:
        patch_side: pixels.
        merge: patches per token and side.
        min_pixels, max_pixels: of the resized image.
        window_side: pixels of an attention window; None for full attention over the image.
        max_aspect_ratio: the processor's own guard.
    """

    patch_side: int
    merge: int
    min_pixels: int
    max_pixels: int
    window_side: int | None = None
    max_aspect_ratio: float = 200.0

    def image(self, width: int, height: int) -> MediaSize:
        _check_sides(width, height, self.max_aspect_ratio)
        resized_width, resized_height = self.resized(width, height)
        columns, rows = resized_width // self.patch_side, resized_height // self.patch_side
        segments = 1
        if self.window_side is not None:
            patches_per_window = self.window_side // self.patch_side // self.merge * self.merge
            segments = math.ceil(columns / patches_per_window) * math.ceil(rows / patches_per_window)
        patches = columns * rows
        return MediaSize(patches=patches, segments=segments, tokens=patches // self.merge**2)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that the processor resizes to, each at least one merged patch."""
        factor = self.patch_side * self.merge
        sides = [round(side / factor) * factor for side in (width, height)]
        if sides[0] * sides[1] > self.max_pixels:
            scale = math.sqrt((height * width) / self.max_pixels)
            sides = [math.floor(side / scale / factor) * factor for side in (width, height)]
        elif sides[0] * sides[1] < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            sides = [math.ceil(side * scale / factor) * factor for side in (width, height)]
        return max(factor, sides[0]), max(factor, sides[1])


def _check_sides(width: int, height: int, max_aspect_ratio: float | None) -> None:
    if width < 1 or height < 1:
        raise WorkloadError(f"image: expected sides of at least 1 pixel, found {width} x {height}.")
    ratio = max(width, height) / min(width, height)
    if max_aspect_ratio is not None and ratio > max_aspect_ratio:
        raise WorkloadError(
            f"image: expected an aspect ratio of at most {max_aspect_ratio:g}, found {width} x {height} ({ratio:.1f}). "
            "Crop the image or leave it out (policy skip)."
        )


def media_rule(model_folder: str | Path) -> MediaRule:
    """The rule of a Hugging Face model folder.

    Args:
        model_folder: with config.json and preprocessor_config.json (or processor_config.json).

    Raises:
        RuntimeConfigError: a file is missing, the processor is unknown, or model and processor disagree.
    """
    folder = find_model_folder(model_folder)
    config = read_json(folder / "config.json")
    processor = _read_image_processor(folder)
    name = str(first_value(processor, "image_processor_type", "feature_extractor_type"))
    for suffix in _FALLBACK_SUFFIXES:
        name = name.removesuffix(suffix)
    if processor.get("do_resize", True) is not True:
        raise RuntimeConfigError(f"{folder}: do_resize: expected true, found {processor['do_resize']!r}.")
    match name:
        case "GotOcr2ImageProcessor":
            width, height = _square(processor, "size", {"height": 384, "width": 384}, folder)
            max_tiles = processor.get("max_patches", 12)
            patches, tokens = _tower_counts(config, width, height, folder)
            if not processor.get("crop_to_patches", False) or max_tiles < 2:
                return FixedRule(patches=patches, tokens=tokens)
            return TileRule(
                tile_width=width,
                tile_height=height,
                min_tiles=processor.get("min_patches", 1),
                max_tiles=max_tiles,
                patches_per_tile=patches,
                tokens_per_tile=tokens,
            )
        case "SiglipImageProcessor":
            width, height = _square(processor, "size", {"height": 224, "width": 224}, folder)
            patches, tokens = _tower_counts(config, width, height, folder)
            return FixedRule(patches=patches, tokens=tokens)
        case "CLIPImageProcessor":
            if not processor.get("do_center_crop", True):
                raise RuntimeConfigError(f"{folder}: do_center_crop: expected true for CLIP, found false.")
            width, height = _square(processor, "crop_size", {"height": 224, "width": 224}, folder)
            patches, tokens = _tower_counts(config, width, height, folder)
            resizes_short_side = "height" not in (processor.get("size") or {})
            return FixedRule(patches=patches, tokens=tokens, max_aspect_ratio=200.0 if resizes_short_side else None)
        case "Qwen2VLImageProcessor" | "Qwen3VLImageProcessor":
            return _smart_resize_rule(config, processor, folder)
    raise RuntimeConfigError(
        f"{folder}: image_processor_type: expected GotOcr2, Siglip, CLIP or Qwen2VL ImageProcessor, found {name!r}. "
        "A new rule goes into entrain_opt/workload/media.py."
    )


def _read_image_processor(folder: Path) -> dict[str, Any]:
    """The image processor's settings, from either of the two files that Transformers writes."""
    if not (folder / "preprocessor_config.json").exists() and (folder / "processor_config.json").exists():
        processor = read_json(folder / "processor_config.json").get("image_processor")
        if not isinstance(processor, dict):
            raise RuntimeConfigError(f"{folder}/processor_config.json: expected an image_processor, found none.")
        return processor
    return read_json(folder / "preprocessor_config.json")


def _square(processor: dict[str, Any], field: str, default: dict[str, int], folder: Path) -> tuple[int, int]:
    """(width, height) of a size field written as a number or as height and width."""
    size = first_value(processor, field) or default
    if isinstance(size, int):
        return size, size
    if not isinstance(size, dict) or not {"height", "width"} <= size.keys():
        raise RuntimeConfigError(f"{folder}: {field}: expected height and width, found {size!r}.")
    return int(size["width"]), int(size["height"])


def _tower_counts(config: dict[str, Any], width: int, height: int, folder: Path) -> tuple[int, int]:
    """(patches, tokens) of one image that fills the vision tower."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict) or "patch_size" not in vision or "image_size" not in vision:
        raise RuntimeConfigError(f"{folder}/config.json: vision_config: expected image_size and patch_size.")
    image_side, patch_side = vision["image_size"], vision["patch_size"]
    if (width, height) != (image_side, image_side):
        raise RuntimeConfigError(
            f"{folder}: the processor makes images of {width} x {height}, vision_config.image_size is {image_side}."
        )
    has_class_token = vision.get("model_type") in _CLASS_TOKEN_TOWERS
    patches = (image_side // patch_side) ** 2 + has_class_token
    drops_first = config.get("vision_feature_select_strategy", "default") == "default"
    return patches, patches - drops_first


def _smart_resize_rule(config: dict[str, Any], processor: dict[str, Any], folder: Path) -> SmartResizeRule:
    size = processor.get("size") or {}
    vision = config.get("vision_config") or {}
    patch_side, merge = processor.get("patch_size", 14), processor.get("merge_size", 2)
    for field, found in (("patch_size", patch_side), ("spatial_merge_size", merge)):
        if vision.get(field, found) != found:
            raise RuntimeConfigError(f"{folder}: {field}: the processor has {found}, vision_config {vision[field]}.")
    has_windows = "fullatt_block_indexes" in vision or config.get("model_type") == "qwen2_5_vl"
    min_pixels = first_value(processor, "min_pixels") or size.get("shortest_edge", 56 * 56)
    max_pixels = first_value(processor, "max_pixels") or size.get("longest_edge", 28 * 28 * 1280)
    if not 0 < min_pixels <= max_pixels:
        raise RuntimeConfigError(f"{folder}: expected 0 < min_pixels <= max_pixels, found {min_pixels}, {max_pixels}.")
    return SmartResizeRule(
        patch_side=patch_side,
        merge=merge,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        window_side=vision.get("window_size", 112) if has_windows else None,
    )
