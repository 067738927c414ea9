"""Parameter counts of every family equal those of the real model, part by part and layer by layer."""

import json
from pathlib import Path

import pytest
from family_cases import FAMILIES, TEXT_TYPES, Draw, family_config, real_counts, real_model, text_config

from entrain_opt.spec import ModelSpec


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
    for seed in range(8):
        config = family_config(family, seed)
        assert_counts_are_real(read(tmp_path, config), config)


@pytest.mark.parametrize("family", FAMILIES)
def test_default_config(family, tmp_path):
    config = {"model_type": family}
    assert_counts_are_real(read(tmp_path, config), config)


@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_language_models_alone(model_type, tmp_path):
    for config in ({"model_type": model_type}, *(text_config(Draw(seed), model_type) for seed in range(8))):
        spec = read(tmp_path, config)
        assert spec.encoders == ()
        assert_counts_are_real(spec, config)
