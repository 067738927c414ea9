"""ModelSpec from a Hugging Face config.

The config classes of Transformers 5 import torch, so config.json is read as it is; a field that it leaves out takes the
default of its model type, from the tables below. Parameters are counted by formula.

Promise: the counts are those of the model that `AutoModelForImageTextToText.from_config` builds, without what its
forward pass never touches (LLaVA: vision layers behind `vision_feature_layer`, the tower's last norm and pooling head).
A config of an unknown type raises; nothing is guessed. Price: well under a millisecond, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec.folder import find_model_folder, first_value, read_json
from entrain_opt.spec.model import ModelSpec, ModuleSpec, check_frozen

_LAYERS = {"num_hidden_layers": 32, "num_attention_heads": 32, "tie_word_embeddings": False, "mlp_bias": False}
_QWEN2 = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "max_position_embeddings": 32768}
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        **_LAYERS,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        **_LAYERS,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": {**_LAYERS, **_QWEN2, "num_key_value_heads": 32},
    "qwen3": {**_LAYERS, **_QWEN2, "num_key_value_heads": 32, "head_dim": 128},
    "qwen2_5_vl_text": {
        **_LAYERS,
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
    },
}
_TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
}
_VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "siglip_vision_model": {**_TOWER, "patch_size": 16},
    "clip_vision_model": {**_TOWER, "patch_size": 32},
}
_QWEN_VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
}


def read_model_spec(folder: str | Path, *, frozen: Sequence[str] = ()) -> ModelSpec:
    """The spec of a Hugging Face folder or cached hub id.

    Args:
        folder: with config.json.
        frozen: parts that do not train, from `FREEZABLE_PARTS`.

    Raises:
        RuntimeConfigError: no config, an unknown family, or a misspelled frozen part.
    """
    check_frozen(frozen)
    path = find_model_folder(folder)
    config = read_json(path / "config.json")
    where = f"{path}/config.json"
    match config.get("model_type"):
        case "llava":
            text = _text_config(config, "llama", {}, where)
            vision = _llava_vision(config, text["hidden_size"], frozen, where)
        case "qwen2_5_vl":
            text = _text_config(config, "qwen2_5_vl_text", config, where)
            vision = _qwen_vision(config, frozen)
        case family:
            raise RuntimeConfigError(f"{where}: model_type: expected llava or qwen2_5_vl, found {family!r}.")
    tied = bool(config.get("tie_word_embeddings") or text["tie_word_embeddings"])
    return ModelSpec(
        name=path.name if Path(folder).is_dir() else str(folder),
        family=config["model_type"],
        encoders=(vision,),
        llm=_language_model(text, tied, frozen),
        max_tokens=text["max_position_embeddings"],
        tied_embeddings=tied,
    )


def _text_config(config: dict[str, Any], default_type: str, flat: dict[str, Any], where: str) -> dict[str, Any]:
    """The language model's fields with defaults; `flat` holds them where an older config has no text_config."""
    given = config.get("text_config") or flat
    model_type = given.get("model_type", default_type)
    model_type = default_type if given is flat else model_type
    if model_type not in _TEXT_DEFAULTS:
        raise RuntimeConfigError(
            f"{where}: text_config.model_type: expected one of {sorted(_TEXT_DEFAULTS)}, found {model_type!r}."
        )
    text = {**_TEXT_DEFAULTS[model_type], **{key: value for key, value in given.items() if value is not None}}
    text["model_type"] = model_type
    text.setdefault("num_key_value_heads", text["num_attention_heads"])
    text.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
    return text


