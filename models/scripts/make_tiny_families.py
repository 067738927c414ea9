"""Write a small model folder per family: config, processors, tokenizer and chat template; no weights.

Each loads in plain Transformers and trains on a laptop. The tokenizers are byte-level BPEs of 1,024 tokens trained on
the shipped physics texts. Running this again writes the same bytes.

    python models/scripts/make_tiny_families.py [--data recipes/data/physics] [--output models]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from make_tiny_llava import CHAT_TEMPLATE, ROOT, shipped_texts, write_json

VOCABULARY_SIZE = 1024
TILE_SIDE, PATCH_SIDE = 112, 14
BASE_TOKENS = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 6,
    "num_attention_heads": 4, "image_size": TILE_SIDE, "patch_size": PATCH_SIDE, "vision_use_head": False,
}  # fmt: skip
PINPOINTS = [[112, 224], [224, 112], [224, 224], [112, 336], [336, 112]]
PIXELS = {
    "do_convert_rgb": True, "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 3,
}  # fmt: skip
SQUARE = {"height": TILE_SIDE, "width": TILE_SIDE}


def text(model_type: str, **fields: Any) -> dict[str, Any]:
    return {
        "model_type": model_type, "vocab_size": VOCABULARY_SIZE, "hidden_size": 96, "intermediate_size": 192,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 4, **fields,
    }  # fmt: skip


def qwen_vision(patch_side: int, **fields: Any) -> dict[str, Any]:
    return {
        "depth": 6, "hidden_size": 96, "intermediate_size": 192, "num_heads": 4, "patch_size": patch_side,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 96, **fields,
    }  # fmt: skip


def qwen_pixels(patch_side: int) -> dict[str, Any]:
    side = 2 * patch_side
    return {
        "image_processor_type": "Qwen2VLImageProcessorPil", **PIXELS, "patch_size": patch_side, "merge_size": 2,
        "temporal_patch_size": 2, "size": {"shortest_edge": 4 * side**2, "longest_edge": 64 * side**2},
    }  # fmt: skip


WHISPER_FEATURES = {
    "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 32, "chunk_length": 2, "hop_length": 80,
    "n_fft": 256, "n_samples": 16000, "nb_max_frames": 200, "padding_side": "right", "padding_value": 0.0,
    "return_attention_mask": True, "sampling_rate": 8000,
}  # fmt: skip
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
AUDIO_TOKENS = ["<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]
#: Qwen2.5-VL's tower and a Llama, as in the Entrain paper.
QWEN_AND_LLAMA: dict[str, Any] = {
    "model_type": "entrain_composed", "image_token_id": "{<|image_pad|>}", "vision_projector": {"kind": "own"},
    "vision_config": qwen_vision(
        14, model_type="qwen2_5_vl_vision", window_size=112, fullatt_block_indexes=[2, 5], tokens_per_second=2
    ),
    "text_config": text("llama", tie_word_embeddings=True),
}  # fmt: skip

#: Folder -> (placeholders as the template writes them, special tokens, config, files). `{name}` in a config stands for
#: the id of that token.
FAMILIES: dict[str, tuple[str | dict[str, str], list[str], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "tiny-llava-next": (
        "<image>", ["<image>"],
        {
            "model_type": "llava_next", "image_token_id": "{<image>}", "image_token_index": "{<image>}",
            "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
            "image_grid_pinpoints": PINPOINTS, "tie_word_embeddings": False,
            "vision_config": {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32},
            "text_config": text("mistral", sliding_window=None),
        },
        {"preprocessor_config": {
            "image_processor_type": "LlavaNextImageProcessorPil", **PIXELS, "size": {"shortest_edge": TILE_SIDE},
            "crop_size": SQUARE, "do_center_crop": True, "do_pad": True, "image_grid_pinpoints": PINPOINTS,
        }},
    ),
    "tiny-llava-onevision": (
        "<image>", ["<image>", "<video>"],
        {
            "model_type": "llava_onevision", "image_token_id": "{<image>}", "image_token_index": "{<image>}",
            "video_token_id": "{<video>}", "video_token_index": "{<video>}", "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_3",
            "image_grid_pinpoints": PINPOINTS, "tie_word_embeddings": False, "vision_config": SIGLIP,
            "text_config": text("qwen2"),
        },
        {"preprocessor_config": {
            "image_processor_type": "LlavaOnevisionImageProcessorPil", **PIXELS, "size": SQUARE,
            "image_grid_pinpoints": PINPOINTS,
        }, "processor_config": {"vision_aspect_ratio": "anyres_max_3", "vision_feature_select_strategy": "full"}},
    ),
    "tiny-qwen2_5-vl": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        {
            "model_type": "qwen2_5_vl", "image_token_id": "{<|image_pad|>}", "video_token_id": "{<|video_pad|>}",
            "vision_start_token_id": "{<|vision_start|>}", "vision_end_token_id": "{<|vision_end|>}",
            "tie_word_embeddings": True,
            "vision_config": qwen_vision(
                14, model_type="qwen2_5_vl_vision", window_size=112, fullatt_block_indexes=[2, 5], tokens_per_second=2
            ),
            "text_config": text("qwen2_5_vl_text", tie_word_embeddings=True, rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4],
            }),
        },
        {"preprocessor_config": qwen_pixels(14)},
    ),
    "tiny-qwen3-vl": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
        {
            "model_type": "qwen3_vl", "image_token_id": "{<|image_pad|>}", "video_token_id": "{<|video_pad|>}",
            "vision_start_token_id": "{<|vision_start|>}", "vision_end_token_id": "{<|vision_end|>}",
            "tie_word_embeddings": True,
            "vision_config": qwen_vision(
                16, model_type="qwen3_vl_vision", num_position_embeddings=64, deepstack_visual_indexes=[1, 3]
            ),
            "text_config": text("qwen3_vl_text", tie_word_embeddings=True, head_dim=24, rope_parameters={
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4],
            }),
        },
        {"preprocessor_config": qwen_pixels(16)},
    ),
    "tiny-smolvlm": (
        "<image>",
        ["<image>", "<fake_token_around_image>", "<global-img>",
         *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))],
        {
            "model_type": "smolvlm", "image_token_id": "{<image>}", "scale_factor": 2, "tie_word_embeddings": True,
            "pad_token_id": 0, "vision_config": {**SIGLIP, "model_type": "smolvlm_vision"},
            "text_config": text("llama"),
        },
        {"preprocessor_config": {
            "image_processor_type": "SmolVLMImageProcessorPil", **PIXELS, "do_image_splitting": True, "do_pad": True,
            "size": {"longest_edge": 224}, "max_image_size": {"longest_edge": TILE_SIDE},
        }, "processor_config": {"processor_class": "SmolVLMProcessor", "image_seq_len": 16}},
    ),
    "tiny-internvl": (
        "<IMG_CONTEXT>", ["<IMG_CONTEXT>", "<img>", "</img>"],
        {
            "model_type": "internvl", "image_token_id": "{<IMG_CONTEXT>}", "downsample_ratio": 0.5,
            "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "tie_word_embeddings": False,
            "vision_config": {
                "model_type": "internvl_vision", "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 6,
                "num_attention_heads": 4, "image_size": [TILE_SIDE] * 2, "patch_size": [PATCH_SIDE] * 2,
            },
            "text_config": text("qwen2"),
        },
        {"preprocessor_config": {
            "image_processor_type": "GotOcr2ImageProcessorPil", **PIXELS, "size": SQUARE, "crop_to_patches": True,
            "min_patches": 1, "max_patches": 4,
        }},
    ),
    "tiny-gemma3": (
        "<start_of_image>", ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
        {
            "model_type": "gemma3", "image_token_id": "{<image_soft_token>}",
            "image_token_index": "{<image_soft_token>}", "boi_token_index": "{<start_of_image>}",
            "eoi_token_index": "{<end_of_image>}", "mm_tokens_per_image": 16, "vision_config": SIGLIP,
            "text_config": text(
                "gemma3_text", head_dim=24, query_pre_attn_scalar=24, sliding_window=64,
                layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            ),
        },
        {"preprocessor_config": {
            "image_processor_type": "Gemma3ImageProcessorPil", **PIXELS, "size": SQUARE, "image_seq_length": 16,
            "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 64, "pan_and_scan_max_num_crops": 3,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        }, "processor_config": {"processor_class": "Gemma3Processor", "image_seq_length": 16}},
    ),
    "tiny-mistral3": (
        "[IMG]", ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        {
            "model_type": "mistral3", "image_token_id": "{[IMG]}", "image_token_index": "{[IMG]}",
            "spatial_merge_size": 2, "vision_feature_layer": -1, "tie_word_embeddings": False,
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 6,
                "num_attention_heads": 4, "image_size": 2 * TILE_SIDE, "patch_size": PATCH_SIDE,
            },
            "text_config": text("mistral", head_dim=24, sliding_window=None),
        },
        {"preprocessor_config": {
            "image_processor_type": "PixtralImageProcessorPil", **PIXELS, "do_pad": True, "patch_size": PATCH_SIDE,
            "size": {"longest_edge": 2 * TILE_SIDE},
        }, "processor_config": {
            "processor_class": "PixtralProcessor", "patch_size": PATCH_SIDE, "spatial_merge_size": 2,
            "image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
        }},
    ),
    "tiny-qwen2-audio": (
        "<|audio_bos|><|AUDIO|><|audio_eos|>", ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"],
        {
            "model_type": "qwen2_audio", "audio_token_index": "{<|AUDIO|>}", "text_config": text("qwen2"),
            "audio_config": {
                "model_type": "qwen2_audio_encoder", "d_model": 96, "encoder_ffn_dim": 192, "encoder_layers": 6,
                "encoder_attention_heads": 4, "num_mel_bins": 32, "max_source_positions": 100,
            },
        },
        {"preprocessor_config": WHISPER_FEATURES},
    ),
    "tiny-compose-qwen2_5-vit-llama": (
        {"image": "<|vision_start|><|image_pad|><|vision_end|>"}, VISION_TOKENS, QWEN_AND_LLAMA,
        {"processor_config": {"image_processor": qwen_pixels(14)}},
    ),
    "tiny-compose-qwen2_5-vit-whisper-llama": (
        {
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
            "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
        },
        [*VISION_TOKENS, *AUDIO_TOKENS],
        {
            **QWEN_AND_LLAMA, "audio_token_id": "{<|audio_pad|>}", "audio_projector": {"kind": "mlp", "stack": 4},
            "audio_config": {
                "model_type": "whisper", "d_model": 96, "encoder_ffn_dim": 192, "encoder_layers": 6,
                "encoder_attention_heads": 4, "num_mel_bins": 32, "max_source_positions": 100,
            },
        },
        {"processor_config": {"image_processor": qwen_pixels(14), "feature_extractor": WHISPER_FEATURES}},
    ),
}  # fmt: skip


def write_tokenizer(
    texts: list[str], output: Path, placeholder: str | dict[str, str], media_tokens: list[str]
) -> dict[str, int]:
    """Train and write a tokenizer with its template; the ids of the special tokens are returned."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = [*BASE_TOKENS, *media_tokens]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(output / "tokenizer.json"), pretty=False)
    write_json(
        output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<|im_end|>",
            "pad_token": "<pad>", "additional_special_tokens": ["<eos>", "<|im_start|>", *media_tokens],
            "clean_up_tokenization_spaces": False, "model_max_length": 4096, "padding_side": "right",
        },
    )  # fmt: skip
    if isinstance(placeholder, str):
        placeholder = {"audio" if "AUDIO" in placeholder else "image": placeholder}
    choices = " else ".join(f"'{written}' if part['type'] == '{kind}'" for kind, written in placeholder.items())
    template = CHAT_TEMPLATE.replace("'<image>' if part['type'] == 'image'", choices)
    (output / "chat_template.jinja").write_text(template, encoding="utf-8")
    return {token: tokenizer.token_to_id(token) for token in special}


def resolved(value: Any, ids: dict[str, int]) -> Any:
    """A config with token ids in place of `{token}`."""
    if isinstance(value, dict):
        return {name: resolved(item, ids) for name, item in value.items()}
    return ids[value[1:-1]] if isinstance(value, str) and value.startswith("{") else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "recipes" / "data" / "physics")
    parser.add_argument("--output", type=Path, default=ROOT / "models")
    arguments = parser.parse_args()
    texts = shipped_texts(arguments.data)
    for name, (placeholder, tokens, config, files) in FAMILIES.items():
        folder = arguments.output / name
        folder.mkdir(parents=True, exist_ok=True)
        ids = write_tokenizer(texts, folder, placeholder, tokens)
        write_json(folder / "config.json", resolved(config, ids))
        for file, content in files.items():
            write_json(folder / f"{file}.json", content)


if __name__ == "__main__":
    main()
