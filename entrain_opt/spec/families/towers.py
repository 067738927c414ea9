"""Vision towers that embed a picture of fixed size: CLIP, SigLIP, the towers of Idefics3 and SmolVLM, InternVL.

A tower comes without projector: `output_parameters` is its last norm where that is computed. Whoever takes features
from an earlier layer asks for `cut_tower`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec.families.fields import Fields, known_type
from entrain_opt.spec.model import ModuleSpec

_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_WIDE = {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16}
_IMAGE = {"num_channels": 3, "image_size": 224}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {**_BASE, **_IMAGE, "patch_size": 32},
    "siglip_vision_model": {**_BASE, **_IMAGE, "patch_size": 16, "vision_use_head": True},
    "idefics3_vision": {**_WIDE, **_IMAGE, "patch_size": 32},
    "smolvlm_vision": {**_WIDE, **_IMAGE, "patch_size": 32},
    "internvl_vision": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_channels": 3, "image_size": 448, "patch_size": 14, "norm_type": "layer_norm",
        "use_absolute_position_embeddings": True, "use_mean_pooling": True,
    },
}  # fmt: skip
#: Towers that put a class token before the patches.
_CLASS_TOKEN = ("clip_vision_model", "internvl_vision")
TOWER_TYPES = tuple(_DEFAULTS)


def read_tower(
    given: Mapping[str, Any] | None,
    where: str,
    *,
    default: str,
    fixed: bool = False,
    absent: Mapping[str, Any] | None = None,
) -> ModuleSpec:
    """A vision tower from its config.

    Args:
        given: the config.
        where: file and part, for messages.
        default: model type where the config has none.
        fixed: that type is the only one, whatever the config says.
        absent: the config that the model takes where there is none.

    Raises:
        RuntimeConfigError: an unknown type, or a field without sense.
    """
    given = (absent or {}) if given is None else given
    name = known_type(given, where, _DEFAULTS, default=default, fixed=fixed)
    vision = Fields(given, _DEFAULTS[name], where)
    hidden, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    head = vision.share("num_attention_heads", hidden, "hidden_size")
    width, positions = _grid(vision)
    has_class_token = name in _CLASS_TOKEN
    embedding = width * hidden + (positions + has_class_token) * hidden + has_class_token * hidden
    layer = 4 * hidden * hidden + 2 * hidden * inner + inner + hidden
    unused = 0
    if name == "internvl_vision":
        norm = hidden * (2 if vision.get("norm_type") == "layer_norm" else 1)
        # The output projection has a bias; so have q, k and v if asked for; two learnt scales of the residuals.
        layer += hidden + 3 * hidden * vision.flag("attention_bias") + 2 * hidden * vision.flag("use_qk_norm")
        layer += 2 * norm + 2 * hidden
        embedding += hidden - (not vision.flag("use_absolute_position_embeddings")) * (positions + 1) * hidden
        unused += hidden * vision.flag("use_mask_token")
        output = 0 if vision.flag("use_mean_pooling") else 2 * hidden
    else:
        layer += 4 * hidden + 4 * hidden  # Biases, and two norms.
        embedding += 2 * hidden if name == "clip_vision_model" else hidden  # A norm before the layers, or a bias.
        output = 2 * hidden
        if name == "siglip_vision_model" and vision.flag("vision_use_head"):
            # Pools into one vector that no multimodal model takes: query, attention, norm, feed-forward part.
            unused += hidden + 4 * (hidden * hidden + hidden) + 2 * hidden + 2 * hidden * inner + inner + hidden
        if name == "clip_vision_model":  # Normalises the class token only.
            output, unused = 0, unused + output
    return ModuleSpec(
        name="vision",
        num_layers=vision.count("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // head,
        head_size=head,
        gated_mlp=False,
        layer_parameters=layer,
        input_parameters=embedding,
        output_parameters=output,
        input_width=width,
        unused_parameters=unused,
        drops_inside=vision.drops("attention_dropout", "projection_dropout"),
    )


def _grid(vision: Fields) -> tuple[int, int]:
    """(values per patch, patches per picture); sizes are one number, or one per side."""
    sides = []
    for name in ("image_size", "patch_size"):
        value = vision.get(name)
        pair = list(value) if isinstance(value, (list, tuple)) else [value, value]
        if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
            raise RuntimeConfigError(f"{vision.where}: {name}: expected one or two positive sides, found {value!r}.")
        sides.append(pair)
    image, patch = sides
    patches = (image[0] // patch[0]) * (image[1] // patch[1])
    if patches < 1:
        raise RuntimeConfigError(f"{vision.where}: image_size: expected at least one patch of {patch}, found {image}.")
    return vision.count("num_channels") * patch[0] * patch[1], patches


def cut_tower(tower: ModuleSpec, features: int | list[int], where: str, name: str) -> tuple[ModuleSpec, int]:
    """(the tower up to the last layer that features are taken from, how many features are taken).

    Feature 0 is the patch embedding, feature n the output of layer n; negative numbers count from the last. Layers
    behind, and the tower's last norm, are never computed.

    Raises:
        RuntimeConfigError: no such layer.
    """
    total = tower.num_layers
    chosen = features if isinstance(features, list) else [features]
    if not chosen or not all(isinstance(feature, int) for feature in chosen):
        raise RuntimeConfigError(f"{where}: {name}: expected a layer number or a list of them, found {features!r}.")
    computed = [feature if feature >= 0 else total + 1 + feature for feature in chosen]
    if min(computed) < 0 or max(computed) > total or max(computed) < 1:
        raise RuntimeConfigError(f"{where}: {name}: expected features of a tower of {total} layers, found {features}.")
    behind = (total - max(computed)) * tower.layer_parameters + tower.output_parameters
    cut = replace(
        tower,
        num_layers=max(computed),
        output_parameters=0,
        unused_parameters=tower.unused_parameters + behind,
    )
    return cut, len(chosen)
