"""Composed models: counts are those of their parts, as Transformers builds them."""

import itertools
import json
from pathlib import Path

import pytest
from family_cases import Draw, audio_config, qwen_vision_config, text_config, tower_config

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec import ModelSpec

MODELS = Path(__file__).resolve().parents[2] / "models"
TOWERS = ("clip_vision_model", "siglip_vision_model", "idefics3_vision", "internvl_vision")
LANGUAGE_MODELS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")


def read(folder: Path, config: dict, **options) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({"model_type": "entrain_composed", **config}), encoding="utf-8")
    return ModelSpec.from_pretrained(folder, **options)


def count(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def build_language_model(text: dict, tied: bool) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return count(AutoModelForCausalLM.from_config(AutoConfig.for_model(**text, tie_word_embeddings=tied)))


def build_tower(config: dict):
    import torch
    import transformers
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionTransformer
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    classes = {
        "idefics3_vision": Idefics3VisionTransformer,
        "qwen2_5_vl_vision": Qwen2_5_VisionTransformerPretrainedModel,
        "qwen3_vl_vision": Qwen3VLVisionModel,
        "whisper": WhisperEncoder,
        "qwen2_5_omni_audio_encoder": Qwen2_5OmniAudioEncoder,
    }
    if config["model_type"] in classes:
        kind = classes[config["model_type"]]
        fields = {name: value for name, value in config.items() if name != "model_type"}
        with torch.device("meta"):
            return kind(kind.config_class(**fields))
    with torch.device("meta"):
        return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config))


def build_projector(width: int, projector: dict, out: int) -> int:
    import torch

    if projector["kind"] == "own":
        return 0
    bias = projector.get("bias", True)
    width *= projector.get("stack", 1) * projector.get("merge", 1) ** 2
    sizes = [width, out] if projector["kind"] == "linear" else [width, projector.get("hidden_size", out), out]
    with torch.device("meta"):
        layers: list = [torch.nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(sizes)]
        if "norm" in projector:
            layers.append({"layer_norm": torch.nn.LayerNorm, "rms_norm": torch.nn.RMSNorm}[projector["norm"]](width))
    return sum(count(layer) for layer in layers)


@pytest.mark.parametrize("seed", range(24))
def test_counts_are_those_of_the_parts(seed, tmp_path):
    draw = Draw(seed)
    text = text_config(draw, LANGUAGE_MODELS[seed % len(LANGUAGE_MODELS)])
    tied = text.setdefault("tie_word_embeddings", draw.of(True, False))
    out = text["hidden_size"]
    config: dict = {"text_config": text}
    if seed % 3 != 1:
        kind = draw.of(*TOWERS, "qwen2_5_vl_vision", "qwen3_vl_vision")
        if kind in TOWERS:
            config["vision_config"] = tower_config(draw, kind)
            join = draw.of({}, {"stack": 4}, {"merge": 2}, {"pool": 2})
            norm = draw.of({}, {"norm": "layer_norm"}, {"norm": "rms_norm"})
            config["vision_projector"] = {"kind": draw.of("linear", "mlp"), **join, **norm}
        else:
            vision = {"model_type": kind, **qwen_vision_config(draw, kind, out)}
            config["vision_config"] = vision | ({"deepstack_visual_indexes": []} if kind.startswith("qwen3") else {})
            config["vision_projector"] = {"kind": "own"}
    if seed % 3 != 2:
        own = draw.of(True, False)
        kind = "qwen2_5_omni_audio_encoder" if own else "whisper"
        config["audio_config"] = {"model_type": kind, **audio_config(draw, out if own else None)}
        config["audio_projector"] = (
            {"kind": "own"} if own else {"kind": "mlp", "stack": 3, "bias": False, "hidden_size": 9}
        )
    spec = read(tmp_path, config)
    real = build_language_model({k: v for k, v in text.items() if k != "tie_word_embeddings"}, tied)
    for name in ("vision", "audio"):
        if f"{name}_config" in config:
            real += count(build_tower(config[f"{name}_config"]))
            real += build_projector(spec.module(name).hidden_size, config[f"{name}_projector"], out)
    assert spec.parameters + spec.unused_parameters == real
    assert spec.tied_embeddings == tied
    assert [e.name for e in spec.encoders] == [n for n in ("vision", "audio") if f"{n}_config" in config]


