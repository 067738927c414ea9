"""LoRA: gradients of adapters equal the plain model's with the same adapters; saved, resumed and merged on export."""

import importlib.util

import numpy as np
import pytest
import torch
from cases import MIXED_TILES, SPLITS, SyntheticReader, make_plan, reference, relative_error, run_model, write_model

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime import checkpoint as checkpoints
from entrain_opt.runtime.lora import Lora, add_adapters, is_adapter
from entrain_opt.runtime.stages import build_rank_model

SEED = 7
LORA = Lora(parts=["language_model", "vision_tower"], rank=2, alpha=6.0)
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


def adapted(folder, split=SPLITS[1], rank=0, lora=LORA, **fields):
    """A rank's model whose second factors are not zero, so that every adapter has a gradient."""
    model = build_rank_model(folder, make_plan(folder, split, **fields), rank, seed=SEED, lora=lora)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                torch.manual_seed(len(name))
                parameter.normal_(std=0.1)
    return model


@needs_peft
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_gradients_of_adapters_equal_the_plain_model(tmp_path, schedule):
    folder, reader, rows = write_model(tmp_path / "plain"), SyntheticReader(MIXED_TILES), [0, 1, 2, 6]
    model = adapted(folder, schedule=schedule, recompute=("llm",))
    state = {name: value.clone() for name, value in model.model.state_dict().items()}
    trained = {name for name, p in model.model.named_parameters() if p.requires_grad}
    expected_loss, expected = reference(
        folder, reader, rows, seed=SEED, prepare=lambda plain: add_adapters(plain, model.family, LORA), state=state
    )
    loss, found, _, _ = run_model(model, reader, rows)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert set(found) == trained
    assert {is_adapter(name) or "projector" in name for name in trained} == {True}
    assert sum(is_adapter(name) for name in trained) == 2 * (4 * 6 + 3 * 7)
    assert relative_error(found, {name: expected[name] for name in found}) < 1e-5


@needs_peft
def test_a_model_starts_as_the_one_without_adapters_under_every_plan(tmp_path):
    folder = write_model(tmp_path / "plain")
    plain = build_rank_model(folder, make_plan(folder, SPLITS[1]), 0, seed=SEED).optimized_parameters()
    whole = build_rank_model(folder, make_plan(folder, SPLITS[1]), 0, seed=SEED, lora=LORA).optimized_parameters()
    assert all(torch.equal(whole[name], weight) for name, weight in plain.items())
    assert all(p.any() == ("lora_A" in name) for name, p in whole.items() if is_adapter(name))
    held = {}
    for rank in range(2):
        part = build_rank_model(folder, make_plan(folder, SPLITS[2]), rank, seed=SEED, lora=LORA)
        held |= part.optimized_parameters()
    assert set(held) == set(whole)
    assert all(torch.equal(held[name], weight) for name, weight in whole.items())


@needs_peft
def test_checkpoints_resume_and_export_merges(tmp_path):
    from transformers import AutoModelForImageTextToText

    folder = write_model(tmp_path / "plain")
    model = adapted(folder)
    meta = {"lora_scale": LORA.scale}
    snapshot = checkpoints.take_snapshot(model, [], meta=meta, model_folder=folder, plan={})
    checkpoints.write(tmp_path / "c", snapshot)
    other = build_rank_model(folder, make_plan(folder, SPLITS[1]), 0, seed=SEED + 1, lora=LORA)
    checkpoints.load_model(tmp_path / "c", other)
    restored = other.optimized_parameters()
    assert all(torch.equal(restored[name], value) for name, value in model.optimized_parameters().items())
    checkpoints.export(tmp_path / "c", tmp_path / "out")
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[5, 9, 11, 20]])
    model.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        np.testing.assert_allclose(exported(ids).logits, model.model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)


@needs_peft
def test_targets_that_no_layer_has_are_named(tmp_path):
    folder = write_model(tmp_path / "plain")
    with pytest.raises(RuntimeConfigError, match=r"lora.targets: .*q_proj.*\['query'\]"):
        adapted(folder, lora=Lora(targets=["query"]))
    few = adapted(folder, lora=Lora(targets=["q_proj"]))
    assert sum(is_adapter(name) for name in few.optimized_parameters()) == 2 * 3


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(parts=["projector"]), "lora.parts: expected names from .*'projector'"),
        (Lora(parts=["vision_tower"]), "lora.parts: 'vision_tower' is in `frozen` too"),
        (Lora(parts=[]), "at least one part"),
        (Lora(rank=0), "lora.rank: expected at least 1"),
    ],
)
def test_wrong_settings_are_refused(lora, message):
    with pytest.raises(RuntimeConfigError, match=message):
        lora.check(["vision_tower"])


def test_without_peft_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeConfigError, match=r"pip install entrain-opt\[lora\]"):
        Lora().check([])
