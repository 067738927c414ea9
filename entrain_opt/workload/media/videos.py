"""Model folder -> video rule: settings of the video processor of each family that takes videos."""

from __future__ import annotations

from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec.folder import first_value
from entrain_opt.workload.media.folder import ModelFiles, edges, setting, square, tower_side
from entrain_opt.workload.media.frames import FrameSampling, Method
from entrain_opt.workload.media.rule import FrameValues, MediaRule
from entrain_opt.workload.media.smart_resize import SmartResizeVideoRule
from entrain_opt.workload.media.splits import SplitRule, TimedFrameRule
from entrain_opt.workload.media.text import TextCounter
from entrain_opt.workload.media.tiles import FrameSquareRule, TileRule

_QWEN2 = {"qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen2_5_omni_thinker"}
_QWEN2_TOWERS = {"qwen2_5_vl_vision", "qwen2_5_vl", "qwen2_5_omni_vision_encoder"}
_QWEN3 = {"qwen3_vl", "qwen3_vl_moe"}
_OMNI = {"qwen2_5_omni", "qwen2_5_omni_thinker"}
_BICUBIC, _LANCZOS = 3, 1
#: Defaults of the video processors.
_CLIP_VALUES = FrameValues(
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711), resample=_BICUBIC
)
_SMOLVLM_VALUES = FrameValues(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), resample=_LANCZOS)
#: How many of fps and num_frames each way of sampling takes.
_GIVEN: dict[Method, tuple[int, ...]] = {
    "uniform": (0, 1, 2),
    "qwen2": (1,),
    "qwen3": (0, 1),
    "internvl": (1, 2),
    "smolvlm": (2,),
}


