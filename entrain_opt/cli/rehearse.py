"""`entrain rehearse`: a plan's real processes, schedule and messages, waiting instead of computing.

Nothing trains and no checkpoint is written. The recipe's trainer section says what devices the plan is for; the run
itself is on this machine's CPU, with one process per rank of the replicas that are rehearsed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entrain_opt.cli.recipe import Recipe
    from entrain_opt.planner.resolve import Resolution


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `rehearse` command to the subparsers of the main parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "rehearse",
        help="run a recipe's plan with waits instead of computations (emulated)",
        description="Start the processes of a plan, run its schedule with real messages, and wait for the predicted "
        "time of each forward and backward: what does the runtime add to the simulator's time?",
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="recipe (YAML); its data may be a trace")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="replicas of the plan to run (default: 1)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps to run (default: 4)")
    parser.add_argument(
        "--scale",
        type=float,
        metavar="X",
        help="wall seconds per predicted second (default: so that actions take 20 ms)",
    )
    parser.add_argument("--output", metavar="DIR", help="for the emulated metrics (default: runs/<recipe>/emulated)")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Rehearse and print each step's time beside the simulator's; 0 on success.

    Raises:
        EntrainError: what `entrain plan` raises, or an argument that cannot be.
    """
    from rich.console import Console

    from entrain_opt.cli.packages import refuse_compromised
    from entrain_opt.cli.plan import resolve_recipe
    from entrain_opt.cli.recipe import read_recipe
    from entrain_opt.errors import RuntimeConfigError

    refuse_compromised()
    recipe, console = read_recipe(arguments.config), Console(soft_wrap=True, highlight=False)
    for name in ("replicas", "steps"):
        if getattr(arguments, name) < 1:
            raise RuntimeConfigError(f"--{name}: expected at least 1, found {getattr(arguments, name)}.")
    # Processes that the first one started find its plan in the cache.
    found = resolve_recipe(recipe, cache_dir=recipe.cache_dir, console=console)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    num_ranks = arguments.replicas * found.plan.degrees.pipeline
    if is_first:
        console.print(
            f"EMULATED: {recipe.model_folder}, {arguments.replicas} of {found.plan.degrees.data} replicas x "
            f"{found.plan.degrees.pipeline} pipeline ranks for {recipe.options.device} as {num_ranks} waiting "
            "processes on this CPU. Nothing is computed, trained or saved."
        )
    steps, scale = _rehearse(recipe, found, arguments, num_ranks)
    if is_first:
        for number, (measured, predicted) in enumerate(steps):
            console.print(
                f"emulated step {number}: {measured:.3f} s, simulated {predicted:.3f} s, "
                f"ratio {measured / predicted:.3f}"
            )
        console.print(f"one predicted second took {scale:.3g} s. Metrics in {_output(recipe, arguments)}")
    return 0


def _output(recipe: Recipe, arguments: argparse.Namespace) -> Path:
    return Path(arguments.output) if arguments.output else Path("runs") / recipe.name / "emulated"


def _rehearse(
    recipe: Recipe, found: Resolution, arguments: argparse.Namespace, num_ranks: int
) -> tuple[list[tuple[float, float]], float]:
    """Predicted-time seconds of each step, measured and simulated; and the scale."""
    import pytorch_lightning as pl
    from pytorch_lightning.loggers import CSVLogger

    from entrain_opt.cli.fit import quiet_lightning
    from entrain_opt.lightning import EntrainStrategy, MultimodalDataModule, MultimodalModule
    from entrain_opt.lightning.emulation import Emulation

    emulation = Emulation(
        num_nodes=recipe.num_nodes,
        devices_per_node=recipe.devices_per_node,
        replicas=arguments.replicas,
        scale=arguments.scale,
    )
    strategy = EntrainStrategy(plan=recipe.plan, emulate=emulation, cache_dir=recipe.cache_dir)
    strategy.plan_options = recipe.options
    quiet_lightning()
    steps: list[tuple[float, float]] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            values = trainer.callback_metrics
            names = ("emulated_step_seconds", "emulated_predicted_step_seconds")
            steps.append((float(values[names[0]]), float(values[names[1]])))

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        max_steps=arguments.steps,
        strategy=strategy,
        precision=recipe.options.precision,  # type: ignore[arg-type]
        logger=CSVLogger(_output(recipe, arguments).parent, name=_output(recipe, arguments).name),
        callbacks=[Watch()],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
    )
    module = MultimodalModule(recipe.model_folder, frozen=list(recipe.frozen))
    data = MultimodalDataModule(recipe.dataset, recipe.global_batch_size, bad_samples=recipe.bad_samples)
    trainer.fit(module, datamodule=data)
    assert strategy.rehearsal is not None
    return steps, strategy.rehearsal.scale
