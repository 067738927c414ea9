"""Write the full-size folders to plan for: Qwen2.5-VL's vision tower with Llama-3.2-sized language models; no weights.

The format is `qwen2_5_vl`, whose vision tower this is, so `AutoConfig` and `AutoModelForImageTextToText` read it. Its
language model is a Qwen2: with the sizes of Llama-3.2 it differs from a Llama by the biases of the q, k and v
projections (0.004 % of the parameters), which decides nothing about time or memory.

    python models/scripts/make_planning_folders.py [--output models]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TEXT_SIZES = {
    "qwen2_5-vit-llama3_2-1b": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32},
    "qwen2_5-vit-llama3_2-3b": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24},
}
IMAGE_TOKEN_ID = 128011  # one of the tokens that Llama 3.2 reserves


def model_config(text_sizes: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": IMAGE_TOKEN_ID,
        "video_token_id": IMAGE_TOKEN_ID + 1,
        "vision_start_token_id": IMAGE_TOKEN_ID + 2,
        "vision_end_token_id": IMAGE_TOKEN_ID + 3,
        "tie_word_embeddings": True,
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "hidden_act": "silu",
            "out_hidden_size": text_sizes["hidden_size"],
        },
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": 128256,
            "intermediate_size": 8192,
            "num_key_value_heads": 8,
            **text_sizes,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "mrope_section": mrope(text_sizes),
            },
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    }


def mrope(text_sizes: dict[str, int]) -> list[int]:
    """Half of the head size in the shares that Qwen2.5-VL gives to time, height and width (2 : 3 : 3)."""
    half = text_sizes["hidden_size"] // text_sizes["num_attention_heads"] // 2
    return [half // 4, half * 3 // 8, half * 3 // 8]


def image_processor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessorPil",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 4096 * 28 * 28},
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "resample": 3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[1])
    arguments = parser.parse_args()
    for name, text_sizes in TEXT_SIZES.items():
        folder = arguments.output / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in (
            ("config.json", model_config(text_sizes)),
            ("preprocessor_config.json", image_processor_config()),
        ):
            (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
