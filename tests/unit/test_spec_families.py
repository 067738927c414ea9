"""Parameter counts of every family equal those of the real model, part by part and layer by layer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from family_cases import FAMILIES, TEXT_TYPES, Draw, family_config, real_counts, real_model, text_config

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec import ModelSpec
from entrain_opt.spec.model import AttentionWindow

MODELS = Path(__file__).resolve().parents[2] / "models"


def read(folder: Path, config: dict, **options) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ModelSpec.from_pretrained(folder, **options)


def assert_counts_are_real(spec: ModelSpec, config: dict) -> None:
    real = real_counts(real_model(config))
    assert spec.parameters + spec.unused_parameters == real.total
    for module in spec.modules:
        assert module.input_parameters == real.parts[f"{module.name} input"]
        layers = {i: kind.parameters for kind in module.kinds for i in kind.layers}
        computed = {i: n for i, n in real.layers[module.name].items() if i < module.num_layers}
        assert layers == computed
    assert spec.llm.output_parameters == real.parts["llm output"]
    for name in ("vision", "audio"):
        encoders = [module for module in spec.encoders if module.name == name]
        assert bool(encoders) == bool(real.layers[name])
    # What is no layer and no embedding of an encoder: projectors, last norms, and what is never used.
    behind = sum(n for e in spec.encoders for i, n in real.layers[e.name].items() if i >= e.num_layers)
    rest = sum(module.output_parameters + module.unused_parameters for module in spec.encoders) - behind
    assert rest == real.parts["projector"] + real.parts["vision rest"] + real.parts["audio rest"]


@pytest.mark.parametrize("family", FAMILIES)
def test_small_random_models(family, tmp_path):
    for seed in range(5):
        config = family_config(family, seed)
        assert_counts_are_real(read(tmp_path, config), config)


@pytest.mark.parametrize("family", FAMILIES)
def test_default_config(family, tmp_path):
    config = {"model_type": family}
    assert_counts_are_real(read(tmp_path, config), config)


@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_language_models_alone(model_type, tmp_path):
    for config in ({"model_type": model_type}, *(text_config(Draw(seed), model_type) for seed in range(5))):
        spec = read(tmp_path, config)
        assert spec.encoders == ()
        assert_counts_are_real(spec, config)


#: Parameters as public texts state them.
PUBLISHED = {
    "gemma-3-4b": 4_300_079_472,
    "internvl3-8b": 7_944_373_760,
    "qwen2-audio-7b": 8_397_094_912,
    "qwen2_5-vl-3b": 3_754_622_976,
    "qwen2_5-vl-7b": 8_292_166_656,
    "qwen3-vl-4b": 4_437_815_808,
    "smolvlm2-2_2b": 2_246_784_880,
    "smolvlm2-500m": 507_482_304,
}


@pytest.mark.parametrize("name", [*PUBLISHED, "llava-onevision-7b", "mistral-small-3_1-24b"])
def test_shipped_folders(name):
    config = json.loads((MODELS / name / "config.json").read_text())
    spec = ModelSpec.from_pretrained(MODELS / name)
    assert_counts_are_real(spec, config)
    if name in PUBLISHED:
        assert spec.parameters + spec.unused_parameters == PUBLISHED[name]


def test_an_omni_model_is_its_thinker(tmp_path):
    thinker = family_config("qwen2_5_omni_thinker", 3)
    whole = read(tmp_path, {"model_type": "qwen2_5_omni", "thinker_config": thinker, "talker_config": {}})
    alone = read(tmp_path, thinker)
    assert whole.modules == alone.modules
    assert [encoder.name for encoder in whole.encoders] == ["audio", "vision"]
    with pytest.raises(RuntimeConfigError, match="thinker_config: expected"):
        read(tmp_path, {"model_type": "qwen2_5_omni"})


def kinds_of(module) -> dict:
    return {kind.name: (kind.layers, kind.window) for kind in module.layer_kinds}


def test_layers_that_differ_are_told_apart(tmp_path):
    vision = read(tmp_path, {"model_type": "qwen2_5_vl"}).module("vision")
    full = (7, 15, 23, 31)
    squares = AttentionWindow(shape="squares", keys=64)
    assert kinds_of(vision) == {"window": (tuple(i for i in range(32) if i not in full), squares), "full": (full, None)}
    gemma = ModelSpec.from_pretrained(MODELS / "gemma-3-4b").llm
    full = (5, 11, 17, 23, 29)
    sliding = AttentionWindow(shape="sliding", keys=1024)
    assert kinds_of(gemma) == {"sliding": (tuple(i for i in range(34) if i not in full), sliding), "full": (full, None)}
    assert gemma.bidirectional_media
    whisper = ModelSpec.from_pretrained(MODELS / "qwen2-audio-7b").module("audio")
    assert kinds_of(whisper) == {"window": (tuple(range(32)), AttentionWindow(shape="blocks", keys=1500))}
    assert ModelSpec.from_pretrained(MODELS / "qwen3-vl-4b").module("vision").deepstack_layers == (5, 11, 17)
    assert ModelSpec.from_pretrained(MODELS / "qwen2_5-vl-7b").llm.layer_kinds == ()


@pytest.mark.parametrize(("model_type", "window"), [("mistral", 4096), ("mixtral", None), ("qwen2", None)])
def test_sliding_windows_of_language_models(model_type, window, tmp_path):
    for written, expected in (({}, window), ({"sliding_window": None}, None)):
        kinds = read(tmp_path, {"model_type": model_type, **written}).llm.kinds
        assert [kind.window and kind.window.keys for kind in kinds] == [expected]
    used = read(tmp_path, {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 30}).llm
    assert kinds_of(used)["sliding"] == ((30, 31), AttentionWindow(shape="sliding", keys=4096))
    typed = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    used = read(tmp_path, {"model_type": "qwen2", "use_sliding_window": True, **typed}).llm
    assert kinds_of(used)["sliding"][0] == (0,)


def test_windows_are_those_of_the_real_config(tmp_path):
    """Which layers slide, as Transformers reads the same file."""
    from transformers import AutoConfig

    for model_type in ("gemma3_text", "qwen2", "qwen3"):
        for seed in range(5):
            config = text_config(Draw(seed), model_type)
            made = AutoConfig.for_model(**config)
            sliding = tuple(i for i, name in enumerate(made.layer_types) if name == "sliding_attention")
            found = kinds_of(read(tmp_path, config).llm).get("sliding", ((), None))
            assert found[0] == sliding
            assert found[1] is None or found[1].keys == made.sliding_window


def test_experts_that_a_token_goes_to_are_told_from_those_that_memory_holds(tmp_path):
    mixtral = read(tmp_path, {"model_type": "mixtral"})
    # The published figures: 46.7 and 12.9 billion.
    assert (round(mixtral.parameters / 1e9, 1), round(mixtral.active_parameters / 1e9, 1)) == (46.7, 12.9)
    config = {"hidden_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 4, "moe_intermediate_size": 5, "intermediate_size": 7, "num_experts": 4,
              "num_experts_per_tok": 2, "decoder_sparse_step": 2, "mlp_only_layers": [1], "vocab_size": 10}  # fmt: skip
    llm = read(tmp_path, {"model_type": "qwen3_moe", **config}).llm
    assert {kind.name: kind.layers for kind in llm.layer_kinds} == {"full sparse": (3, 5), "full dense": (0, 1, 2, 4)}
    sparse, dense = llm.layer_kinds
    assert sparse.parameters - sparse.active_parameters == 2 * 3 * 8 * 5
    assert sparse.intermediate_size == 2 * 5
    assert llm.parameters_of_layers(2, 5) == sparse.parameters + 2 * dense.parameters
    assert llm.parameters - llm.active_parameters == 2 * 2 * 3 * 8 * 5


def test_parts_that_can_be_frozen_are_those_of_the_model(tmp_path):
    omni = {"model_type": "qwen2_5_omni_thinker"}
    frozen = read(tmp_path, omni, frozen=("audio_tower", "projector"))
    audio, vision = frozen.encoders
    assert (audio.trained, vision.trained, frozen.llm.trained) == (False, True, True)
    assert not audio.output_trained
    assert not vision.output_trained
    with pytest.raises(RuntimeConfigError, match=r"has the parts \['vision_tower', 'projector', .* found \['audio_t"):
        read(tmp_path, {"model_type": "llava"}, frozen=("audio_tower",))
    for model, everything in (
        ({"model_type": "llava"}, ("vision_tower", "projector", "language_model")),
        ({"model_type": "qwen2_audio"}, ("audio_tower", "projector", "language_model")),
        ({"model_type": "llama"}, ("language_model",)),
    ):
        with pytest.raises(RuntimeConfigError, match="nothing would train"):
            read(tmp_path, model, frozen=everything)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "paligemma"}, "config.json: model_type: .*'gemma3'.*found 'paligemma'.*CONTRIBUTING"),
        ({"model_type": "internvl", "text_config": {"model_type": "phi"}}, "text_config.model_type.*'phi'.*CONTRIB"),
        ({"model_type": "gemma3", "vision_config": {"model_type": "vit"}}, "vision_config.model_type.*'vit'.*CONTRIB"),
        (
            {"model_type": "qwen2_audio", "audio_config": {"model_type": "wav2vec2"}},
            "audio_config.model_type.*wav2vec2",
        ),
        (
            {"model_type": "llama", "hidden_size": "big"},
            "hidden_size: expected a whole number of at least 1, found 'big'",
        ),
        ({"model_type": "llama", "num_hidden_layers": True}, "num_hidden_layers: expected a whole number"),
        ({"model_type": "llama", "attention_bias": "no"}, "attention_bias: expected true or false, found 'no'"),
        (
            {"model_type": "gemma3", "vision_config": {"num_attention_heads": 7}},
            "num_attention_heads: expected a divisor",
        ),
        ({"model_type": "smolvlm", "vision_config": {"image_size": [1, 2, 3]}}, "image_size: expected one or two"),
        ({"model_type": "smolvlm", "vision_config": {"image_size": 8}}, "image_size: expected at least one patch"),
        ({"model_type": "internvl", "downsample_ratio": 0}, "downsample_ratio: expected a number above 0"),
        ({"model_type": "llava", "vision_config": [1]}, "vision_config: expected an object"),
        (
            {"model_type": "llava", "vision_feature_layer": []},
            "vision_feature_layer: expected a layer number or a list",
        ),
        ({"model_type": "qwen3_vl", "vision_config": {"depth": 4}}, "deepstack_visual_indexes: expected layer numbers"),
        ({"model_type": "qwen3_vl", "text_config": {"num_hidden_layers": 2}}, "deepstack_visual_indexes: .*2 layers"),
        (
            {"model_type": "qwen2_5_vl", "vision_config": {"window_size": 20}},
            "window_size: expected at least 28 pixels",
        ),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok: expected at most the 8 experts"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types: expected .* 26 layers"),
    ],
)
def test_configs_without_sense_are_named(config, message, tmp_path):
    with pytest.raises(RuntimeConfigError, match=message):
        read(tmp_path, config)


def test_every_layer_is_in_one_kind():
    llm = ModelSpec.from_pretrained(MODELS / "gemma-3-4b").llm
    with pytest.raises(RuntimeConfigError, match="module llm: layer_kinds: expected each of layers 0 to 32"):
        replace(llm, num_layers=33)
