"""Optimizer steps under a plan: clipping, tied weights, gradients that are not finite, memory."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import MIXED_TILES, SPLITS, SyntheticReader, make_plan, write_model
from ranks import run_ranks

from entrain_opt.cost import CostModel
from entrain_opt.errors import TrainingError, WorkloadError
from entrain_opt.lightning.iteration import IterationRunner
from entrain_opt.runtime.batches import RankBatchBuilder
from entrain_opt.runtime.p2p import make_groups
from entrain_opt.runtime.stages import build_rank_model, tied_stages
from entrain_opt.runtime.unreadable import SkippingReader, leave_out
from entrain_opt.spec import ClusterSpec, ModelSpec

BATCHES = [[0, 1, 2, 3], [9, 5], [8, 7, 6, 4, 2]]
STEPS = [*BATCHES, BATCHES[0], BATCHES[2]]


class Run:
    """A model, its optimizer and batches on this rank."""

    def __init__(self, plan, *, nonfinite="error", dtype=torch.float32, lora=None):
        self.groups = make_groups(plan, tied_stages=tied_stages(plan.model, plan))
        self.model = build_rank_model(
            plan.model, plan, self.groups.pipeline_rank, seed=3, dtype=dtype, lora=lora, tensor=self.groups.tensor
        )
        self.model.keep_masters(self.groups)
        self.runner = IterationRunner(self.model, self.groups, nonfinite=nonfinite)
        self.use(torch.optim.SGD(self.model.optimized_parameters().values(), lr=0.1, momentum=0.9))
        reader = SyntheticReader(MIXED_TILES)
        spec = ModelSpec.from_pretrained(plan.model, frozen=plan.frozen)
        self.builder = RankBatchBuilder(
            samples=reader.table(),
            reader=reader,
            family=self.model.family,
            plan=plan,
            cost_model=CostModel(spec, ClusterSpec(device="cpu")),
            replica=self.groups.replica,
            pipeline_rank=self.groups.pipeline_rank,
        )

    def use(self, optimizer):
        """Step with this optimizer from now on."""
        optimizer.register_step_post_hook(lambda *_: self.model.masters.write_back())
        self.optimizer = optimizer

    def step(self, rows, *, max_norm=None):
        metrics = self.runner.train(self.builder.build(rows))
        self.optimizer.zero_grad()
        self.runner.restore_gradients()
        if max_norm is not None:
            self.runner.clip(max_norm)
        self.optimizer.step()
        return metrics

    def weights(self):
        return {name: p.detach().numpy().copy() for name, p in self.model.model.named_parameters()}


def train(plans, max_norm):
    """Weights and norms after a few steps under each plan."""
    outcomes = []
    for plan in plans:
        run = Run(plan)
        norms = [run.step(rows, max_norm=max_norm).gradient_norm for rows in STEPS]
        outcomes.append((norms, run.weights()))
    return outcomes


def assert_same_weights(expected, outcomes):
    norms, weights = expected
    for found_norms, found in outcomes:
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for name, value in found.items():
            np.testing.assert_allclose(value, weights[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_clipping_and_tied_weights_follow_the_plain_model(tmp_path):
    """One global norm, and tied copies that stay one parameter: the same weights after every step."""
    folder = write_model(tmp_path / "tied", tied=True)
    for max_norm in (None, 0.1):
        expected = train([make_plan(folder, SPLITS[1])], max_norm)[0]
        ranks = run_ranks(train, 2, [make_plan(folder, SPLITS[2]), make_plan(folder, SPLITS[1], data=2)], max_norm)
        for outcomes in ranks:
            assert_same_weights(expected, outcomes)
        copies = [outcomes[0][1].get("model.language_model.embed_tokens.weight") for outcomes in ranks]
        held = [copy for copy in copies if copy is not None]
        assert all(np.array_equal(copy, held[0]) for copy in held)


def poison(plan, policy):
    """A NaN on the last stage of the last replica only: what every rank does."""
    run = Run(plan, nonfinite=policy)
    before = run.weights()
    if run.model.stages[-1] == len(plan.stages) - 1 and run.groups.replica == plan.degrees.data - 1:
        with torch.no_grad():
            dict(run.model.model.named_parameters())["lm_head.weight"][5, 5] = float("nan")
    try:
        skipped = run.step(BATCHES[0]).skipped
    except TrainingError as error:
        return "error", str(error)
    after = run.weights()
    changed = [n for n in before if n != "lm_head.weight" and not np.array_equal(before[n], after[n])]
    return skipped, changed


@pytest.mark.parametrize(("split", "data"), [(1, 1), (2, 1), (1, 2)])
def test_a_value_that_is_not_finite_is_noticed_by_every_rank(tmp_path, split, data):
    plan = make_plan(write_model(tmp_path / "plain"), SPLITS[split], data=data)
    world_size = plan.degrees.pipeline * data
    for kind, message in run_ranks(poison, world_size, plan, "error"):
        assert kind == "error"
        assert "s0" in message
    for skipped, changed in run_ranks(poison, world_size, plan, "skip"):
        assert skipped
        assert changed == []


class BrokenReader(SyntheticReader):
    """Cannot decode the media of one row."""

    def pixels(self, row, item):
        if row == 2:
            raise WorkloadError("sample s2: broken.jpg")
        return super().pixels(row, item)


def step_with_a_broken_sample(plan, rows, broken):
    """Loss, weights and samples left out after a step."""
    run = Run(plan)
    builder = run.builder
    if broken:
        reader = SkippingReader(BrokenReader(MIXED_TILES), builder.samples)
        builder = replace(builder, reader=reader)
    batch = builder.build(rows)
    if broken:
        batch = leave_out(replace(batch, decoded=reader.take(rows)), run.groups.waits)
    loss = float(run.runner.train(batch).loss)
    run.optimizer.zero_grad()
    run.runner.restore_gradients()
    run.optimizer.step()
    return loss, run.weights(), batch.num_left_out


def test_an_unreadable_sample_is_left_out_of_loss_and_gradients_on_every_rank(tmp_path, capfd):
    """The rank that decodes is not the one that has the labels; the replica that decodes is not the only one."""
    folder = write_model(tmp_path / "plain")
    loss, weights, _ = step_with_a_broken_sample(make_plan(folder, SPLITS[1]), [0, 1, 3, 8], False)
    plans = [make_plan(folder, SPLITS[2]), make_plan(folder, SPLITS[1], data=2)]
    for found in run_ranks(steps_with_a_broken_sample, 2, plans, [0, 1, 2, 3, 8]):
        for found_loss, found_weights, left_out in found:
            assert found_loss == pytest.approx(loss, rel=1e-5)
            assert left_out == 1
            for name, value in found_weights.items():
                np.testing.assert_allclose(value, weights[name], rtol=1e-5, atol=1e-6, err_msg=name)
    assert "left out of this step: sample s2: broken.jpg" in capfd.readouterr().err


def steps_with_a_broken_sample(plans, rows):
    return [step_with_a_broken_sample(plan, rows, True) for plan in plans]


def test_tensors_do_not_pile_up(tmp_path):
    run = Run(make_plan(write_model(tmp_path / "plain"), SPLITS[1], schedule="zero_bubble"))

    def count():
        run.step(BATCHES[0])
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    first = [count() for _ in range(3)][-1]
    assert [count() for _ in range(5)][-1] == first


def test_weights_depend_on_seed_and_name_only(tmp_path):
    folder = write_model(tmp_path / "tied", tied=True)
    whole = dict(build_rank_model(folder, make_plan(folder, SPLITS[1]), 0, seed=5).model.named_parameters())
    for split in (SPLITS[2], SPLITS[3], SPLITS["3-llm"]):
        plan = make_plan(folder, split)
        held = set()
        for rank in range(plan.degrees.pipeline):
            for name, parameter in build_rank_model(folder, plan, rank, seed=5).model.named_parameters():
                assert torch.equal(parameter, whole[name]), name
                held.add(name)
        assert held == set(whole)
    other = dict(build_rank_model(folder, make_plan(folder, SPLITS[1]), 0, seed=6).model.named_parameters())
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(whole[name], other[name])


def test_a_parameter_without_a_place_raises(tmp_path):
    from entrain_opt.errors import RuntimeConfigError
    from entrain_opt.runtime.families import family_of

    folder = write_model(tmp_path / "plain")
    family = family_of(build_rank_model(folder, make_plan(folder, SPLITS[1]), 0, seed=0).family.config)
    with pytest.raises(RuntimeConfigError, match=r"model\.resampler\.weight"):
        family.place("model.resampler.weight")
