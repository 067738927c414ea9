"""What a spec calls unused gets no gradient in the real model, and all else does."""

import json

import pytest

from entrain_opt.spec import ModelSpec

TEXT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0}  # fmt: skip
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
         "image_size": 28, "patch_size": 14}  # fmt: skip
IMAGE = 50
CASES = {
    "llava clip": {
        "model_type": "llava", "image_token_index": IMAGE, "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **TOWER},
    },
    "llava siglip": {
        "model_type": "llava", "image_token_index": IMAGE, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full", "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **TOWER},
    },
    "internvl": {
        "model_type": "internvl", "image_token_id": IMAGE, "vision_feature_layer": -2,
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**TOWER, "use_mask_token": True, "use_mean_pooling": False},
    },
    "internvl last": {
        "model_type": "internvl", "image_token_id": IMAGE, "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**TOWER, "use_mean_pooling": False},
    },
    "idefics3": {
        "model_type": "idefics3", "image_token_id": IMAGE, "text_config": {"model_type": "llama", **TEXT},
        "vision_config": TOWER,
    },
    "gemma3": {
        "model_type": "gemma3", "image_token_index": IMAGE, "mm_tokens_per_image": 1, "text_config": TEXT,
        "vision_config": {"model_type": "siglip_vision_model", **TOWER},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_pictures(name, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    pixels = torch.randn(1, 3, 28, 28)
    if name == "idefics3":
        pixels = pixels[None]
    tokens = 4 if "llava" in name else 1
    ids = torch.tensor([[1, *[IMAGE] * tokens, 5, 6, 7]])
    types = {"token_type_ids": (ids == IMAGE).long()} if name == "gemma3" else {}
    model(input_ids=ids, pixel_values=pixels, labels=ids.clone(), **types).loss.backward()
    unused = {n: p.numel() for n, p in model.named_parameters() if p.grad is None}
    assert sum(unused.values()) == spec.unused_parameters, sorted(unused)
    assert all("vision" in n for n in unused)


def test_sound_and_pictures(tmp_path):
    import torch
    from transformers import AutoConfig, Qwen2_5OmniThinkerForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = {
        "model_type": "qwen2_5_omni_thinker", "audio_token_index": 51, "image_token_index": 50, "video_token_index": 52,
        "vision_start_token_id": 53, "vision_end_token_id": 54, "text_config": {**TEXT, "rope_parameters": rope},
        "audio_config": {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
                         "num_mel_bins": 8, "output_dim": 16},
        "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16,
                          "fullatt_block_indexes": [1]},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_pretrained(tmp_path)
    model = Qwen2_5OmniThinkerForConditionalGeneration(AutoConfig.for_model(**config))
    features = {
        "input_features": torch.randn(1, 8, 40),
        "feature_attention_mask": torch.ones(1, 40, dtype=torch.long),
        "pixel_values": torch.randn(16, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    ids = torch.tensor([[1, *[50] * 4, 5, *[51] * 10, 6, 7]])
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone(), **features)
    output.loss.backward()
    unused = {n: p.numel() for n, p in model.named_parameters() if p.grad is None}
    assert sum(unused.values()) == spec.unused_parameters
    assert all("audio_bos_eos_token" in n for n in unused)
