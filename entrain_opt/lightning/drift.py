"""Warns while training when the data has drifted so far that another plan would be better.

The first rank notes which samples ran, and every so many steps looks at them in a background thread
(`entrain_opt.planner.drift` says how). What it finds is said at the end of a later step, and the better plan is written
beside the run, to go on with from a checkpoint.

Price: a list append per step on one rank. A judgement by the planner shares that rank's core for its seconds; only data
that moves causes one.
"""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.utilities import rank_zero_warn

from entrain_opt.errors import EntrainError, RuntimeConfigError
from entrain_opt.planner.drift import Drift, DriftWatch
from entrain_opt.runtime.batches import RankBatch

if TYPE_CHECKING:
    from entrain_opt.lightning.strategy import EntrainStrategy


def check_interval(steps: int) -> None:
    """Raise RuntimeConfigError for a number of steps that cannot be."""
    if not isinstance(steps, int) or steps < 0:
        raise RuntimeConfigError(f"drift_check_steps: expected a whole number of at least 0, found {steps!r}.")


class _Look(Thread):
    """One look in the background; the process does not wait for it at its exit."""

    def __init__(self, watch: DriftWatch) -> None:
        super().__init__(name="drift", daemon=True)
        self._watch = watch
        self._drift: Drift | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._drift = self._watch.look()
        except BaseException as error:  # Raised where the result is asked for.
            self._error = error

    def result(self) -> Drift | None:
        """What was found, once the thread has ended."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._drift


class DriftWarning(Callback):
    """Looks for drift every so many steps, on the first rank.

    Args:
        strategy: whose plan runs.
        every: steps between two looks.
    """

    def __init__(self, strategy: EntrainStrategy, every: int) -> None:
        self._strategy, self._every = strategy, every
        self._watch: DriftWatch | None = None
        self._look: _Look | None = None
        self._steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._strategy.is_global_zero:
            return
        found = self._strategy.resolution
        self._watch = DriftWatch(found.plan, found.samples, found.costs, found.options)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: RankBatch, batch_idx: int
    ) -> None:
        if self._watch is None:
            return
        self._watch.note(batch.rows)
        self._steps += 1
        if self._look is not None and not self._look.is_alive():
            self._say(trainer)
        if self._look is None and self._steps % self._every == 0:
            self._look = _Look(self._watch)
            self._look.start()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._look is not None:
            self._say(trainer)
        self._watch = None

    def _say(self, trainer: pl.Trainer) -> None:
        """Wait for the look's result, if need be, and warn if there is one."""
        assert self._look is not None
        look, self._look = self._look, None
        try:
            drift = look.result()
        except EntrainError as error:  # The planner found nothing for the new data; training goes on as it is.
            rank_zero_warn(f"looking for a better plan for the newest samples failed: {error}")
            return
        if drift is None:
            return
        path = Path(trainer.default_root_dir) / f"plan-step-{trainer.global_step}.yaml"
        drift.plan.write(path)
        rank_zero_warn(f"{drift.sentence()} Written to {path}; to change, go on from a checkpoint with plan: {path}.")
