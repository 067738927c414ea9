"""`entrain report`: what a recipe's plan does, as one self-contained HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `report` command to the subparsers of the main parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="write one HTML page about a recipe's plan",
        description="Play a recipe's plan through and write its timeline, waiting, memory and alternatives as one page "
        "that needs no network.",
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="recipe (YAML)")
    parser.add_argument("--output", metavar="FILE", help="page to write (default: runs/<recipe name>/report.html)")
    parser.add_argument("--policies", metavar="A,B", help="policies of the what-if table (default: all)")
    parser.add_argument("--schedules", metavar="X,Y", help="schedules of the what-if table (default: all but search)")
    parser.add_argument("--batches", type=int, default=3, metavar="N", help="global batches to draw (default: 3)")
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="kept indexes, profiles and plans (default: the recipe's, runs/cache)"
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Write the page and say where it lies; 0 on success.

    Raises:
        EntrainError: an unknown policy or schedule, or what `entrain plan` raises.
    """
    from rich.console import Console

    from entrain_opt.cli.plan import resolve_recipe
    from entrain_opt.cli.recipe import read_recipe
    from entrain_opt.cli.simulate import chosen_names, default_schedules, make_bench
    from entrain_opt.errors import RuntimeConfigError
    from entrain_opt.report.content import build_content
    from entrain_opt.report.page import write_page
    from entrain_opt.units import format_bytes

    recipe, console = read_recipe(arguments.config), Console()
    if arguments.batches < 1:
        raise RuntimeConfigError(f"--batches: expected at least 1, found {arguments.batches}.")
    policies, schedules = chosen_names(arguments.policies, arguments.schedules)
    found = resolve_recipe(recipe, cache_dir=arguments.cache_dir or recipe.cache_dir, console=console)
    seed = recipe.options.seed
    bench = make_bench(found, recipe, num_batches=arguments.batches, seed=seed)
    with console.status("Report") as status:
        content = build_content(
            bench,
            found.samples,
            name=recipe.name,
            policies=policies,
            schedules=schedules or default_schedules(found.plan),
            seed=seed,
            progress=lambda text: status.update(f"Report: {text}"),
        )
    output = Path(arguments.output) if arguments.output else Path("runs") / recipe.name / "report.html"
    size, library = write_page(content, output)
    console.print(content.sentence, soft_wrap=True, highlight=False)
    console.print(
        f"Written to {output} ({format_bytes(size)}, {format_bytes(library)} of it plotly.js). Open it in a browser.",
        soft_wrap=True,
        highlight=False,
    )
    return 0
