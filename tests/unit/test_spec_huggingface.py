"""Parameter counts equal those of the real models; nothing needs torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec import ModelSpec

MODELS = Path(__file__).resolve().parents[2] / "models"

CLIP = {"model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
        "num_attention_heads": 4, "image_size": 56, "patch_size": 14}  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
TEXT = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
CONFIGS = {
    "clip_llama": {"vision_config": CLIP, "text_config": {"model_type": "llama", **TEXT}},
    "clip_list": {"vision_config": CLIP, "text_config": {"model_type": "llama", **TEXT},
                  "vision_feature_layer": [1, -2]},
    "clip_positive": {"vision_config": CLIP, "text_config": {"model_type": "llama", **TEXT}, "vision_feature_layer": 2,
                      "multimodal_projector_bias": False},
    "siglip_llama_biases": {"vision_config": SIGLIP, "vision_feature_layer": -1,
                            "text_config": {"model_type": "llama", **TEXT, "attention_bias": True, "mlp_bias": True}},
    "siglip_no_gqa": {"vision_config": SIGLIP,
                      "text_config": {"model_type": "llama", **TEXT, "num_key_value_heads": None}},
    "siglip_qwen2": {"vision_config": SIGLIP, "text_config": {"model_type": "qwen2", **TEXT}},
    "siglip_qwen2_tied": {"vision_config": SIGLIP,
                          "text_config": {"model_type": "qwen2", **TEXT, "tie_word_embeddings": True}},
    "siglip_qwen3": {"vision_config": SIGLIP, "text_config": {"model_type": "qwen3", **TEXT, "attention_bias": True}},
    "clip_mistral": {"vision_config": CLIP, "text_config": {"model_type": "mistral", **TEXT, "head_dim": 16}},
}  # fmt: skip


def write_config(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llava", **config}), encoding="utf-8")
    return folder


def real_parameters(folder: Path) -> dict[str, int]:
    """Parameters of the real model on the meta device, by part, each tied one once."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    counts = dict.fromkeys(("input", "layers", "projector", "unused", "embedding", "llm_layers", "head"), 0)
    computed = getattr(config, "vision_feature_layer", None)
    if computed is not None:
        total = config.vision_config.num_hidden_layers
        features = computed if isinstance(computed, list) else [computed]
        computed = max(f if f >= 0 else total + 1 + f for f in features)
    for name, parameter in model.named_parameters():
        if "multi_modal_projector" in name or "visual.merger" in name:
            part = "projector"
        elif "visual" in name or "vision_tower" in name:
            pieces = name.split(".")
            if "layers" in pieces or "blocks" in pieces:
                layer = int(next(piece for piece in pieces if piece.isdigit()))
                part = "layers" if computed is None or layer < computed else "unused"
            else:
                part = "unused" if "post_layernorm" in name or ".head." in name else "input"
        elif "embed_tokens" in name:
            part = "embedding"
        else:
            part = "llm_layers" if ".layers." in name else "head"
        counts[part] += parameter.numel()
    return counts


def assert_counts_are_real(folder: Path) -> None:
    spec = ModelSpec.from_pretrained(folder)
    real = real_parameters(folder)
    (vision,), llm = spec.encoders, spec.llm
    assert vision.input_parameters == real["input"]
    assert vision.num_layers * vision.layer_parameters == real["layers"]
    assert vision.output_parameters == real["projector"]
    assert llm.input_parameters == real["embedding"]
    assert llm.num_layers * llm.layer_parameters == real["llm_layers"]
    assert llm.output_parameters == real["head"]
    assert spec.parameters + real["unused"] == sum(real.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_llava_counts_are_those_of_the_real_model(name, tmp_path):
    assert_counts_are_real(write_config(tmp_path, CONFIGS[name]))


@pytest.mark.parametrize("name", ["tiny-llava", "qwen2_5-vl-3b"])
def test_shipped_counts_are_those_of_the_real_model(name):
    assert_counts_are_real(MODELS / name)


def test_flat_qwen_config_of_the_hub(tmp_path):
    """Older configs hold the language model's fields at the top, and call the input channels otherwise."""
    config = json.loads((MODELS / "qwen2_5-vl-3b" / "config.json").read_text())
    text = config.pop("text_config")
    text.pop("model_type")
    write_config(tmp_path, {**text, **config})
    assert ModelSpec.from_pretrained(tmp_path).llm == ModelSpec.from_pretrained(MODELS / "qwen2_5-vl-3b").llm


def test_layers_behind_the_feature_layer_are_not_computed(tmp_path):
    counts = {}
    for layer in (-1, -2, 3, 4):
        write_config(tmp_path, {**CONFIGS["clip_llama"], "vision_feature_layer": layer})
        counts[layer] = ModelSpec.from_pretrained(tmp_path).module("vision").num_layers
    assert counts == {-1: 4, -2: 3, 3: 3, 4: 4}


def test_frozen_parts():
    spec = ModelSpec.from_pretrained(MODELS / "tiny-llava", frozen=("vision_tower", "language_model"))
    assert not spec.encoders[0].trained
    assert spec.encoders[0].output_trained
    assert not spec.llm.anything_trained
    with pytest.raises(RuntimeConfigError, match="vision_towr"):
        ModelSpec.from_pretrained(MODELS / "tiny-llava", frozen=("vision_towr",))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "model_type: expected one of .*found 'bert'.*CONTRIBUTING"),
        ({"vision_config": {"model_type": "vit"}, "text_config": {}}, "vision_config.model_type.*'vit'"),
        ({"text_config": {"model_type": "gpt2"}}, "text_config.model_type.*'gpt2'"),
        ({"vision_config": CLIP, "vision_feature_layer": 9}, "vision_feature_layer.*4 layers, found 9"),
    ],
)
def test_unknown_configs_raise(config, message, tmp_path):
    with pytest.raises(RuntimeConfigError, match=message):
        ModelSpec.from_pretrained(write_config(tmp_path, config))


def test_missing_folder_and_broken_config_raise(tmp_path):
    with pytest.raises(RuntimeConfigError, match="expected a folder in Hugging Face format"):
        ModelSpec.from_pretrained("no/such/model/here")
    with pytest.raises(RuntimeConfigError, match=r"expected config\.json in"):
        ModelSpec.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(RuntimeConfigError, match="expected a JSON object"):
        ModelSpec.from_pretrained(tmp_path)


def test_specs_and_media_rules_need_no_torch():
    code = (
        "import sys\n"
        "from entrain_opt.spec import ModelSpec\n"
        "from entrain_opt.workload.media import media_rule\n"
        f"folder = {str(MODELS / 'tiny-llava')!r}\n"
        "ModelSpec.from_pretrained(folder), media_rule(folder).image(640, 480)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
