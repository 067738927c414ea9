"""Steps, checkpoints, families and adapters on devices that share layers."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from cases import (
    MIXED_TILES,
    SPLITS,
    SyntheticReader,
    make_plan,
    reference,
    relative_error,
    run_model,
    run_pipeline,
    write_model,
)  # fmt: skip
from family_models import CASES, FamilyReader
from ranks import run_ranks
from test_checkpoint import assert_same, snapshot
from test_families import ROWS, expected_of, plan_of, write_family
from test_lora import LORA
from test_precision import distance
from test_tensor import ONE, TWO, assert_parts_exact, own_parts
from test_training import BATCHES, Run

from entrain_opt.errors import TrainingError
from entrain_opt.runtime import checkpoint
from entrain_opt.runtime.p2p import PipelineGroups, make_groups
from entrain_opt.runtime.stages import build_rank_model

STEPS = [*BATCHES, BATCHES[0], BATCHES[2]]
#: Below the norms of all steps, so that clipping changes each.
MAX_NORM = 0.05
FAMILIES = list(CASES)


def adam(run):
    """With an epsilon above rounding: the direction of a gradient of 1e-9 is noise."""
    run.optimizer = torch.optim.AdamW(run.model.optimized_parameters().values(), lr=1e-2, eps=1e-3)
    return run


def train_and_save(plan, path, *, after, steps=STEPS):
    """Weights (whole, or this device's parts) after all steps; a checkpoint after some of them."""
    run = adam(Run(plan))
    norms = []
    for index, rows in enumerate(steps):
        if index == after:
            checkpoint.write(path, snapshot(run, plan, step=index))
        norms.append(run.step(rows, max_norm=MAX_NORM).gradient_norm)
    return norms, run.weights(), run.model.shards()


def resume(plan, path, *, after, steps=STEPS):
    run = adam(Run(plan))
    meta = checkpoint.load_meta(path)
    checkpoint.load_model(path, run.model)
    checkpoint.load_optimizers(path, run.model, [run.optimizer], meta)
    for rows in steps[after:]:
        run.step(rows, max_norm=MAX_NORM)
    return run.weights(), run.model.shards()


def train_and_resume(plan, path, other_path):
    """On each rank: a run of its own with a checkpoint, the rest of another plan's run, and what a NaN leads to."""
    trained, resumed = train_and_save(plan, path, after=2), resume(plan, other_path, after=3)
    run = Run(plan)
    weight = dict(run.model.model.named_parameters()).get("model.language_model.layers.2.mlp.down_proj.weight")
    if weight is not None and run.groups.tensor.place == 1:
        with torch.no_grad():
            weight[0, 0] = float("nan")  # In one device's part alone.
    with pytest.raises(TrainingError, match="not finite"):
        run.step(BATCHES[0])
    return trained, resumed


@pytest.mark.parametrize(("split", "tensor"), [(ONE, 2), (TWO, (1, 2))])
def test_steps_with_clipping_and_resumes_under_another_degree(tmp_path, split, tensor):
    """Five steps from the same weights; two devices after one process, and one process after two devices."""
    folder = write_model(tmp_path / "tied", tied=True)
    plan, one = make_plan(folder, split, tensor=tensor), make_plan(folder, ONE)
    paths = [tmp_path / name for name in ("divided", "whole")]
    norms, expected, _ = train_and_save(one, paths[1], after=3)
    assert min(norms) > MAX_NORM
    of_ranks = run_ranks(train_and_resume, plan.degrees.world_size, plan, *paths)
    for (found_norms, weights, shards), (resumed, _) in of_ranks:
        assert found_norms == pytest.approx(norms, rel=1e-5)
        assert_same(weights, own_parts(expected, shards))
        assert_same(resumed, own_parts(expected, shards))
    assert_same(resume(one, paths[0], after=2)[0], expected)
    checkpoint.export(paths[0], tmp_path / "exported")
    saved = Run(one)
    checkpoint.load_model(paths[0], saved.model)
    again = build_rank_model(tmp_path / "exported", one, 0, seed=99).optimized_parameters()
    assert all(torch.equal(again[name], value) for name, value in saved.model.optimized_parameters().items())


def on_two_devices(root, lora):
    """Every family on this pair; one with dropout; two shorter precisions; and a model with adapters."""
    results = []
    for name in FAMILIES:
        plan = plan_of(root / name, name, (), (), tensor=2)
        groups = make_groups(plan)
        model = build_rank_model(root / name, plan, 0, seed=7, tensor=groups.tensor)
        results.append(run_model(model, FamilyReader(name), list(ROWS), groups=groups))
    results.append(with_dropout(root / DROPPING, make_groups(plan_of(root / DROPPING, AUDIO, (), (), tensor=2))))
    short = make_plan(str(root / "plain"), SPLITS[1], tensor=2)
    results += [run_pipeline(short, LORA_CASE[0], ALL_ROWS, precision=precision) for precision in SHORT]
    if lora is not None:
        plan = make_plan(root / "plain", SPLITS[1], tensor=2, schedule="zero_bubble")
        groups = make_groups(plan)
        results.append(run_model(with_adapters(root / "plain", plan, groups.tensor), *LORA_CASE, groups=groups))
    return results


LORA_CASE = (SyntheticReader(MIXED_TILES), [0, 1, 2, 6])
ALL_ROWS = list(range(len(MIXED_TILES)))
AUDIO, DROPPING, SHORT = "qwen2_audio", "dropping", ("bf16-mixed", "bf16-true")


def write_dropping(root):
    """A family whose dropout lies outside of what devices share."""
    config = {**CASES[AUDIO].config, "audio_config": {**CASES[AUDIO].config["audio_config"], "dropout": 0.3}}
    (root / DROPPING).mkdir()
    (root / DROPPING / "config.json").write_text(json.dumps(config))


def with_dropout(folder, groups):
    """One iteration in training mode."""
    plan = plan_of(folder, AUDIO, (), (), tensor=groups.tensor.size)
    model = build_rank_model(folder, plan, 0, seed=7, tensor=groups.tensor).train()
    torch.manual_seed(groups.tensor.place)
    return run_model(model, FamilyReader(AUDIO), list(ROWS), groups=groups)


def with_adapters(folder, plan, tensor=None):
    """Second factors that are not zero, so that every adapter has a gradient; the same ones under every degree."""
    model = build_rank_model(folder, plan, 0, seed=7, lora=LORA, tensor=tensor)
    whole = build_rank_model(folder, make_plan(folder, SPLITS[1]), 0, seed=7, lora=LORA)
    shapes = {name: p.shape for name, p in whole.model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                drawn = torch.randn(shapes[name], generator=torch.Generator().manual_seed(len(name))) / 10
                shard = model.divided.shards.get(name)
                parameter.copy_(drawn if shard is None else shard.cut(drawn))
    return model


def test_families_and_adapters_on_two_devices(tmp_path):
    has_peft = importlib.util.find_spec("peft") is not None
    for name in FAMILIES:
        write_family(tmp_path, name)
    folder = write_model(tmp_path / "plain")
    write_dropping(tmp_path)
    of_ranks = run_ranks(on_two_devices, 2, tmp_path, LORA if has_peft else None)
    for index, name in enumerate(FAMILIES):
        assert_parts_exact([results[index] for results in of_ranks], expected_of(tmp_path / name, name, ROWS))
    later = [results[len(FAMILIES) :] for results in of_ranks]
    dropped_loss, dropped, _, _ = with_dropout(tmp_path / DROPPING, PipelineGroups(replica=0, pipeline_rank=0))
    assert_parts_exact([results[0] for results in later], (dropped_loss, dropped))
    assert relative_error(dropped, expected_of(tmp_path / AUDIO, AUDIO, ROWS)[1]) > 1e-2
    _, exact = reference(folder, LORA_CASE[0], ALL_ROWS)
    for index, precision in enumerate(SHORT, start=1):
        _, plain = reference(folder, LORA_CASE[0], ALL_ROWS, precision=precision)
        for _, found, _, notes in (results[index] for results in later):
            # The sum over the devices rounds once more than the plain model.
            own, own_plain = own_parts(exact, notes["shards"]), own_parts(plain, notes["shards"])
            assert distance(found, own) < 1.5 * distance(own_plain, own)
            assert all(gradient.dtype == np.float32 for gradient in found.values())
    if has_peft:
        loss, gradients, norm, _ = run_model(with_adapters(folder, make_plan(folder, SPLITS[1])), *LORA_CASE)
        results = [results[-1] for results in of_ranks]
        assert sum(result[0] for result in results) == pytest.approx(loss, rel=1e-5)
        for _, found, found_norm, notes in results:
            assert relative_error(found, own_parts(gradients, notes["shards"])) < 1e-5
            assert found_norm == pytest.approx(norm, rel=1e-5)
