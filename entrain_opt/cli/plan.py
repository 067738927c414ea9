"""`entrain plan`: solve the plan of a recipe (or of flags), show it and write it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrain_opt.plan import to_plain

if TYPE_CHECKING:
    from rich.console import Console

    from entrain_opt.cli.recipe import Recipe
    from entrain_opt.cost import MeasuredCosts
    from entrain_opt.planner.resolve import Resolution


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `plan` command to the subparsers of the main parser."""
    from entrain_opt.cli.plan_arguments import add_arguments

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="choose the parallel configuration of a recipe, or of flags",
        description="Index the data, take or measure costs, solve for the best configuration and write plan.yaml.",
    )
    add_arguments(parser)
    parser.add_argument("--output", metavar="FILE", help="plan to write (default: runs/<recipe name>/plan.yaml)")
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="kept indexes, profiles and plans (default: the recipe's, runs/cache)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON and nothing else")
    parser.add_argument(
        "--what-if",
        nargs="+",
        default=[],
        metavar="KEY=VALUE,...",
        help="compare with device=NAME,... devices=N,... frozen=none,PART+PART,... tensor=N+N,... context=N+N,... (all "
        "combinations)",
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Make the plan, print it and say where it lies; 0 on success.

    Raises:
        EntrainError: see `entrain_opt.planner.resolve.resolve`.
    """
    from rich.console import Console

    from entrain_opt.cli.plan_arguments import asked_recipe
    from entrain_opt.cli.what_if import compare, comparison_table, parse_changes, plain_cases
    from entrain_opt.planner.limits import memory_limit
    from entrain_opt.planner.stability import plan_stability
    from entrain_opt.planner.table import plan_table

    recipe, changes = asked_recipe(arguments), parse_changes(arguments.what_if)
    # A file or pipe has no width of its own.
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(stderr=arguments.json, width=None if has_width else 150)
    found = resolve_recipe(recipe, cache_dir=arguments.cache_dir or recipe.cache_dir, console=console)
    output = Path(arguments.output) if arguments.output else Path("runs") / recipe.name / "plan.yaml"
    found.plan.write(output)
    cases = compare(recipe, changes, found.samples) if changes else []
    if arguments.json:
        print(json.dumps({"plan": to_plain(found.plan), "written_to": str(output), "what_if": plain_cases(cases)}))
        return 0
    console.print(workload_line(recipe, found), soft_wrap=True, highlight=False)
    limit = memory_limit(found.costs, recipe.options.memory_bytes)
    console.print(plan_table(found.plan, limit_bytes=limit))
    stability = plan_stability(found.plan, found.samples, found.costs, seed=recipe.options.seed)
    console.print(stability.sentence(), soft_wrap=True, highlight=False)
    for line in stability.split_lines(found.plan.encoder_modules):
        console.print(line, soft_wrap=True, highlight=False)
    how = {"solved": "Solved", "cached": "Unchanged inputs, taken from the cache", "file": f"Read from {recipe.plan}"}
    console.print(f"{how[found.source]}. Written to {output}", soft_wrap=True, highlight=False)
    if cases:
        console.print(comparison_table(cases))
    return 0


def resolve_recipe(recipe: Recipe, *, cache_dir: str | Path, console: Console) -> Resolution:
    """The plan of a recipe; says so before it measures."""
    from entrain_opt.planner.resolve import resolve

    return resolve(
        model_folder=recipe.model_folder,
        dataset=recipe.dataset,
        global_batch_size=recipe.global_batch_size,
        num_nodes=recipe.num_nodes,
        devices_per_node=recipe.devices_per_node,
        frozen=recipe.frozen,
        options=recipe.options,
        plan=recipe.plan,
        bad_samples=recipe.bad_samples,
        cache_dir=cache_dir,
        progress=True,
        measure=measurement(recipe, console),
    )


def measurement(recipe: Recipe, console: Console) -> Callable[[], MeasuredCosts]:
    """A function that measures the costs of a recipe's model here."""

    def measure() -> MeasuredCosts:
        from entrain_opt.planner.resolve import busy_processes
        from entrain_opt.runtime.measure import measure_costs

        options = recipe.options
        busy = busy_processes(options.cluster(recipe.num_nodes, recipe.devices_per_node))
        console.print(
            f"Measuring the layers of {recipe.model_folder} with {busy} process{'es' * (busy > 1)} at once (about ten "
            "seconds, kept for the next time) ...",
            soft_wrap=True,
            highlight=False,
        )
        return measure_costs(
            recipe.model_folder,
            frozen=recipe.frozen,
            num_processes_busy=busy,
            precision=options.precision,
            device="cpu" if options.device == "cpu" else "cuda",
        )

    return measure


def workload_line(recipe: Recipe, found: Resolution) -> str:
    """The data in one line."""
    samples = found.samples
    tokens, patches = samples.total_tokens, samples.sum_media(samples.media_patches)
    return (
        f"{recipe.dataset}: {len(samples):,} samples, {samples.num_media:,} media; per sample {tokens.mean():,.0f} "
        f"tokens (at most {tokens.max():,}) and {patches.mean():,.0f} patches (at most {patches.max():,.0f})"
    )
