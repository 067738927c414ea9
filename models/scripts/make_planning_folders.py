"""Write the full-size folders to plan for: configs and processor settings of published models; no weights.

models/README.md says where the numbers come from. The files are in Transformers' own form, except those of composed
models (`entrain_composed`, described in entrain_opt/spec/families/composed.py).

    python models/scripts/make_planning_folders.py [--output models]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]

TILES = {"crop_to_patches": True, "min_patches": 1, "max_patches": 12}
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
HALF = [0.5, 0.5, 0.5]


def sizes(hidden: int, inner: int, layers: int, heads: int, key_value_heads: int, vocabulary: int) -> Config:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
    }


def tower(hidden: int, inner: int, layers: int, heads: int, image: int, patch: int) -> Config:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": image,
        "patch_size": patch,
    }


def rope(theta: float, **more: Any) -> Config:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


def images(kind: str, mean: list[float], std: list[float], resample: int = 3, **more: Any) -> Config:
    """Settings of an image processor, of the kind that needs no torchvision."""
    return {
        "image_processor_type": f"{kind}ImageProcessorPil",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
        "resample": resample,
        **more,
    }


WHISPER_FEATURES = {
    "feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 30, "feature_size": 128, "hop_length": 160,
    "n_fft": 400, "n_samples": 480000, "nb_max_frames": 3000, "padding_side": "right", "padding_value": 0.0,
    "return_attention_mask": True, "sampling_rate": 16000,
}  # fmt: skip
#: The encoder of Whisper large-v3 and of Qwen2-Audio.
WHISPER_LARGE = {
    "num_mel_bins": 128, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "d_model": 1280,
    "max_source_positions": 1500,
}  # fmt: skip
QWEN_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def siglip(layers: int, image: int) -> Config:
    """SigLIP's larger tower without pooling head."""
    return {"model_type": "siglip_vision_model", **tower(1152, 4304, layers, 16, image, 14), "vision_use_head": False}


def llava_onevision() -> dict[str, Config]:
    sides = [384 * n for n in range(1, 7)]
    pinpoints = [[height, width] for height in sides for width in sides]
    return {
        "config.json": {
            "model_type": "llava_onevision",
            "image_token_index": 151646,
            "video_token_index": 151647,
            "projector_hidden_act": "gelu",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
            "image_grid_pinpoints": pinpoints,
            "tie_word_embeddings": False,
            "vision_config": siglip(26, 384),
            "text_config": {
                "model_type": "qwen2",
                **sizes(3584, 18944, 28, 28, 4, 152128),
                "max_position_embeddings": 32768,
                **rope(1000000.0),
            },
        },
        "preprocessor_config.json": images(
            "LlavaOnevision",
            HALF,
            HALF,
            size={"height": 384, "width": 384},
            image_grid_pinpoints=pinpoints,
            do_pad=True,
        ),
        "processor_config.json": {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 729,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
    }


def qwen2_5_vision(out: int) -> Config:
    return {
        "model_type": "qwen2_5_vl_vision",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "out_hidden_size": out,
    }


def qwen_images(patch: int, smallest: int, largest: int, mean: list[float], std: list[float]) -> Config:
    size = {"shortest_edge": smallest, "longest_edge": largest}
    return images("Qwen2VL", mean, std, patch_size=patch, temporal_patch_size=2, merge_size=2, size=size)


def qwen2_5_vl(text_sizes: Config, *, tied: bool) -> dict[str, Config]:
    return {
        "config.json": {
            "model_type": "qwen2_5_vl",
            **QWEN_TOKENS,
            "tie_word_embeddings": tied,
            "vision_config": qwen2_5_vision(text_sizes["hidden_size"]),
            "text_config": {
                "model_type": "qwen2_5_vl_text",
                **text_sizes,
                "max_position_embeddings": 128000,
                "rms_norm_eps": 1e-6,
                **rope(1000000.0, mrope_section=[16, 24, 24]),
                "tie_word_embeddings": tied,
            },
        },
        "preprocessor_config.json": qwen_images(14, 4 * 28 * 28, 16384 * 28 * 28, CLIP_MEAN, CLIP_STD),
    }


def qwen3_vl_4b() -> dict[str, Config]:
    return {
        "config.json": {
            "model_type": "qwen3_vl",
            **QWEN_TOKENS,
            "tie_word_embeddings": True,
            "vision_config": {
                "model_type": "qwen3_vl_vision",
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_heads": 16,
                "in_channels": 3,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "num_position_embeddings": 2304,
                "deepstack_visual_indexes": [5, 11, 17],
                "hidden_act": "gelu_pytorch_tanh",
                "out_hidden_size": 2560,
            },
            "text_config": {
                "model_type": "qwen3_vl_text",
                **sizes(2560, 9728, 36, 32, 8, 151936),
                "head_dim": 128,
                "max_position_embeddings": 262144,
                **rope(5000000.0, mrope_interleaved=True, mrope_section=[24, 20, 20]),
                "tie_word_embeddings": True,
            },
        },
        "preprocessor_config.json": qwen_images(16, 65536, 16777216, HALF, HALF),
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "fps": 2,
            "size": {"shortest_edge": 4096, "longest_edge": 25165824},
            "image_mean": HALF,
            "image_std": HALF,
        },
    }


