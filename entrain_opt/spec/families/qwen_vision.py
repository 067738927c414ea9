"""The towers of the Qwen-VL family: native resolution, and a merger of 2 x 2 patches as projector.

Qwen2.5-VL attends within squares of `window_size` pixels except in `fullatt_block_indexes`. Qwen3-VL attends to the
whole picture everywhere, and projects the features of `deepstack_visual_indexes` too: those mergers count with the
projector, because they belong to the path into the language model and are computed per media token as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec.families.fields import Fields
from entrain_opt.spec.model import AttentionWindow, LayerKind, ModuleSpec

_COMMON = {
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_heads": 16,
    "out_hidden_size": 3584,
}
_QWEN2_5 = {
    **_COMMON,
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
_QWEN3 = {
    **_COMMON,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}


def qwen_output_width(given: Mapping[str, Any], where: str) -> int:
    """Values per media token that the merger of either tower hands on."""
    return Fields(given, _COMMON, where).count("out_hidden_size")


def read_qwen2_5_vision(given: Mapping[str, Any] | None, where: str) -> ModuleSpec:
    """The tower of Qwen2.5-VL and Qwen2.5-Omni with its merger.

    Raises:
        RuntimeConfigError: a field without sense.
    """
    vision = Fields(given or {}, _QWEN2_5, where)
    depth = vision.count("depth", "num_hidden_layers")
    hidden, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    merge, patch = vision.count("spatial_merge_size"), vision.count("patch_size")
    patch_width = _patch_width(vision)
    merged, out = hidden * merge**2, vision.count("out_hidden_size")
    # RMS norms without bias; every matrix of the layers has one.
    layer = 4 * (hidden * hidden + hidden) + 3 * hidden * inner + 2 * inner + hidden + 2 * hidden
    window_side = vision.count("window_size") // merge // patch * merge
    if window_side < 1:
        raise RuntimeConfigError(
            f"{where}: window_size: expected at least {merge * patch} pixels (one merged patch), "
            f"found {vision.get('window_size')}."
        )
    # Transformers ignores numbers behind the last layer, as in shortened models.
    whole = {index for index in vision.get("fullatt_block_indexes") if index < depth}
    return ModuleSpec(
        name="vision",
        num_layers=depth,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=vision.count("num_heads", "num_attention_heads"),
        num_key_value_heads=vision.count("num_heads", "num_attention_heads"),
        head_size=hidden // vision.count("num_heads", "num_attention_heads"),
        gated_mlp=True,
        layer_parameters=layer,
        input_parameters=patch_width * hidden,
        output_parameters=hidden + merged * merged + merged + merged * out + out,
        input_width=patch_width,
        layer_kinds=tuple(
            LayerKind(
                name=name,
                layers=layers,
                parameters=layer,
                active_parameters=layer,
                intermediate_size=inner,
                window=window,
            )
            for name, layers, window in (
                (
                    "window",
                    tuple(i for i in range(depth) if i not in whole),
                    AttentionWindow(shape="squares", keys=window_side**2),
                ),
                ("full", tuple(sorted(whole)), None),
            )
            if layers
        ),
    )


def read_qwen3_vision(given: Mapping[str, Any] | None, where: str) -> ModuleSpec:
    """The tower of Qwen3-VL with its mergers.

    Raises:
        RuntimeConfigError: a field without sense.
    """
    vision = Fields(given or {}, _QWEN3, where)
    depth = vision.count("depth", "num_hidden_layers")
    hidden, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    patch_width = _patch_width(vision)
    merged, out = hidden * vision.count("spatial_merge_size") ** 2, vision.count("out_hidden_size")
    deepstack = vision.indices("deepstack_visual_indexes", depth)
    merger = merged * merged + merged + merged * out + out
    return ModuleSpec(
        name="vision",
        num_layers=depth,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=vision.count("num_heads", "num_attention_heads"),
        num_key_value_heads=vision.count("num_heads", "num_attention_heads"),
        head_size=hidden // vision.count("num_heads", "num_attention_heads"),
        gated_mlp=False,
        layer_parameters=4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden,
        input_parameters=patch_width * hidden + hidden + vision.count("num_position_embeddings") * hidden,
        # The last merger normalises patches, the others what they have merged.
        output_parameters=merger + 2 * hidden + len(deepstack) * (merger + 2 * merged),
        input_width=patch_width,
        deepstack_layers=deepstack,
    )


def _patch_width(vision: Fields) -> int:
    return vision.count("in_channels") * vision.count("temporal_patch_size") * vision.count("patch_size") ** 2
