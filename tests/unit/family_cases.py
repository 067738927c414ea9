"""Hugging Face configs of every family, and the real model's parameters on the meta device."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

CLASSES = {
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
    "qwen2_5_omni_thinker": "Qwen2_5OmniThinkerForConditionalGeneration",
}
TEXT_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")
FAMILIES = (
    "llava", "llava_next", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl", "idefics3",
    "smolvlm", "gemma3", "mistral3", "qwen2_audio", "qwen2_5_omni_thinker",
)  # fmt: skip
_OWN_TEXT = {
    "qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text",
    "gemma3": "gemma3_text", "qwen2_5_omni_thinker": "qwen2_5_omni_text",
}  # fmt: skip


class Draw:
    """Random choices of one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def of(self, *values: Any) -> Any:
        return values[int(self.generator.integers(len(values)))]

    def some(self, config: dict[str, Any]) -> dict[str, Any]:
        """Each field or not."""
        return {name: value for name, value in config.items() if self.generator.random() < 0.5}


def text_config(draw: Draw, model_type: str) -> dict[str, Any]:
    heads = draw.of(2, 4)
    layers = draw.of(2, 3, 7)
    config = {
        "model_type": model_type, "hidden_size": heads * draw.of(8, 12), "intermediate_size": draw.of(20, 33),
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": draw.of(1, 2),
        "vocab_size": draw.of(50, 97), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    config |= draw.some({"tie_word_embeddings": draw.of(True, False)})
    if model_type not in ("qwen2_5_vl_text", "qwen2_5_omni_text"):
        config |= {"head_dim": draw.of(8, 16)} if model_type in ("gemma3_text", "qwen3", "qwen3_vl_text") else {}
        config |= draw.some({"head_dim": draw.of(6, 10)})
    if model_type in ("llama", "qwen3", "qwen3_moe", "gemma3_text", "qwen3_vl_text", "qwen3_vl_moe_text"):
        config |= draw.some({"attention_bias": True})
    if model_type == "llama":
        config |= draw.some({"mlp_bias": True})
    if model_type in ("mistral", "mixtral"):
        config |= draw.some({"sliding_window": draw.of(None, 16)})
    if model_type.startswith("qwen2") or model_type in ("qwen3", "qwen3_moe"):
        config |= draw.some({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2})
    if model_type == "gemma3_text":
        config |= {"sliding_window": 16} | draw.some({"sliding_window_pattern": 3})
    if model_type == "mixtral":
        config |= {"num_local_experts": draw.of(3, 5), "num_experts_per_tok": draw.of(1, 2)}
    if model_type in ("qwen3_moe", "qwen3_vl_moe_text"):
        config |= {
            draw.of("num_experts", "num_local_experts"): draw.of(3, 5),
            "num_experts_per_tok": draw.of(1, 2),
            "moe_intermediate_size": draw.of(9, 14),
        }
        config |= draw.some({"decoder_sparse_step": draw.of(1, 2, 3), "mlp_only_layers": [0]})
    return config


def tower_config(draw: Draw, model_type: str) -> dict[str, Any]:
    heads = draw.of(2, 3)
    config: dict[str, Any] = {
        "model_type": model_type, "hidden_size": heads * draw.of(4, 8), "intermediate_size": draw.of(20, 33),
        "num_hidden_layers": draw.of(2, 4), "num_attention_heads": heads, "image_size": draw.of(28, 30),
        "patch_size": draw.of(7, 14),
    }  # fmt: skip
    config |= draw.some({"num_channels": 1})
    if model_type == "siglip_vision_model":
        config |= draw.some({"vision_use_head": draw.of(True, False)})
    if model_type == "internvl_vision":
        config |= draw.some({
            "attention_bias": True, "use_qk_norm": True, "norm_type": "rms_norm", "use_mask_token": True,
            "use_absolute_position_embeddings": False, "use_mean_pooling": False, "image_size": [28, 42],
        })  # fmt: skip
    return config


def qwen_vision_config(draw: Draw, family: str, out: int) -> dict[str, Any]:
    heads, depth = draw.of(2, 4), draw.of(2, 5)
    config: dict[str, Any] = {
        "depth": depth, "hidden_size": heads * 8, "intermediate_size": draw.of(20, 33), "num_heads": heads,
        "patch_size": draw.of(7, 14), "out_hidden_size": out,
    }  # fmt: skip
    config |= draw.some({"in_channels": 1, "temporal_patch_size": 1})
    if family.startswith("qwen3"):
        return config | {"deepstack_visual_indexes": draw.of([], [1], [0, 1]), "num_position_embeddings": 16}
    return config | draw.some({"window_size": 56, "fullatt_block_indexes": draw.of([], [1], [0, 1])})


def audio_config(draw: Draw, out: int | None) -> dict[str, Any]:
    heads = draw.of(2, 4)
    config = {
        "encoder_layers": draw.of(1, 3), "d_model": heads * 8, "encoder_attention_heads": heads,
        "encoder_ffn_dim": draw.of(20, 33), "num_mel_bins": draw.of(8, 12), "max_source_positions": draw.of(20, 50),
    }  # fmt: skip
    return config if out is None else config | {"output_dim": out, "n_window": 10}


def family_config(family: str, seed: int) -> dict[str, Any]:
    """A random small config of a family."""
    draw = Draw(seed)
    text = text_config(
        draw, _OWN_TEXT.get(family) or draw.of("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
    )
    config: dict[str, Any] = {"model_type": family, "text_config": text}
    config |= draw.some({"tie_word_embeddings": draw.of(True, False)})
    if family in ("llava", "llava_next", "llava_onevision"):
        config["vision_config"] = tower_config(draw, draw.of("clip_vision_model", "siglip_vision_model"))
        config |= draw.some({"vision_feature_layer": draw.of(-1, 1, 2, [1, -1]), "multimodal_projector_bias": False})
    elif family == "internvl":
        config["vision_config"] = tower_config(draw, "internvl_vision")
        config |= draw.some({"vision_feature_layer": -2, "downsample_ratio": 0.25})
    elif family in ("idefics3", "smolvlm"):
        config["vision_config"] = tower_config(draw, f"{family}_vision")
        config |= draw.some({"scale_factor": 3})
    elif family == "gemma3":
        config["vision_config"] = tower_config(draw, "siglip_vision_model")
    elif family == "mistral3":
        config["vision_config"] = tower_config(draw, "pixtral")
        config |= draw.some({"vision_feature_layer": draw.of(-2, 1), "multimodal_projector_bias": True})
        config |= draw.some({"spatial_merge_size": 1})
    elif family.startswith("qwen"):
        if family != "qwen2_audio":
            config["vision_config"] = qwen_vision_config(draw, family, text["hidden_size"])
        if family in CLASSES:
            config["audio_config"] = audio_config(draw, None if family == "qwen2_audio" else text["hidden_size"])
    return config


@dataclass(frozen=True)
class RealCounts:
    """Parameters of a real model, each tied one once.

    Attributes:
        total: of everything.
        parts: by part: `vision input`, `vision projector`, `llm head`, ...
        layers: by module and layer.
    """

    total: int
    parts: Counter[str]
    layers: dict[str, Counter[int]]


def real_model(config: dict[str, Any]) -> Any:
    """The model that Transformers builds, on the meta device."""
    import torch
    import transformers

    family = config["model_type"]
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        if family in CLASSES:
            return getattr(transformers, CLASSES[family])(made)
        if family in TEXT_TYPES:
            return transformers.AutoModelForCausalLM.from_config(made)
        return transformers.AutoModelForImageTextToText.from_config(made)


def real_counts(model: Any) -> RealCounts:
    parts: Counter[str] = Counter()
    layers: dict[str, Counter[int]] = {"vision": Counter(), "audio": Counter(), "llm": Counter()}
    for name, parameter in model.named_parameters():
        module = "llm"
        if re.search(r"audio_tower|vision_tower|visual|vision_model", name):
            module = "audio" if "audio" in name else "vision"
        layer = re.search(r"(?:layers|blocks|layer)\.(\d+)\.", name)
        if re.search(r"multi_modal_projector|merger|connector|image_newline|audio_tower\.proj\.", name):
            part = "projector"
        elif layer:
            layers[module][int(layer[1])] += parameter.numel()
            continue
        elif "mask_token" in name:
            part = "rest"
        elif module == "llm":
            part = "input" if "embed_tokens" in name else "output"
        elif re.search(r"conv\d|embed_positions|embeddings|patch_embed|pos_embed|pre_layrnorm|patch_conv|ln_pre", name):
            part = "input"
        else:
            part = "rest"
        parts["projector" if part == "projector" else f"{module} {part}"] += parameter.numel()
    return RealCounts(total=sum(p.numel() for p in model.parameters()), parts=parts, layers=layers)
