"""Trainer flags and callbacks that would silently do something else under this strategy, refused before a run starts.

A step is one global batch cut over many ranks, each rank holds a part of the model, and a step's gradients are made in
one piece. Whatever assumes a whole model on every rank, or several batches in a step, cannot keep its word.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning import callbacks
from pytorch_lightning.plugins.io import TorchCheckpointIO

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.lightning.precision import check_precision

_CALLBACKS: dict[type, str] = {
    callbacks.GradientAccumulationScheduler: "a step is one global batch; set data.global_batch_size.",
    callbacks.BatchSizeFinder: "the plan decides memory and microbatches; `entrain plan` shows what fits.",
    callbacks.LearningRateFinder: "it trains on a copy of the run; try learning rates in short runs of their own.",
    callbacks.StochasticWeightAveraging: "it averages whole models, a rank holds a part; average exported checkpoints.",
    callbacks.WeightAveraging: "it averages whole models, a rank holds a part; average exported checkpoints.",
    callbacks.ModelPruning: "it prunes a whole model, each rank holds a part.",
    callbacks.BaseFinetuning: "what is frozen decides the plan and cannot change in a run; set model.frozen.",
}


def check_trainer(trainer: pl.Trainer, *, emulated: bool = False) -> None:
    """Raise RuntimeConfigError for trainer settings that would silently do something else than they say."""
    if emulated and trainer.checkpoint_callbacks:
        raise RuntimeConfigError(
            "trainer.callbacks: an emulated run has no weights, so it writes no checkpoints. Remove ModelCheckpoint "
            "and set enable_checkpointing: false."
        )
    check_flags(trainer)
    if trainer.accumulate_grad_batches != 1:
        raise RuntimeConfigError(
            f"trainer.accumulate_grad_batches: expected 1, found {trainer.accumulate_grad_batches}. A step is one "
            "global batch; make global_batch_size larger and set num_microbatches instead."
        )
    check_precision(str(trainer.precision))
    if trainer.gradient_clip_val is not None and str(trainer.gradient_clip_algorithm or "norm").lower().endswith(
        "value"
    ):
        raise RuntimeConfigError(
            "trainer.gradient_clip_algorithm: expected norm (over all stages), found value, which is not supported."
        )


def check_flags(trainer: pl.Trainer) -> None:
    """Raise RuntimeConfigError that names the first flag or callback that cannot work, why, and what to do."""
    strategy = trainer.strategy
    overfit = trainer.overfit_batches  # type: ignore[attr-defined]
    if overfit:
        raise RuntimeConfigError(
            f"trainer.overfit_batches: expected 0, found {overfit}: it replaces the sampler of global "
            "batches. Use trainer.limit_train_batches with data.shuffle: false, which repeats the first batches."
        )
    if getattr(strategy, "_layer_sync", None) is not None:
        raise RuntimeConfigError(
            "trainer.sync_batchnorm: expected false, found true: the samples of a microbatch are chosen by the "
            "assigner, so statistics over them would depend on the plan. The supported models have no batch norm."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _CALLBACKS.items():
            if isinstance(callback, kind):
                raise RuntimeConfigError(f"trainer.callbacks: {type(callback).__name__} cannot work here: {reason}")
    if type(strategy.checkpoint_io) is not TorchCheckpointIO:
        raise RuntimeConfigError(
            f"trainer.plugins: {type(strategy.checkpoint_io).__name__} would not be used: EntrainStrategy writes "
            "checkpoints itself, sharded by rank. For writing in the background set async_checkpoints: true."
        )


def check_loader(loader: Any) -> None:
    """Raise RuntimeConfigError for a loader that is not that of `MultimodalDataModule`."""
    from entrain_opt.lightning.datamodule import GlobalBatchDataset, GlobalBatchSampler

    if isinstance(loader, list) and not loader:
        return  # No validation data.
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    if not isinstance(dataset, GlobalBatchDataset) or not isinstance(sampler, GlobalBatchSampler):
        raise RuntimeConfigError(
            f"data: expected a loader of global batches with GlobalBatchSampler, found {type(dataset).__name__} with "
            f"{type(sampler).__name__}. All ranks must draw the same global batches, so samplers of one's own are "
            "not supported; change the dataset, data.shuffle or data.seed instead."
        )
