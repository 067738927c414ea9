"""bfloat16: as close to the plain model as its rounding allows, sums in float32, masters that small updates reach."""

import numpy as np
import pytest
import torch
from cases import MIXED_TILES, SPLITS, SyntheticReader, make_plan, reference, run_pipeline, write_model

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.lightning.precision import check_precision, plugin_of_stages
from entrain_opt.runtime import checkpoint as checkpoints
from entrain_opt.runtime.stages import build_rank_model

ROWS = list(range(len(MIXED_TILES)))
#: Unit roundoff of bfloat16: 8 significant bits.
ROUNDOFF = 2.0**-9


def distance(found, expected):
    """Norm of the difference of all gradients, relative to the norm of the expected ones."""
    assert set(found) == set(expected)
    squares = sum(float(np.sum((found[name] - expected[name]) ** 2)) for name in expected)
    return np.sqrt(squares / sum(float(np.sum(gradient**2)) for gradient in expected.values()))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_loss_and_gradients_follow_the_plain_model_in_the_same_precision(tmp_path, precision):
    """Here and there a gradient is rounded once more where it is summed, each time by at most the unit roundoff.

    So the two may differ by twice that (0.2 % each), and ours is no farther from float32 than the plain one.
    """
    folder, reader = write_model(tmp_path / "plain"), SyntheticReader(MIXED_TILES)
    _, exact = reference(folder, reader, ROWS)
    expected_loss, expected = reference(folder, reader, ROWS, precision=precision)
    for fields in ({}, {"schedule": "zero_bubble"}, {"recompute": ("vision", "llm")}):
        plan = make_plan(folder, SPLITS[1], **fields)
        loss, found, norm, _ = run_pipeline(plan, reader, ROWS, precision=precision)
        assert loss == pytest.approx(expected_loss, rel=ROUNDOFF / 8)  # The loss itself is in float32.
        assert distance(found, expected) < 2 * ROUNDOFF
        assert distance(found, exact) < 1.2 * distance(expected, exact)
        assert norm == pytest.approx(np.sqrt(sum(float(np.sum(g**2)) for g in found.values())), rel=1e-5)
        assert all(gradient.dtype == np.float32 for gradient in found.values())


def half_model(folder):
    model = build_rank_model(folder, make_plan(folder, SPLITS[1]), 0, seed=2, dtype=torch.bfloat16)
    model.keep_masters()
    return model


def test_small_gradients_add_up(tmp_path):
    """Adding 1/1024 to 1 a thousand times: bfloat16 would stay at 1."""
    model = half_model(write_model(tmp_path / "plain"))
    name = "model.language_model.norm.weight"
    weight = dict(model.model.named_parameters())[name]
    weight.sum().backward()
    for _ in range(1024):
        (weight.sum() / 1024).backward()
    gradient = model.optimized_parameters()[name].grad
    assert weight.grad is None
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full_like(gradient, 2.0))


def test_small_updates_add_up_and_survive_a_checkpoint(tmp_path):
    folder = write_model(tmp_path / "plain")
    model = half_model(folder)
    name = "model.language_model.norm.weight"
    weight, master = dict(model.model.named_parameters())[name], model.optimized_parameters()[name]
    assert weight.dtype == torch.bfloat16
    optimizer = torch.optim.SGD(model.optimized_parameters().values(), lr=1.0)
    optimizer.register_step_post_hook(lambda *_: model.masters.write_back())
    master.grad = torch.full_like(master, 1 / 1024)
    for _ in range(8):
        optimizer.step()
    assert torch.equal(master, torch.full_like(master, 1 - 8 / 1024))
    assert torch.equal(weight, master.bfloat16())
    for _ in range(3):
        optimizer.step()
    snapshot = checkpoints.take_snapshot(model, [optimizer], meta={}, model_folder=folder, plan={})
    checkpoints.write(tmp_path / "c", snapshot)
    other = half_model(folder)
    checkpoints.load_model(tmp_path / "c", other)
    assert torch.equal(other.optimized_parameters()[name], master)
    assert torch.equal(dict(other.model.named_parameters())[name], master.bfloat16())


def test_weights_differ_between_precisions_by_rounding_alone(tmp_path):
    folder = write_model(tmp_path / "plain")
    plan = make_plan(folder, SPLITS[1])
    full, half = (build_rank_model(folder, plan, 0, seed=2, dtype=d) for d in (torch.float32, torch.bfloat16))
    rounded = dict(half.model.named_parameters())
    assert all(torch.equal(p.bfloat16(), rounded[name]) for name, p in full.model.named_parameters())
    buffers = dict(half.model.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in full.model.named_buffers())


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "64-true"])
def test_other_precisions_are_refused_with_the_reason(precision):
    with pytest.raises(RuntimeConfigError, match=f"trainer.precision: expected .*'{precision}'") as caught:
        check_precision(precision)
    assert ("loss scale" in str(caught.value)) == precision.startswith("16")


def test_nothing_is_cast_around_the_stages_under_bf16_true():
    from pytorch_lightning.plugins.precision import HalfPrecision, MixedPrecision

    plugin = plugin_of_stages(HalfPrecision("bf16-true"))
    assert plugin.precision == "bf16-true"
    assert plugin.convert_module(torch.nn.Linear(1, 1)).weight.dtype == torch.float32
    with plugin.train_step_context():
        assert torch.zeros(()).dtype == torch.float32
    mixed = MixedPrecision("bf16-mixed", "cpu")
    assert plugin_of_stages(mixed) is mixed
