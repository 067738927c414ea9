"""Trainer settings and names that EntrainStrategy accepts or refuses, without starting a process."""

from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Trainer, callbacks
from pytorch_lightning.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from entrain_opt import EntrainStrategy, MultimodalDataModule, MultimodalModule
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.lightning.datamodule import GlobalBatchSampler
from entrain_opt.lightning.flags import check_loader, check_trainer
from entrain_opt.lightning.iteration import StepMetrics
from entrain_opt.lightning.module import step_values
from entrain_opt.lightning.resolution import check_parts

QUIET = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"accumulate_grad_batches": 4}, "accumulate_grad_batches"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "gradient_clip_algorithm"),
        ({"overfit_batches": 2}, "limit_train_batches"),
        ({"sync_batchnorm": True, "strategy": "entrain"}, "sync_batchnorm"),
        ({"callbacks": [callbacks.StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging"),
        ({"callbacks": [callbacks.GradientAccumulationScheduler({4: 2})]}, "global_batch_size"),
        ({"callbacks": [callbacks.LearningRateFinder()]}, "LearningRateFinder"),
        ({"callbacks": [callbacks.BackboneFinetuning()]}, "frozen"),
        ({"plugins": [AsyncCheckpointIO()]}, "async_checkpoints"),
    ],
)
def test_settings_that_would_do_something_else_are_refused(settings, named):
    with pytest.raises(RuntimeConfigError, match=named):
        check_trainer(Trainer(**QUIET, **settings))


def test_half_precision_with_a_loss_scale_is_refused():
    class HalfPrecisionTrainer(Trainer):
        precision = "16-mixed"

    with pytest.raises(RuntimeConfigError, match="16-mixed"):
        check_trainer(HalfPrecisionTrainer(**QUIET))


def test_loaders_and_samplers_of_one_s_own_are_refused():
    with pytest.raises(RuntimeConfigError, match="RandomSampler"):
        check_loader(DataLoader([1, 2, 3], shuffle=True))


def test_norm_clipping_is_accepted():
    check_trainer(Trainer(**QUIET, gradient_clip_val=1.0))


def test_registered_name_builds_the_strategy():
    assert isinstance(Trainer(**QUIET, strategy="entrain").strategy, EntrainStrategy)


def test_parts_of_another_kind_and_unusable_data_are_named():
    module = MultimodalModule("models/tiny-llava")
    with pytest.raises(RuntimeConfigError, match="MultimodalDataModule"):
        check_parts(module, object())
    for arguments, named in (
        ({"dataset": "d.jsonl", "global_batch_size": 0}, "global_batch_size"),
        ({"dataset": "recipes/data/traces/math_vision.parquet", "global_batch_size": 1}, "trace"),
    ):
        with pytest.raises(RuntimeConfigError, match=named):
            check_parts(module, MultimodalDataModule(**arguments))


def test_every_epoch_draws_every_sample_once_in_another_order():
    sampler = GlobalBatchSampler(11, 4, seed=1, shuffle=True)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert [len(batch) for batch in batches] == [4, 4, 3]
        orders.append([row for batch in batches for row in batch])
        assert sorted(orders[-1]) == list(range(11))
    assert len({tuple(order) for order in orders}) == 3


def test_a_sampler_continues_where_another_stopped():
    whole = GlobalBatchSampler(11, 4, seed=1, shuffle=True)
    whole.set_epoch(1)
    expected = list(whole)
    resumed = GlobalBatchSampler(11, 4, seed=1, shuffle=True, start=(1, 2))
    assert list(resumed) == expected[2:]
    resumed.set_epoch(2)
    whole.set_epoch(2)
    assert list(resumed) == list(whole)


def test_utilization_is_counted_operations_over_time_and_rate():
    metrics = StepMetrics(
        loss=torch.zeros(()), gradient_norm=1.0, bubble_share=0.1, bubble_share_of_rank=(0.1,), iteration_seconds=2.0,
        predicted_seconds=2.0, step_seconds=8.0, encoder_imbalance=1.0, llm_imbalance=1.0, deferred_samples=0,
        assigner_seconds=0.0,
    )  # fmt: skip
    batch = SimpleNamespace(num_tokens=100, sample_ids=("a", "b"), model_flops=6e12)
    values = step_values(metrics, batch, scale=4.0, peak_flops_per_second=4 * 3e12)
    assert values["model_flops_utilization"] == pytest.approx(0.25)
    assert values["tokens_per_second"] == 50
    # On a CPU, whose rate is nominal, there is none.
    assert "model_flops_utilization" not in step_values(metrics, batch)