def video_rule(files: ModelFiles, image_rule: MediaRule, text: TextCounter) -> MediaRule | None:
    """The rule of a family's videos; None if it takes none.

    Args:
        files: of the model folder.
        image_rule: of its images; frames that become one square each take their sizes from it.
        text: counts the tokens of the processor's texts.

    Raises:
        RuntimeConfigError: settings that the processor would refuse, or that disagree with the model.
    """
    settings, family = files.video_processor, files.family
    if family in _QWEN2 or (files.is_composed and files.vision.get("model_type") in _QWEN2_TOWERS):
        return _qwen_rule(files, settings, text=None)
    if family in _QWEN3:
        return _qwen_rule(files, settings, text=text)
    if family == "llava_onevision":
        image_side, grid_side = tower_side(files)
        _check_square(files, settings, image_side)
        return FrameSquareRule(
            patches_per_frame=grid_side**2,
            tokens_per_frame=((grid_side + 1) // 2) ** 2,
            side=image_side,
            values=_values(files, settings, _CLIP_VALUES),
            newline_tokens=1,
            sampling=_sampling(files, settings, "uniform"),
        )
    if isinstance(image_rule, TileRule) and family == "internvl":
        _check_square(files, settings, image_rule.tile_width)
        return FrameSquareRule(
            patches_per_frame=image_rule.patches_per_tile,
            tokens_per_frame=image_rule.tokens_per_tile,
            side=image_rule.tile_width,
            values=_values(files, settings, _CLIP_VALUES),
            opening=image_rule.opening,
            closing=image_rule.closing,
            names_frames=True,
            sampling=_sampling(files, settings, "internvl"),
            text=text,
        )
    if isinstance(image_rule, SplitRule) and family == "smolvlm":
        chosen = settings.get("video_sampling") or {}
        size = {"size": settings.get("size") or setting(chosen, "video_size", {})}
        settings = {**settings, "num_frames": setting(chosen, "max_frames", settings.get("num_frames"))}
        settings["fps"] = setting(chosen, "fps", settings.get("fps"))
        # The chat template's call samples wherever the settings name a rate.
        settings["do_sample_frames"] = settings.get("do_sample_frames") or settings["num_frames"] is not None
        return TimedFrameRule(
            patches_per_frame=image_rule.patches_per_tile,
            tokens_per_frame=image_rule.tokens_per_tile,
            longest_edge=edges(size, "size", {"longest_edge": 4 * 364}, files.folder)["longest_edge"],
            side=image_rule.tile_side,
            values=_values(files, settings, _SMOLVLM_VALUES),
            sampling=_sampling(files, settings, "smolvlm"),
            text=text,
        )
    return None


def _check_square(files: ModelFiles, settings: dict[str, Any], side: int) -> None:
    """Raise RuntimeConfigError unless frames become the square that the tower takes; no size given means that."""
    found = square(settings, "size", {"height": side, "width": side}, files.folder)
    if found != (side, side):
        raise RuntimeConfigError(
            f"{files.folder}: size: the video processor makes frames of {found[0]} x {found[1]}, the vision tower "
            f"takes {side} x {side}."
        )
    if settings.get("do_center_crop"):
        raise RuntimeConfigError(f"{files.folder}: do_center_crop: expected false for videos, found true.")


def _values(files: ModelFiles, settings: dict[str, Any], default: FrameValues) -> FrameValues:
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if setting(settings, name, True) is not True:
            raise RuntimeConfigError(f"{files.folder}: {name}: expected true for videos, found {settings[name]!r}.")
    return FrameValues(
        mean=tuple(setting(settings, "image_mean", default.mean)),
        std=tuple(setting(settings, "image_std", default.std)),
        resample=setting(settings, "resample", default.resample),
    )


def _qwen_rule(files: ModelFiles, settings: dict[str, Any], *, text: TextCounter | None) -> SmartResizeVideoRule:
    is_qwen3 = text is not None
    patch_side, factor = (16, 32) if is_qwen3 else (14, 28)
    patch_side, merge = setting(settings, "patch_size", patch_side), setting(settings, "merge_size", 2)
    temporal = setting(settings, "temporal_patch_size", 2)
    vision = files.vision
    files.expect_equal("patch_size", patch_side, setting(vision, "patch_size", patch_side), "vision_config")
    files.expect_equal("spatial_merge_size", merge, setting(vision, "spatial_merge_size", merge), "vision_config")
    files.expect_equal(
        "temporal_patch_size", temporal, setting(vision, "temporal_patch_size", temporal), "vision_config"
    )
    default = {"shortest_edge": 128 * factor**2, "longest_edge": 768 * factor**2}
    size = default if files.family in _OMNI else edges(settings, "size", default, files.folder)
    if not is_qwen3 and files.family not in _OMNI:
        size["shortest_edge"] = first_value(settings, "min_pixels") or size["shortest_edge"]
        size["longest_edge"] = first_value(settings, "max_pixels") or size["longest_edge"]
    min_pixels, max_pixels = pixel_budget(files, size["shortest_edge"], size["longest_edge"])
    caps = settings.get("cap_pixels_per_frame")
    most_tokens = setting(settings, "max_video_tokens", 768 if is_qwen3 else 128_000)
    sampling = _sampling(
        files,
        {"do_sample_frames": True, "fps": 2, **settings} if is_qwen3 else settings,
        "qwen3" if is_qwen3 else "qwen2",
        multiple=temporal,
    )
    return SmartResizeVideoRule(
        patch_side=patch_side,
        merge=merge,
        temporal=temporal,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        sampling=sampling,
        clip_budget=is_qwen3,
        max_video_tokens=most_tokens if caps else None,
        timestamps=text,
    )


def pixel_budget(files: ModelFiles, min_pixels: Any, max_pixels: Any) -> tuple[int, int]:
    """The budget, if it is one.

    Raises:
        RuntimeConfigError: not 0 < min_pixels <= max_pixels.
    """
    if not (isinstance(min_pixels, int) and isinstance(max_pixels, int) and 0 < min_pixels <= max_pixels):
        raise RuntimeConfigError(
            f"{files.folder}: expected 0 < min_pixels <= max_pixels, found {min_pixels}, {max_pixels}."
        )
    return min_pixels, max_pixels


def _sampling(files: ModelFiles, settings: dict[str, Any], method: Method, *, multiple: int = 2) -> FrameSampling:
    if not setting(settings, "do_sample_frames", False):
        return FrameSampling()
    fps, num_frames = settings.get("fps"), settings.get("num_frames")
    accepted = _GIVEN[method]
    if (fps is not None) + (num_frames is not None) not in accepted:
        expected = "both fps and num_frames" if accepted == (2,) else "one of fps and num_frames"
        raise RuntimeConfigError(
            f"{files.folder}: video processor with do_sample_frames: expected {expected}, found fps {fps}, num_frames "
            f"{num_frames}. Set them in video_preprocessor_config.json or processor_config.json."
        )
    shift = setting(settings, "initial_shift", True)
    return FrameSampling(
        method=method,
        fps=fps,
        num_frames=num_frames,
        min_frames=setting(settings, "min_frames", 4),
        max_frames=setting(settings, "max_frames", 768),
        multiple=multiple,
        initial_shift=None if shift is True or shift is None else float(shift),
    )
