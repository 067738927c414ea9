"""`entrain profile`: measure the layers of a recipe's model on this machine and keep the result."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from entrain_opt.cost import MeasuredCosts


_PASSES = {
    "forward": "forward",
    "backward": "backward",
    "input_backward": "inputs only",
    "split_backward": "in two parts",
}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `profile` command to the subparsers of the main parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "profile",
        help="measure the model's layers on this machine",
        description="Time real layers forward and backward, fit the cost lines and keep them for `entrain plan`.",
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="recipe (YAML)")
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="where the profile is kept (default: the recipe's, runs/cache)"
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measure anew, print coefficients and residuals and say where they lie; 0 on success.

    Raises:
        RuntimeConfigError: the recipe or model cannot be measured here.
    """
    from rich.console import Console

    from entrain_opt.cli.plan import measurement
    from entrain_opt.cli.recipe import read_recipe
    from entrain_opt.planner.resolve import measured_costs_path

    recipe, console = read_recipe(arguments.config), Console()
    measured = measurement(recipe, console)()
    path = measured_costs_path(
        recipe.model_folder,
        recipe.options.cluster(recipe.num_nodes, recipe.devices_per_node),
        frozen=recipe.frozen,
        options=recipe.options,
        cache_dir=arguments.cache_dir or recipe.cache_dir,
    )
    measured.write(path)
    console.print(profile_table(measured))
    console.print(f"Written to {path}", soft_wrap=True, highlight=False)
    return 0


def profile_table(measured: MeasuredCosts) -> Table:
    """Coefficients in microseconds, and how far the fit is from the points."""
    from rich.table import Table

    from entrain_opt.units import format_bytes, format_seconds

    table = Table(title=f"{measured.model} on {measured.device}, {measured.precision}")
    for column in (
        "module",
        "piece",
        "pass",
        "us / 1,000 squares",
        "us / token",
        "us / segment",
        "us fixed",
        "error",
    ):
        table.add_column(column, justify="left" if column in ("module", "piece", "pass") else "right")
    for module, costs in measured.modules.items():
        for piece in ("input", "layer", "output"):
            for direction in _PASSES:
                line = getattr(getattr(costs, piece), direction)
                name = f"{module} {piece} {direction}"
                if name not in measured.residuals:
                    continue
                table.add_row(
                    module,
                    piece,
                    _PASSES[direction],
                    _number(1e9 * line.square_seconds),
                    _number(1e6 * line.token_seconds),
                    _number(1e6 * line.segment_seconds),
                    _number(1e6 * line.fixed_seconds),
                    f"{measured.residuals[name]:.1%}",
                )
    messages = "messages not measured"
    if measured.message_bytes_per_second is not None and measured.message_latency_seconds is not None:
        messages = (
            f"messages {format_seconds(measured.message_latency_seconds)} + "
            f"{format_bytes(measured.message_bytes_per_second)}/s"
        )
    table.caption = (
        f"{messages}; AdamW {1e9 * measured.step_seconds_per_parameter:.2f} ns per parameter; "
        f"{format_seconds(measured.action_seconds)} per action; {measured.num_processes_busy} processes busy, "
        f"{measured.num_threads} thread(s) each, torch {measured.torch_version}; took "
        f"{format_seconds(measured.seconds_spent)}"
    )
    return table


def _number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