def internvl3_8b() -> dict[str, Config]:
    return {
        "config.json": {
            "model_type": "internvl",
            "image_token_id": 151667,
            "image_seq_length": 256,
            "downsample_ratio": 0.5,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": False,
            "vision_config": {
                "model_type": "internvl_vision",
                **tower(1024, 4096, 24, 16, 448, 14),
                "attention_bias": True,
            },
            "text_config": {
                "model_type": "qwen2",
                **sizes(3584, 18944, 28, 28, 4, 151674),
                "max_position_embeddings": 32768,
                **rope(1000000.0),
                "tie_word_embeddings": False,
            },
        },
        "preprocessor_config.json": images(
            "GotOcr2", IMAGENET_MEAN, IMAGENET_STD, size={"height": 448, "width": 448}, **TILES
        ),
    }


def smolvlm2(text_sizes: Config, vision_sizes: Config, *, scale: int, head: int, theta: float) -> dict[str, Config]:
    tile = vision_sizes["image_size"]
    return {
        "config.json": {
            "model_type": "smolvlm",
            "image_token_id": 49190,
            "scale_factor": scale,
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "smolvlm_vision", **vision_sizes},
            "text_config": {
                "model_type": "llama",
                **text_sizes,
                "head_dim": head,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                **rope(theta),
            },
        },
        "preprocessor_config.json": images(
            "SmolVLM", HALF, HALF, 1, do_image_splitting=True, do_pad=True,
            size={"longest_edge": 4 * tile}, max_image_size={"longest_edge": tile},
        ),
        "processor_config.json": {
            "processor_class": "SmolVLMProcessor",
            "image_seq_len": (tile // vision_sizes["patch_size"]) ** 2 // scale**2,
        },
    }  # fmt: skip


def gemma3_4b() -> dict[str, Config]:
    return {
        "config.json": {
            "model_type": "gemma3",
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "image_token_index": 262144,
            "mm_tokens_per_image": 256,
            "tie_word_embeddings": True,
            "vision_config": siglip(27, 896),
            "text_config": {
                "model_type": "gemma3_text",
                **sizes(2560, 10240, 34, 8, 4, 262208),
                "head_dim": 256,
                "max_position_embeddings": 131072,
                "sliding_window": 1024,
                "sliding_window_pattern": 6,
                "query_pre_attn_scalar": 256,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
        },
        "preprocessor_config.json": images(
            "Gemma3", HALF, HALF, 2, size={"height": 896, "width": 896}, image_seq_length=256
        ),
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 256},
    }


def mistral_small_3_1() -> dict[str, Config]:
    return {
        "config.json": {
            "model_type": "mistral3",
            "image_token_index": 10,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "multimodal_projector_bias": False,
            "tie_word_embeddings": False,
            "vision_config": {"model_type": "pixtral", **tower(1024, 4096, 24, 16, 1540, 14)},
            "text_config": {
                "model_type": "mistral",
                **sizes(5120, 32768, 40, 32, 8, 131072),
                "head_dim": 128,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "sliding_window": None,
                **rope(1000000000.0),
            },
        },
        "preprocessor_config.json": images("Pixtral", CLIP_MEAN, CLIP_STD, patch_size=14, size={"longest_edge": 1540}),
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "spatial_merge_size": 2,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
    }


