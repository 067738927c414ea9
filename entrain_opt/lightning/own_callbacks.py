"""The callbacks that every run under `EntrainStrategy` has, whatever the recipe says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytorch_lightning as pl

from entrain_opt.lightning.drift import DriftWarning, check_interval
from entrain_opt.lightning.preemption import PreemptionGuard
from entrain_opt.lightning.tracing import StepTracer, check_steps

if TYPE_CHECKING:
    from entrain_opt.lightning.strategy import EntrainStrategy


def check_options(strategy: EntrainStrategy) -> None:
    """Raise RuntimeConfigError for what the strategy asks of them and cannot be."""
    check_steps(strategy.trace_steps)
    check_interval(strategy.drift_check_steps)


def add_callbacks(strategy: EntrainStrategy, trainer: pl.Trainer) -> None:
    """Put them before those of the recipe; a second call changes nothing."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, PreemptionGuard) for callback in callbacks):
        return
    # The guard saves before another callback ends the step; the tracer sees the step's end before anyone works on it.
    mine: list[pl.Callback] = [PreemptionGuard(strategy)]
    if strategy.trace_steps:
        mine.insert(0, StepTracer(strategy, strategy.trace_steps))
    if strategy.drift_check_steps:
        mine.append(DriftWarning(strategy, strategy.drift_check_steps))
    callbacks[:0] = mine
