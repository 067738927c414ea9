"""A scheduler takes the machines away: save at the next step's end, then stop.

A signal reaches the ranks at different moments, some of them in the middle of a message. So its handler only leaves a
mark; the marks are added up in a reduction that every step has anyway, and all ranks stop after the same step.

Promise: after SIGTERM the run ends after the current step (or validation batch) with a checkpoint and exit code 143
(128 + SIGTERM), as a shell reports a terminated process. Under SLURM with automatic requeue, Lightning's own handler of
the requeue signal runs at that point instead of in the middle of a step.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.plugins.environments import SLURMEnvironment

from entrain_opt.errors import EntrainError

if TYPE_CHECKING:
    from entrain_opt.lightning.strategy import EntrainStrategy

EXIT_CODE = 128 + signal.SIGTERM


class Preempted(EntrainError):
    """The run was told to end, and has ended in order; the message says how to go on."""


class PreemptionGuard(Callback):
    """Ends a run in order after SIGTERM.

    Args:
        strategy: whose runner agrees on the stop with the other ranks.
    """

    def __init__(self, strategy: EntrainStrategy) -> None:
        self._strategy = strategy
        self._previous: dict[int, Any] = {}
        self._received: int | None = None
        self._saved: Path | None = None

    # Lightning sets its own handlers right before the first of these; they would stop this rank alone.

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._install(trainer)
        self._stop_if_saved()

    def _install(self, trainer: pl.Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Only the main thread may set handlers; the process then ends as Python does by itself.
        signals: list[int] = [signal.SIGTERM]
        environment = self._strategy.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
            signals.append(environment.requeue_signal)
        for number in signals:
            if signal.getsignal(number) != self._mark:
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self._mark)

    def _mark(self, number: int, _: Any) -> None:
        self._received = number
        self._strategy.request_stop()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._strategy.runner.stopping and self._saved is None:
            self._save(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stop_if_saved()  # Here, not at the end of the last step, so that its metrics are logged.

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not self._strategy.runner.stopping:
            return
        if trainer.state.fn == "fit" and trainer.global_step > 0:
            self._save(trainer)
            self._stop_if_saved()
        raise Preempted("stopped by a signal; nothing was saved, because there was nothing new.")

    def _save(self, trainer: pl.Trainer) -> None:
        if self._strategy.emulate is not None:
            raise Preempted("stopped by a signal; an emulated run saves nothing.")
        self._strategy.writer.background = False  # Nothing trains on while it is written.
        # The signal may not have reached every rank yet, and all must write to one path.
        if self._strategy.reduce_boolean_decision(self._received not in (None, signal.SIGTERM), all=False):
            number = self._strategy.cluster_environment.requeue_signal  # type: ignore[union-attr]
            self._previous[number](number, None)  # Lightning's: saves, and asks SLURM to queue the job again.
            raise Preempted("stopped by the requeue signal; saved, and SLURM was asked to queue the job again.")
        found: Any = trainer.checkpoint_callback
        folder = Path(found.dirpath) if found is not None and found.dirpath else Path(trainer.default_root_dir)
        path = folder / f"preempted-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        self._saved = path

    def _stop_if_saved(self) -> None:
        if self._saved is not None:
            raise Preempted(f"stopped by a signal; saved {self._saved}. Go on with --ckpt_path {self._saved}")
