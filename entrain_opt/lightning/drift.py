"""Warns while training when the data has drifted so far that another plan would be better.

The first rank notes which samples ran, and every so many steps looks at them in a background thread
(`entrain_opt.planner.drift` says how). What it finds is said at the end of a later step, and the better plan is written
beside the run, to go on with from a checkpoint.

Price: a list append per step on one rank. A judgement by the planner shares that rank's core for its seconds; only data
that moves causes one.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
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


class DriftWarning(Callback):
    """Looks for drift every so many steps, on the first rank.

    Args:
        strategy: whose plan runs.
        every: steps between two looks.
    """

    def __init__(self, strategy: EntrainStrategy, every: int) -> None:
        self._strategy, self._every = strategy, every
        self._watch: DriftWatch | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._look: Future[Drift | None] | None = None
        self._steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._strategy.is_global_zero:
            return
        found = self._strategy.resolution
        self._watch = DriftWatch(found.plan, found.samples, found.costs, self._strategy.options)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drift")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: RankBatch, batch_idx: int
    ) -> None:
        if self._watch is None or self._pool is None:
            return
        self._watch.note(batch.rows)
        self._steps += 1
        if self._look is not None and self._look.done():
            self._say(trainer)
        if self._look is None and self._steps % self._every == 0:
            self._look = self._pool.submit(self._watch.look)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._look is not None:
            self._say(trainer)
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = self._watch = self._look = None

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
