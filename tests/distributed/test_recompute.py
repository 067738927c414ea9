"""Recompute: the same gradients, and far fewer bytes between forward and backward."""

import pytest
import torch
from cases import MIXED_TILES, SPLITS, SyntheticReader, make_plan, relative_error, run_pipeline, write_model

from entrain_opt.runtime.families import MediaUnit
from entrain_opt.runtime.recompute import layer_of
from entrain_opt.runtime.stages import build_rank_model

ROWS = list(range(len(MIXED_TILES)))
BOTH = ("vision", "llm")


@pytest.mark.parametrize("frozen", [(), ("vision_tower", "language_model")])
def test_gradients_are_those_without_recompute(tmp_path, frozen):
    """Matrix products may differ in the last bit with the alignment of their operands, hence not equal to the bit."""
    folder, reader = write_model(tmp_path / "plain"), SyntheticReader(MIXED_TILES)
    loss, expected, _, _ = run_pipeline(make_plan(folder, SPLITS[1], frozen=frozen), reader, ROWS)
    for schedule in ("1f1b", "zero_bubble"):
        plan = make_plan(folder, SPLITS[1], schedule=schedule, frozen=frozen, recompute=BOTH)
        found_loss, found, _, _ = run_pipeline(plan, reader, ROWS)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert set(found) == set(expected)
        assert relative_error(found, expected) < 1e-6


def unit_of(tiles):
    return MediaUnit(module="vision", segments=(tiles,), patches=(4 * tiles,), features=(4 * tiles,))


def kept_bytes(model, run):
    """Bytes that autograd keeps after `run`, weights excluded, and the inputs of layers that recompute."""
    weights = {p.untyped_storage().data_ptr() for p in model.model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run()
    return sum(nbytes for nbytes, _ in kept.values()), output


def test_a_layer_keeps_its_input_alone(tmp_path):
    """Counted by what autograd saves: checkpointed layers save nothing themselves, so their inputs are added."""
    folder = write_model(tmp_path / "plain", vision_layers=13)
    split = [("vision", (0, 1), 0), ("vision", (1, 13), 0), ("llm", (0, 3), 0)]
    hidden = torch.randn(5, 4, 24)
    found = {}
    for recompute in ((), ("vision",)):
        model = build_rank_model(folder, make_plan(folder, split, recompute=recompute), 0, seed=1)
        inputs = []
        for layer in model.model.model.vision_tower.encoder.layers[1:]:
            layer.register_forward_pre_hook(lambda _, args, kept=inputs: kept.append(args[0].nbytes))
        found[recompute], output = kept_bytes(model, lambda model=model: model.encode(1, hidden, unit_of(5)))
        assert output.requires_grad
        if recompute:
            found[recompute] += sum(inputs)
    assert found["vision",] < found[()] / 5


def test_layers_run_again_in_the_backward_pass_only_where_the_plan_says(tmp_path):
    folder, calls = write_model(tmp_path / "plain"), []
    model = build_rank_model(folder, make_plan(folder, SPLITS[1], recompute=("vision",)), 0, seed=1)
    for name, module in model.model.named_modules():
        if name.endswith("mlp"):
            module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    model.encode(0, torch.randn(2, 3, 28, 28), unit_of(2)).sum().backward()
    vision = [name for name in calls if "vision_tower" in name]
    assert len(vision) == 2 * 4
    assert len(set(vision)) == 4
    calls.clear()
    with torch.no_grad():
        model.encode(0, torch.randn(2, 3, 28, 28), unit_of(2))
    assert len(calls) == 4


def test_names_of_layers():
    assert layer_of("model.visual.blocks.31.attn.qkv.weight") == "model.visual.blocks.31"
    assert layer_of("model.language_model.layers.0.mlp.experts.7.w1.weight") == "model.language_model.layers.0"
