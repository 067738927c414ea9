"""A measured trace of chosen steps: what every rank did, beside what the simulator said of the step.

Every rank notes its spans while such a step runs (`entrain_opt.runtime.spans`; of devices that share layers, the first
one does); after it they are gathered, and the first rank writes one file per step, `traces/step-N.json` under the run's
folder, for ui.perfetto.dev. Steps are numbered as in the logged metrics: the first is 0.

Price: steps that are not chosen pay nothing but the simulated timeline that their batch carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.batches import RankBatch
from entrain_opt.runtime.spans import RankTrace, SpanLog, merged_events, now, rank_trace
from entrain_opt.simulator.trace import write_events

if TYPE_CHECKING:
    from entrain_opt.lightning.strategy import EntrainStrategy


def check_steps(steps: Sequence[int]) -> None:
    """Raise RuntimeConfigError for steps that cannot be."""
    if any(not isinstance(step, int) or step < 0 for step in steps):
        raise RuntimeConfigError(f"trace_steps: expected step numbers from 0, found {list(steps)}.")


class StepTracer(Callback):
    """Traces chosen steps of a run.

    Args:
        strategy: whose ranks run them.
        steps: numbers of the steps.
    """

    def __init__(self, strategy: EntrainStrategy, steps: Sequence[int]) -> None:
        self._strategy = strategy
        self._left = set(steps)
        self._step: int | None = None
        self._optimizer_began: float | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: RankBatch, batch_idx: int
    ) -> None:
        if trainer.global_step in self._left:
            self._step, self._optimizer_began = trainer.global_step, None
            groups = self._strategy.groups
            groups.waits.spans = SpanLog() if groups.tensor.place == 0 else None

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._optimizer_began = now()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: RankBatch, batch_idx: int
    ) -> None:
        if self._step is None:
            return
        ended, strategy = now(), self._strategy
        groups, shape = strategy.groups, strategy.plan.pipeline_shape
        log, groups.waits.spans = groups.waits.spans, None
        mine: RankTrace | None = None
        if log is not None:
            if self._optimizer_began is not None:
                log.stepped(shape.stages_of_rank(groups.pipeline_rank), self._optimizer_began, ended)
            scale = 1.0 if strategy.rehearsal is None else strategy.rehearsal.scale
            mine = rank_trace(
                log, replica=groups.replica, rank=groups.pipeline_rank, predicted=batch.timeline, scale=scale
            )
        traces: list[RankTrace | None] = [mine] * strategy.world_size
        if dist.is_initialized():
            with groups.waits.on("the spans of every rank"):
                dist.all_gather_object(traces, mine)
        if strategy.is_global_zero:
            path = Path(trainer.default_root_dir) / "traces" / f"step-{self._step}.json"
            write_events(merged_events([one for one in traces if one is not None], shape), path)
            rank_zero_info(f"Trace of step {self._step}, measured and simulated: {path} (open it at ui.perfetto.dev)")
        self._left.discard(self._step)
        self._step = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._left:
            missed = ", ".join(map(str, sorted(self._left)))
            rank_zero_warn(f"trace_steps: the run ended before step {missed}; no trace was written of it.")
