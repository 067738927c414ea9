"""One optimizer step under a plan: run the schedule, agree on the numbers, keep the gradients for the optimizer.

Lightning zeroes gradients between `training_step` and `backward`, while a schedule makes them inside `training_step`.
So they are taken off the parameters here and put back by `restore_gradients`, which the strategy calls in `backward`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from entrain_opt.errors import RuntimeConfigError, TrainingError
from entrain_opt.runtime.batches import RankBatch
from entrain_opt.runtime.executor import PipelineExecutor
from entrain_opt.runtime.p2p import PipelineGroups
from entrain_opt.runtime.sharded_gradients import make_reducer
from entrain_opt.runtime.stages import RankModel

NONFINITE_POLICIES = ("error", "skip")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """Numbers of one iteration, equal on every rank.

    Attributes:
        loss: of the global batch.
        gradient_norm: over all stages, before clipping.
        bubble_share: part of the iteration that ranks waited, over all ranks.
        bubble_share_of_rank: per pipeline rank, mean over the replicas and the devices that share its layers.
        iteration_seconds: from the first action to the last, mean over the ranks.
        predicted_seconds: what the simulator says of the slowest replica, optimizer step included.
        step_seconds: since the end of the last step, with the optimizer, loading and everything else, until the last
            pipeline rank is done (mean over the replicas).
        encoder_imbalance, llm_imbalance: largest over mean microbatch seconds, mean over the replicas.
        deferred_samples: of the global batch.
        assigner_seconds: to assign, schedule and predict, mean over the ranks.
        skipped: the loss or a gradient was not finite.
    """

    loss: Tensor
    gradient_norm: float
    bubble_share: float
    bubble_share_of_rank: tuple[float, ...]
    iteration_seconds: float
    predicted_seconds: float
    step_seconds: float
    encoder_imbalance: float
    llm_imbalance: float
    deferred_samples: int
    assigner_seconds: float
    skipped: bool = False


class IterationRunner:
    """Runs global batches on one rank.

    Args:
        model: this rank's stages.
        groups: its process groups.
        nonfinite: what to do with a loss or gradient that is not finite: `error`, or `skip` the step and count it.
        executor: another one than of real computations.

    Attributes:
        stop_requested: this rank was told to end; may be set from a signal handler.
        stopping: every rank knows that one was, as of the last iteration.
    """

    def __init__(
        self,
        model: RankModel,
        groups: PipelineGroups,
        *,
        nonfinite: str = "error",
        executor: PipelineExecutor | None = None,
    ) -> None:
        if nonfinite not in NONFINITE_POLICIES:
            raise RuntimeConfigError(f"nonfinite: expected one of {list(NONFINITE_POLICIES)}, found {nonfinite!r}.")
        self.executor = executor or PipelineExecutor(model, groups, make_reducer(model, groups))
        assert self.executor.reducer is not None
        self.reducer = self.executor.reducer
        self.degrees = model.plan.degrees
        self.pipeline_rank = groups.pipeline_rank
        self.nonfinite = nonfinite
        self.skipped_steps = 0
        self.stop_requested = False
        self.stopping = False
        self._waits = groups.waits
        self._kept: list[tuple[nn.Parameter, Tensor]] = []
        self._norm = 0.0
        self._last_end = 0.0

    def train(self, batch: RankBatch) -> StepMetrics:
        """Forward and backward of one global batch; the gradients wait for `restore_gradients`.

        Raises:
            TrainingError: ranks disagree on the batch, or the loss or a gradient is not finite.
        """
        started = time.perf_counter()
        predicted_seconds = self._check_agreement(batch)
        self.reducer.clear()
        result = self.executor.run(batch, training=True)
        values: list[Tensor | float] = [
            result.loss,
            result.busy_seconds,
            result.wall_seconds,
            batch.encoder_imbalance,
            batch.llm_imbalance,
            batch.deferred_samples,
            batch.assigner_seconds,
        ]
        depth = self.degrees.pipeline
        of_rank = [0.0] * (2 * depth)
        waited = 1 - result.busy_seconds / result.wall_seconds if result.wall_seconds > 0 else 0.0
        devices = self.degrees.data * self.degrees.tensor_of(self.pipeline_rank)
        of_rank[self.pipeline_rank] = waited / devices
        of_rank[depth + self.pipeline_rank] = (time.perf_counter() - (self._last_end or started)) / devices
        summed = self._sum_over_ranks([*values, *of_rank], batch.device)
        world_size = self.degrees.world_size
        loss, busy, wall = summed[0], float(summed[1]), float(summed[2])
        encoder_imbalance, llm_imbalance, deferred, assigner_seconds = (summed[3:7] / world_size).tolist()
        bubbles, step_seconds = summed[7 : 7 + depth].tolist(), summed[7 + depth :].tolist()
        self._norm = float(self.reducer.global_norm())
        skipped = self._check_finite(float(loss), batch)
        parameters = self.reducer.named_parameters().values()
        self._kept = [] if skipped else [(p, p.grad) for p in parameters if p.grad is not None]
        self.reducer.clear()
        self._last_end = time.perf_counter()
        return StepMetrics(
            loss=loss.float(),
            gradient_norm=self._norm,
            bubble_share=1 - busy / wall if wall > 0 else 0.0,
            bubble_share_of_rank=tuple(bubbles),
            iteration_seconds=wall / world_size,
            predicted_seconds=predicted_seconds,
            step_seconds=max(step_seconds),
            encoder_imbalance=encoder_imbalance,
            llm_imbalance=llm_imbalance,
            deferred_samples=round(deferred * self.degrees.data),
            assigner_seconds=assigner_seconds,
            skipped=skipped,
        )

    def evaluate(self, batch: RankBatch) -> Tensor:
        """Loss of one global batch, forward only; equal on every rank."""
        self._check_agreement(batch)
        with torch.no_grad():
            result = self.executor.run(batch, training=False)
        return self._sum_over_ranks([result.loss], batch.device)[0].float()

    def restore_gradients(self) -> None:
        """Put the gradients of the last `train` on the parameters."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []

    def clip(self, max_norm: float) -> None:
        """Scale the gradients to a global norm of at most `max_norm`."""
        self.reducer.clip(self._norm, max_norm)

    def _check_agreement(self, batch: RankBatch) -> float:
        """Predicted seconds of the slowest replica, after making sure that ranks agree on the batch.

        Ranks with different batches would wait for each other's messages forever, so hashes are compared first: of the
        split over the replicas on all ranks, and of each replica's placement on its ranks. One reduction does it all.
        """
        if not dist.is_initialized():
            return batch.predicted_seconds
        mine = batch.agreement
        neutral = torch.iinfo(torch.int64).min
        extremes = torch.full((3 + 2 * mine.num_replicas,), neutral, dtype=torch.int64, device=batch.device)
        extremes[:3] = torch.tensor([int(1e9 * batch.predicted_seconds), mine.split, -mine.split])
        place = 3 + 2 * mine.replica
        extremes[place : place + 2] = torch.tensor([mine.placement, -mine.placement])
        with self._waits.on("every rank to begin this step"):
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        predicted, *hashes = extremes.tolist()
        differs = [a != -b for a, b in zip(hashes[::2], hashes[1::2], strict=True)]
        if any(differs):
            what = "the samples or their split over the replicas" if differs[0] else "the assignment of a replica"
            raise TrainingError(
                f"ranks disagree on {what} in this step. Every rank must see the same dataset, plan and package "
                "versions."
            )
        return predicted / 1e9

    def _check_finite(self, loss: float, batch: RankBatch) -> bool:
        if math.isfinite(loss) and math.isfinite(self._norm):
            return False
        if self.nonfinite == "error":
            shown = ", ".join(batch.sample_ids[:8]) + (", ..." if len(batch.sample_ids) > 8 else "")
            raise TrainingError(
                f"the loss ({loss}) or the gradient norm ({self._norm}) is not finite. Samples of this step: {shown}. "
                "Lower the learning rate, look at these samples, or set nonfinite: skip in the strategy."
            )
        self.skipped_steps += 1
        return True

    def _sum_over_ranks(self, values: list[Tensor | float], device: torch.device) -> Tensor:
        values = [*values, float(self.stop_requested)]
        vector = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
        if dist.is_initialized():
            with self._waits.on("every rank to finish this step"):
                dist.all_reduce(vector)
        self.stopping = self.stopping or bool(vector[-1] > 0)
        return vector[:-1]
