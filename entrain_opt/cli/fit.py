"""`entrain fit` and `entrain validate`: LightningCLI, with the plan shown before any other process starts.

The recipe, the data and the plan are checked in the first process, so that a mistake is one message in seconds instead
of a failure on every rank.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.utilities import rank_zero_only
from rich.console import Console

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.lightning.flags import check_trainer
from entrain_opt.lightning.preemption import EXIT_CODE, Preempted
from entrain_opt.lightning.resolution import resolve_run
from entrain_opt.lightning.strategy import EntrainStrategy


class EntrainCLI(LightningCLI):
    """LightningCLI whose commands begin with the plan."""

    def before_fit(self) -> None:
        self._prepare()

    def before_validate(self) -> None:
        if getattr(self.datamodule, "validation_dataset", None) is None:
            raise RuntimeConfigError(
                "data.validation_dataset: expected a data set to validate on, found none. Name one in the recipe, or "
                "with --data.validation_dataset FILE."
            )
        self._prepare()

    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            self._say_where_results_lie()

    def _prepare(self) -> None:
        """In the first process only: check everything, resolve the plan, print it."""
        strategy = self.trainer.strategy
        if not isinstance(strategy, EntrainStrategy):
            raise RuntimeConfigError(
                f"trainer.strategy: expected entrain_opt.EntrainStrategy, found {type(strategy).__name__}."
            )
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            return
        from entrain_opt.planner.limits import memory_limit
        from entrain_opt.planner.table import plan_table

        check_trainer(self.trainer)
        console = Console()
        console.print(f"Preparing the plan (cached in {strategy.cache_dir}) ...", highlight=False)
        found = resolve_run(strategy, self.trainer, self.model, self.datamodule, progress=True)
        limit = memory_limit(found.costs, strategy.options.memory_bytes)
        console.print(plan_table(found.plan, limit_bytes=limit))
        output = Path(self.trainer.default_root_dir) / "plan.yaml"
        found.plan.write(output)
        console.print(f"Plan ({found.source}) written to {output}", highlight=False, soft_wrap=True)

    def _say_where_results_lie(self) -> None:
        console = Console()
        # Not trainer.log_dir, which asks the other ranks; they may be gone by now.
        log_dir = getattr(self.trainer.logger, "log_dir", None) or self.trainer.default_root_dir
        console.print(f"Metrics in {log_dir}", highlight=False, soft_wrap=True)
        checkpoint: Any = self.trainer.checkpoint_callback
        best = checkpoint.best_model_path if checkpoint is not None else ""
        if best:
            console.print(f"Checkpoint {best}", highlight=False, soft_wrap=True)
            console.print(f"  entrain export {best} OUT", highlight=False, soft_wrap=True)


def quiet_lightning() -> None:
    """Silence warnings of Lightning that mislead here."""
    # Lightning's advice for loaders of samples (ours yields global batches), and about its own internals.
    silenced = (
        "does not have many workers",
        "number of training batches",
        "Total length of `list`",
        "treespec",
        "sync_dist",
    )
    for message in silenced:
        warnings.filterwarnings("ignore", message=f".*{message}.*")


def run_lightning(arguments: Sequence[str]) -> int:
    """Run `fit` or `validate` with LightningCLI; returns the exit code: 0, or 143 after SIGTERM.

    Raises:
        EntrainError: from our own checks, on every rank.
    """
    quiet_lightning()
    try:
        EntrainCLI(
            # LightningCLI warns about arguments that are not the process's own.
            args=None if list(arguments) == sys.argv[1:] else list(arguments),
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"use_distributed_sampler": False},
            parser_kwargs={"prog": "entrain"},
        )
    except Preempted as stopped:
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            print(f"entrain: {stopped}", file=sys.stderr, flush=True)
        return EXIT_CODE
    return 0
