"""`MultimodalModule`: which model trains, what of it, and how."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.optim import Optimizer

from entrain_opt.cost.analytic import peak_flops_per_second
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.lightning.iteration import StepMetrics
from entrain_opt.lightning.strategy import EntrainStrategy
from entrain_opt.runtime.batches import RankBatch
from entrain_opt.runtime.emulation import StandInModel
from entrain_opt.runtime.lora import Lora
from entrain_opt.runtime.stages import RankModel, build_rank_model
from entrain_opt.runtime.trained import ParameterGroup, check_groups, optimizer_groups
from entrain_opt.spec.model import check_frozen


def _adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)


class MultimodalModule(pl.LightningModule):
    """A multimodal model that `EntrainStrategy` cuts into stages.

    Args:
        model: folder in Hugging Face format; its safetensors are read if present, else the weights are drawn.
        frozen: parts that do not train: `vision_tower`, `projector`, `language_model`.
        seed: of drawn weights; every plan starts from the same ones.
        optimizer: makes the optimizer from this rank's trained parameters.
        scheduler: makes the learning-rate scheduler, stepped once per global batch.
        frozen_layers: how many of the first layers of `vision`, `llm` and so on do not train; the patch or token
            embedding before them does not either, and the head only if it is tied to it. Planned for as if they did.
        parameter_groups: parts with their own learning rate and weight decay; the rest takes the optimizer's.
        decay_norms_and_biases: whether weight decay applies to parameters of one dimension.
        lora: adapters that train in place of a part's weights; needs the package peft.
    """

    def __init__(
        self,
        model: str,
        frozen: list[str] | None = None,
        seed: int = 0,
        optimizer: OptimizerCallable = _adamw,
        scheduler: LRSchedulerCallable | None = None,
        frozen_layers: dict[str, int] | None = None,
        parameter_groups: list[ParameterGroup] | None = None,
        decay_norms_and_biases: bool = False,
        lora: Lora | None = None,
    ) -> None:
        super().__init__()
        self.model_folder = model
        self.frozen = tuple(frozen or ())
        self.seed = seed
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.frozen_layers = dict(frozen_layers or {})
        self.parameter_groups = tuple(parameter_groups or ())
        self.decay_norms_and_biases = decay_norms_and_biases
        self.lora = lora
        self.rank_model: RankModel | None = None

    def check(self) -> None:
        """Raise RuntimeConfigError for arguments without sense, before any process or solver starts."""
        check_frozen(self.frozen)
        check_groups(self.parameter_groups, self.frozen)
        if self.lora is not None:
            self.lora.check(self.frozen)

    @property
    def entrain(self) -> EntrainStrategy:
        """The strategy; raises RuntimeConfigError under any other."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, EntrainStrategy):
            raise RuntimeConfigError(
                f"trainer.strategy: MultimodalModule runs under EntrainStrategy, found {type(strategy).__name__}. "
                "Write strategy: entrain."
            )
        return strategy

    def configure_model(self) -> None:
        """Build this rank's stages; a second call changes nothing."""
        if self.rank_model is None:
            self.check()
            strategy = self.entrain
            if strategy.rehearsal is not None:
                stages = strategy.plan.pipeline_shape.stages_of_rank(strategy.groups.pipeline_rank)
                self.rank_model = StandInModel(strategy.plan, stages)
                return
            dtype = torch.bfloat16 if strategy.precision_plugin.precision == "bf16-true" else torch.float32
            self.rank_model = build_rank_model(
                self.model_folder,
                strategy.plan,
                strategy.groups.pipeline_rank,
                seed=self.seed,
                dtype=dtype,
                frozen_layers=self.frozen_layers,
                lora=self.lora,
                tensor=strategy.groups.tensor,
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.lora is not None:
            checkpoint["lora_scale"] = self.lora.scale  # For export, which merges the adapters.

    def configure_optimizers(self) -> Any:
        assert self.rank_model is not None
        if self.entrain.rehearsal is not None:
            return self.make_optimizer(self.rank_model.parameters())
        # The same groups on every rank; a rank that holds only frozen layers has empty ones.
        groups = optimizer_groups(
            self.rank_model.optimized_parameters(),
            self.rank_model.family,
            self.parameter_groups,
            decay_norms_and_biases=self.decay_norms_and_biases,
        )
        optimizer = self.make_optimizer(groups)
        if self.make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": "step"},
        }

    def training_step(self, batch: RankBatch, batch_idx: int) -> Tensor:
        runner, rehearsal = self.entrain.runner, self.entrain.rehearsal
        if rehearsal is None:
            assert self.rank_model is not None
            self.rank_model.dropout_key.step = self.global_step
        metrics = runner.train(batch)
        values = step_values(
            metrics, batch, scale=1.0 if rehearsal is None else rehearsal.scale, peak_flops_per_second=self._peak
        )
        batch_size = len(batch.sample_ids)
        if rehearsal is not None:
            # There is no loss, and no number may pass for one of a real run.
            self.log_dict({f"emulated_{name}": value for name, value in values.items()}, batch_size=batch_size)
            shown = {"emulated s/step": round(metrics.step_seconds / rehearsal.scale, 3)}
            self.log_dict(shown, prog_bar=True, logger=False, batch_size=batch_size)
            return metrics.loss
        self.log("loss", metrics.loss, prog_bar=True, batch_size=batch_size)
        shown = {"tokens/s": round(values["tokens_per_second"]), "bubble": round(metrics.bubble_share, 3)}
        self.log_dict(shown, prog_bar=True, logger=False, batch_size=batch_size)
        values |= {
            "gradient_norm": metrics.gradient_norm,
            "skipped_steps": float(runner.skipped_steps),
            "left_out_samples": float(batch.num_left_out),
        }
        self.log_dict(values, batch_size=batch_size)
        return metrics.loss

    @property
    def _peak(self) -> float | None:
        """Of all devices; the catalogue's rate of a CPU is nominal, so a share of it would say nothing."""
        strategy = self.entrain
        costs = strategy.resolution.costs
        device = costs.cluster.device_spec
        num_devices = strategy.plan.degrees.data * strategy.resolution.plan.degrees.replica_size
        return None if device.name == "cpu" else num_devices * peak_flops_per_second(device, costs.precision)

    def validation_step(self, batch: RankBatch, batch_idx: int) -> Tensor:
        loss = self.entrain.runner.evaluate(batch)
        # Weighted by label tokens, so that the epoch's value does not depend on how it was cut into batches.
        self.log("validation_loss", loss, prog_bar=True, batch_size=batch.label_tokens)
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the norm over all stages, not by each rank's own."""
        if gradient_clip_val:
            self.entrain.runner.clip(float(gradient_clip_val))