def qwen2_audio_7b() -> dict[str, Config]:
    return {
        "config.json": {
            "model_type": "qwen2_audio",
            "audio_token_index": 151646,
            "audio_config": {"model_type": "qwen2_audio_encoder", **WHISPER_LARGE},
            "text_config": {
                "model_type": "qwen2",
                **sizes(4096, 11008, 32, 32, 32, 156032),
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                **rope(10000.0),
            },
        },
        "preprocessor_config.json": WHISPER_FEATURES,
    }


def llama(text_sizes: Config, *, tied: bool, factor: float) -> Config:
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 8192}
    return {
        "model_type": "llama",
        **text_sizes,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": scaling,
        "tie_word_embeddings": tied,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


def composed(text: Config, *, with_audio: bool = False) -> dict[str, Config]:
    """Qwen2.5-VL's tower with a Llama, and Whisper's encoder where asked for; tokens are some that Llama reserves."""
    vision_images = qwen_images(14, 4 * 28 * 28, 4096 * 28 * 28, CLIP_MEAN, CLIP_STD)
    config: Config = {
        "model_type": "entrain_composed",
        "image_token_id": 128011,
        "video_token_id": 128012,
        "vision_start_token_id": 128013,
        "vision_end_token_id": 128014,
        "vision_config": qwen2_5_vision(text["hidden_size"]),
        "vision_projector": {"kind": "own"},
        "text_config": text,
    }
    if not with_audio:
        return {"config.json": config, "preprocessor_config.json": vision_images}
    config |= {
        "audio_token_id": 128015,
        "audio_config": {"model_type": "whisper", **WHISPER_LARGE},
        "audio_projector": {"kind": "mlp", "stack": 4, "hidden_size": text["hidden_size"]},
    }
    sections = {"image_processor": vision_images, "feature_extractor": WHISPER_FEATURES}
    return {"config.json": config, "processor_config.json": sections}


def folders() -> dict[str, dict[str, Config]]:
    """Folder name -> file name -> content."""
    llama_1b = llama(sizes(2048, 8192, 16, 32, 8, 128256), tied=True, factor=32.0)
    llama_3b = llama(sizes(3072, 8192, 28, 24, 8, 128256), tied=True, factor=32.0)
    llama_8b = llama(sizes(4096, 14336, 32, 32, 8, 128256), tied=False, factor=8.0)
    return {
        "gemma-3-4b": gemma3_4b(),
        "internvl3-8b": internvl3_8b(),
        "llava-onevision-7b": llava_onevision(),
        "mistral-small-3_1-24b": mistral_small_3_1(),
        "qwen2-audio-7b": qwen2_audio_7b(),
        "qwen2_5-vit-llama3_2-1b": composed(llama_1b),
        "qwen2_5-vit-llama3_2-3b": composed(llama_3b),
        "qwen2_5-vit-whisper-llama3_1-8b": composed(llama_8b, with_audio=True),
        "qwen2_5-vl-3b": qwen2_5_vl(sizes(2048, 11008, 36, 16, 2, 151936), tied=True),
        "qwen2_5-vl-7b": qwen2_5_vl(sizes(3584, 18944, 28, 28, 4, 152064), tied=False),
        "qwen3-vl-4b": qwen3_vl_4b(),
        "smolvlm2-2_2b": smolvlm2(
            sizes(2048, 8192, 24, 32, 32, 49280), tower(1152, 4304, 27, 16, 384, 14), scale=3, head=64, theta=130000.0
        ),
        "smolvlm2-500m": smolvlm2(
            sizes(960, 2560, 32, 15, 5, 49280), tower(768, 3072, 12, 12, 512, 16), scale=4, head=64, theta=100000.0
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[1])
    arguments = parser.parse_args()
    for name, files in folders().items():
        folder = arguments.output / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
