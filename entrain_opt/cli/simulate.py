"""`entrain simulate`: what a plan does under other policies and schedules, without a device."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from entrain_opt.cli.recipe import Recipe
    from entrain_opt.plan import Plan
    from entrain_opt.planner.resolve import Resolution
    from entrain_opt.report.bench import Bench, Trial


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `simulate` command to the subparsers of the main parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "simulate",
        help="compare policies and schedules on a recipe's plan, without a device",
        description="Draw global batches of a recipe's data, assign and simulate them under each policy and schedule.",
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="recipe (YAML)")
    parser.add_argument(
        "--policies", metavar="A,B", help="policies to compare (default: all but exact, which takes seconds a batch)"
    )
    parser.add_argument("--schedules", metavar="X,Y", help="schedules to compare (default: all but search)")
    parser.add_argument("--batches", type=int, default=4, metavar="N", help="global batches to draw (default: 4)")
    parser.add_argument("--seed", type=int, help="of the draws (default: the recipe's, which the planner draws with)")
    parser.add_argument("--trace", metavar="FILE", help="write the best combination's first batch for ui.perfetto.dev")
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="kept indexes, profiles and plans (default: the recipe's, runs/cache)"
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print one line per combination, the fastest that fits marked; 0 if any can run.

    Raises:
        EntrainError: an unknown policy or schedule, or what `entrain plan` raises.
    """
    from rich.console import Console

    from entrain_opt.cli.plan import resolve_recipe
    from entrain_opt.cli.recipe import read_recipe
    from entrain_opt.errors import RuntimeConfigError
    from entrain_opt.report.bench import best_trial

    recipe = read_recipe(arguments.config)
    # A table of eleven columns: a pipe or file has no width of its own.
    console = Console(width=None if sys.stdout.isatty() else 150)
    if arguments.batches < 1:
        raise RuntimeConfigError(f"--batches: expected at least 1, found {arguments.batches}.")
    policies, schedules = chosen_names(arguments.policies, arguments.schedules)
    found = resolve_recipe(recipe, cache_dir=arguments.cache_dir or recipe.cache_dir, console=console)
    schedules = schedules or default_schedules(found.plan)
    seed = recipe.options.seed if arguments.seed is None else arguments.seed
    bench = make_bench(found, recipe, num_batches=arguments.batches, seed=seed)
    trials = run_trials(bench, [(p, s, bench.plan.num_microbatches) for p in policies for s in schedules], console)
    best = best_trial(trials)
    console.print(trials_table(trials, bench, best))
    console.print(
        f"{arguments.batches} random global batches of {recipe.global_batch_size} samples (seed {seed}), "
        f"{found.costs.source} costs, all {found.plan.degrees.data} replicas played through. x bound: pipeline time "
        "over what no schedule of that assignment can beat. max/mean: of the microbatches' loads. capped: fits in "
        "memory only with limits on what is in flight, which cost time; too much: not even then.",
        soft_wrap=True,
        highlight=False,
    )
    if best is None:
        console.print("No combination can run under this plan's memory limits.")
        return 1
    if arguments.trace:
        chosen = trials[best]
        bench.timeline(0, chosen.policy, chosen.schedule).write_trace(Path(arguments.trace))
        console.print(
            f"Trace of {chosen.policy}, {chosen.schedule}, first batch, written to {arguments.trace}: open it at "
            "ui.perfetto.dev.",
            soft_wrap=True,
            highlight=False,
        )
    return 0