def step_values(
    metrics: StepMetrics, batch: RankBatch, *, scale: float = 1.0, peak_flops_per_second: float | None = None
) -> dict[str, float]:
    """What is logged of every step, by name; equal on every rank.

    Args:
        metrics: of the step.
        batch: of any rank.
        scale: wall seconds per second that is logged; not 1 in an emulated run.
        peak_flops_per_second: of all devices together; None logs no utilization.
    """
    step_seconds = metrics.step_seconds / scale
    values = {
        "tokens_per_second": batch.num_tokens / step_seconds,
        "samples_per_second": len(batch.sample_ids) / step_seconds,
        "step_seconds": step_seconds,
        "predicted_step_seconds": metrics.predicted_seconds,
        "measured_over_predicted": step_seconds / metrics.predicted_seconds,
        "bubble_share": metrics.bubble_share,
        "encoder_imbalance": metrics.encoder_imbalance,
        "llm_imbalance": metrics.llm_imbalance,
        "deferred_samples": float(metrics.deferred_samples),
        "assigner_milliseconds": 1e3 * metrics.assigner_seconds,
    }
    if peak_flops_per_second is not None:
        values["model_flops_utilization"] = batch.model_flops / (step_seconds * peak_flops_per_second)
    return values | {f"bubble_share_rank_{i}": share for i, share in enumerate(metrics.bubble_share_of_rank)}