def _language_model(text: dict[str, Any], tied: bool, frozen: Sequence[str]) -> ModuleSpec:
    hidden, head_size = text["hidden_size"], text["head_dim"]
    query = text["num_attention_heads"] * head_size
    key_value = text["num_key_value_heads"] * head_size
    bias = text.get("attention_bias", False)
    has_qkv_bias = text["model_type"] in ("qwen2", "qwen2_5_vl_text") or bias
    has_output_bias = text["model_type"] in ("llama", "qwen3") and bias
    attention = hidden * (query + 2 * key_value) + has_qkv_bias * (query + 2 * key_value)
    attention += query * hidden + has_output_bias * hidden
    if text["model_type"] == "qwen3":
        attention += 2 * head_size
    mlp = 3 * hidden * text["intermediate_size"]
    if text["model_type"] == "llama" and text["mlp_bias"]:
        mlp += 2 * text["intermediate_size"] + hidden
    embedding = text["vocab_size"] * hidden
    trained = "language_model" not in frozen
    return ModuleSpec(
        name="llm",
        num_layers=text["num_hidden_layers"],
        hidden_size=hidden,
        intermediate_size=text["intermediate_size"],
        num_attention_heads=text["num_attention_heads"],
        num_key_value_heads=text["num_key_value_heads"],
        head_size=head_size,
        gated_mlp=True,
        layer_parameters=attention + mlp + 2 * hidden,
        input_parameters=embedding,
        output_parameters=hidden + (0 if tied else embedding),
        vocabulary_size=text["vocab_size"],
        trained=trained,
        output_trained=trained,
    )


def _llava_vision(config: dict[str, Any], text_width: int, frozen: Sequence[str], where: str) -> ModuleSpec:
    given = config.get("vision_config") or {}
    model_type = given.get("model_type", "clip_vision_model")
    if model_type not in _VISION_DEFAULTS:
        raise RuntimeConfigError(
            f"{where}: vision_config.model_type: expected one of {sorted(_VISION_DEFAULTS)}, found {model_type!r}."
        )
    vision = {**_VISION_DEFAULTS[model_type], **{key: value for key, value in given.items() if value is not None}}
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    num_layers, num_features = _feature_layers(config.get("vision_feature_layer", -2), vision, where)
    patch_width = vision["num_channels"] * vision["patch_size"] ** 2
    positions = (vision["image_size"] // vision["patch_size"]) ** 2
    if model_type == "clip_vision_model":  # Class token with a position, no convolution bias, a norm before the layers.
        embedding = patch_width * hidden + hidden + (positions + 1) * hidden + 2 * hidden
    else:
        embedding = patch_width * hidden + hidden + positions * hidden
    bias = bool(config.get("multimodal_projector_bias", True))
    projector = hidden * num_features * text_width + text_width * text_width + 2 * bias * text_width
    return ModuleSpec(
        name="vision",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=vision["num_attention_heads"],
        num_key_value_heads=vision["num_attention_heads"],
        head_size=hidden // vision["num_attention_heads"],
        gated_mlp=False,
        layer_parameters=4 * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 4 * hidden,
        input_parameters=embedding,
        output_parameters=projector,
        input_width=patch_width,
        trained="vision_tower" not in frozen,
        output_trained="projector" not in frozen,
    )


def _feature_layers(feature_layer: int | list[int], vision: dict[str, Any], where: str) -> tuple[int, int]:
    """(layers that are computed, feature maps that the projector takes).

    Feature 0 is the patch embedding, feature n the output of layer n; negative numbers count from the last.
    """
    features = feature_layer if isinstance(feature_layer, list) else [feature_layer]
    total = vision["num_hidden_layers"]
    computed = [feature if feature >= 0 else total + 1 + feature for feature in features]
    if not computed or min(computed) < 0 or max(computed) > total or max(computed) < 1:
        raise RuntimeConfigError(
            f"{where}: vision_feature_layer: expected features of a tower of {total} layers, found {feature_layer}."
        )
    return max(computed), len(features)


def _qwen_vision(config: dict[str, Any], frozen: Sequence[str]) -> ModuleSpec:
    given = config.get("vision_config") or {}
    vision = {**_QWEN_VISION_DEFAULTS, **{key: value for key, value in given.items() if value is not None}}
    depth = first_value(given, "depth", "num_hidden_layers") or vision["depth"]
    heads = first_value(given, "num_heads", "num_attention_heads") or vision["num_heads"]
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    patch_width = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    merged = hidden * vision["spatial_merge_size"] ** 2
    mlp = 3 * hidden * inner + 2 * inner + hidden
    merger = hidden + merged * merged + merged + merged * vision["out_hidden_size"] + vision["out_hidden_size"]
    return ModuleSpec(
        name="vision",
        num_layers=depth,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_size=hidden // heads,
        gated_mlp=True,
        layer_parameters=4 * (hidden * hidden + hidden) + mlp + 2 * hidden,
        input_parameters=patch_width * hidden,
        output_parameters=merger,
        input_width=patch_width,
        trained="vision_tower" not in frozen,
        output_trained="projector" not in frozen,
    )