@pytest.mark.parametrize(
    "name", ["qwen2_5-vit-llama3_2-1b", "qwen2_5-vit-llama3_2-3b", "qwen2_5-vit-whisper-llama3_1-8b"]
)
def test_shipped_folders(name):
    config = json.loads((MODELS / name / "config.json").read_text())
    spec = ModelSpec.from_pretrained(MODELS / name)
    text = config["text_config"]
    for module in spec.encoders:
        projector = build_projector(module.hidden_size, config[f"{module.name}_projector"], text["hidden_size"])
        assert module.parameters == count(build_tower(config[f"{module.name}_config"])) + projector
    tied = text.pop("tie_word_embeddings")
    assert spec.llm.parameters == build_language_model(text, tied)
    assert spec.llm.layer_kinds == ()


def test_both_encoders_may_be_frozen_apart():
    spec = ModelSpec.from_pretrained(MODELS / "qwen2_5-vit-whisper-llama3_1-8b", frozen=("audio_tower",))
    vision, audio = spec.encoders
    assert (vision.trained, audio.trained, audio.output_trained) == (True, False, True)


TEXT = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}
QWEN = {"model_type": "qwen2_5_vl_vision", "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16}
CLIP = {"model_type": "clip_vision_model"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "text_config.model_type: expected one of .*'llama'.*found None"),
        ({"text_config": TEXT}, "expected vision_config or audio_config, found neither"),
        (
            {"text_config": TEXT, "vision_config": {"model_type": "vit"}},
            "vision_config.model_type.*'vit'.*CONTRIBUTING",
        ),
        (
            {"text_config": TEXT, "audio_config": {"model_type": "beats"}},
            "audio_config.model_type.*'beats'.*CONTRIBUTING",
        ),
        ({"text_config": TEXT, "vision_config": CLIP}, r"vision_projector: kind: expected one of \['linear', 'mlp'\]"),
        (
            {"text_config": TEXT, "vision_config": QWEN, "vision_projector": {"kind": "mlp"}},
            r"vision_projector: kind: expected one of \['own'\] for this encoder, found 'mlp'",
        ),
        (
            {"text_config": TEXT, "vision_config": {**QWEN, "out_hidden_size": 8}, "vision_projector": {"kind": "own"}},
            "projects to 8 values, expected the language model's hidden_size 16",
        ),
        (
            {"text_config": TEXT, "vision_config": {"model_type": "qwen3_vl_vision", "out_hidden_size": 16}},
            r"deepstack_visual_indexes: expected \[\] in a composed model",
        ),
        (
            {"text_config": TEXT, "vision_config": CLIP, "vision_projector": {"kind": "mlp", "stack": 0}},
            "vision_projector: stack: expected a whole number of at least 1, found 0",
        ),
        (
            {"text_config": TEXT, "vision_config": CLIP, "vision_projector": {"kind": "mlp", "stack": 2, "merge": 2}},
            r"at most one of \['stack', 'merge', 'pool'\] above 1, found {'stack': 2, 'merge': 2}",
        ),
        (
            {
                "text_config": TEXT,
                "audio_config": {"model_type": "whisper"},
                "audio_projector": {"kind": "mlp", "pool": 2},
            },
            r"audio_projector: expected at most one of \['stack'\] above 1, found {'pool': 2}",
        ),
        (
            {"text_config": TEXT, "vision_config": CLIP, "vision_projector": {"kind": "mlp", "norm": "batch_norm"}},
            r"norm: expected one of \['layer_norm', 'rms_norm'\], found 'batch_norm'",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(config, message, tmp_path):
    with pytest.raises(RuntimeConfigError, match=message):
        read(tmp_path, config)