def chosen_names(policies: str | None, schedules: str | None) -> tuple[list[str], list[str]]:
    """Names from comma-separated lists; for None all policies, and no schedules.

    Raises:
        RuntimeConfigError: a name that does not exist.
    """
    from entrain_opt.assigner import POLICIES
    from entrain_opt.errors import RuntimeConfigError
    from entrain_opt.schedule import ORDERS

    def names(flag: str, text: str | None, known: tuple[str, ...], default: list[str]) -> list[str]:
        if text is None:
            return default
        asked = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        for name in asked:
            if name not in known:
                raise RuntimeConfigError(f"{flag}: expected names from {', '.join(known)}, found {name!r}.")
        if not asked:
            raise RuntimeConfigError(f"{flag}: expected names from {', '.join(known)}, found none.")
        return asked

    return (
        names("--policies", policies, tuple(POLICIES), [name for name in POLICIES if name != "exact"]),
        names("--schedules", schedules, ORDERS, []),
    )


def default_schedules(plan: Plan) -> list[str]:
    """Every order but `search`, which takes seconds per replica; `interleaved` only if it differs from 1f1b."""
    from entrain_opt.schedule import FIXED_ORDERS

    chunked = any(len(plan.pipeline_shape.stages_of_rank(rank)) > 1 for rank in range(plan.degrees.pipeline))
    return [name for name in FIXED_ORDERS if chunked or name != "interleaved"]


def make_bench(found: Resolution, recipe: Recipe, *, num_batches: int, seed: int) -> Bench:
    """A bench of a plan on random global batches."""
    from entrain_opt.planner.limits import memory_limit
    from entrain_opt.report.bench import Bench, draw_batches

    rows = draw_batches(found.samples, recipe.global_batch_size, num_batches, seed=seed)
    limit = memory_limit(found.costs, recipe.options.memory_bytes)
    return Bench(found.plan, found.samples, found.costs, rows, limit_bytes=limit)


def run_trials(bench: Bench, combinations: list[tuple[str, str, int]], console: Console) -> list[Trial]:
    """The trials of (policy, schedule, microbatches), with a progress bar on a terminal."""
    from rich.progress import track

    return [
        bench.trial(policy, schedule, count)
        for policy, schedule, count in track(
            combinations, description="Simulating", console=console, transient=True, disable=not console.is_terminal
        )
    ]


def trials_table(trials: list[Trial], bench: Bench, best: int | None) -> Table:
    """One line per trial; the best one bold, with a star."""
    from rich.table import Table

    from entrain_opt.units import format_bytes, format_seconds

    degrees = bench.plan.degrees
    devices = "" if degrees.replica_size == degrees.pipeline else f" of {degrees.replica_size} devices in all"
    table = Table(
        title=f"{bench.plan.model}: {degrees.data} x {degrees.pipeline} ranks{devices}, up to "
        f"{bench.plan.num_microbatches} "
        f"microbatches, {format_bytes(bench.limit_bytes)} per rank",
        title_justify="left",
    )
    columns = ("", "policy", "schedule", "step", "bubble", "x bound", "encoder\nmax/mean", "LLM\nmax/mean")
    for column in (*columns, "deferred\nsamples", "peak", "samples/s"):
        table.add_column(column, justify="left" if column in ("", "policy", "schedule") else "right")
    for index, trial in enumerate(trials):
        mark = "*" if index == best else " "
        cells = [mark, trial.policy, trial.schedule]
        if not math.isfinite(trial.step_seconds):
            cells += ["cannot run"] + [""] * 7
        else:
            peak = format_bytes(trial.peak_bytes)
            cells += [
                format_seconds(trial.step_seconds),
                f"{trial.bubble_share:.1%}",
                f"{trial.times_bound:.3f}",
                f"{trial.encoder_imbalance:.2f}",
                f"{trial.llm_imbalance:.2f}",
                f"{trial.deferred_samples:,.0f}",
                peak + (" too much" if trial.failure else " capped" if trial.capped else ""),
                f"{trial.samples_per_second:,.4g}",
            ]
        table.add_row(*cells, style="bold" if index == best else "dim" if trial.failure else None)
    failures = dict.fromkeys(f"{t.policy}, {t.schedule}: {t.failure}" for t in trials if not t.has_run)
    if failures:
        table.caption = "\n".join(failures)
        table.caption_justify = "left"
    return table
