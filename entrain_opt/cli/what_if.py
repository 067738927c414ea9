"""`entrain plan --what-if`: other devices, numbers of devices, frozen parts and degrees beside the plan asked for.

Every combination of the values given is planned with analytic costs, also the one asked for, so that rows can be
compared. What does not fit keeps its row, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from entrain_opt.cli.plan_arguments import split_into_nodes
from entrain_opt.cli.recipe import Recipe
from entrain_opt.errors import EntrainError, RuntimeConfigError
from entrain_opt.plan import Plan
from entrain_opt.planner.options import device_options
from entrain_opt.planner.solve import solve_plan
from entrain_opt.spec.model import ModelSpec
from entrain_opt.units import format_bytes, format_seconds
from entrain_opt.workload.samples import SampleTable

if TYPE_CHECKING:
    from rich.table import Table

_DEGREES = ("tensor", "context")
_KEYS = ("device", "devices", "frozen", *_DEGREES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row: a recipe and what became of it.

    Attributes:
        recipe: with the changes.
        plan: None where there is none.
        failure: why there is none.
    """

    recipe: Recipe
    plan: Plan | None = None
    failure: str = ""

    @property
    def num_devices(self) -> int:
        return self.recipe.num_nodes * self.recipe.devices_per_node

    @property
    def device_hours(self) -> float | None:
        """Per million samples."""
        if self.plan is None or self.plan.predicted is None:
            return None
        return self.num_devices / self.plan.predicted.samples_per_second * 1e6 / 3600


def parse_changes(texts: Sequence[str]) -> dict[str, list[str]]:
    """`device=A,B`, `devices=32,64`, `frozen=none,vision_tower+projector`, `context=1,1+2+4` as key -> values.

    Raises:
        RuntimeConfigError: an unknown key, or no value.
    """
    changes: dict[str, list[str]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        found = [value for value in values.split(",") if value]
        if key not in _KEYS or not found:
            raise RuntimeConfigError(
                f"--what-if: expected one of {', '.join(f'{name}=VALUE,...' for name in _KEYS)}, found {text!r}."
            )
        changes.setdefault(key, []).extend(found)
    return changes


def compare(recipe: Recipe, changes: dict[str, list[str]], samples: SampleTable) -> list[Case]:
    """The recipe's own case, then every combination of the changes."""
    recipe = replace(recipe, options=replace(recipe.options, cost_model="analytic"))
    keys = [key for key in _KEYS if key in changes]
    cases = [recipe]
    for values in product(*(changes[key] for key in keys)):
        changed = recipe
        for key, value in zip(keys, values, strict=True):
            changed = _changed(changed, key, value)
        if changed not in cases:
            cases.append(changed)
    return [_solve(case, samples) for case in cases]


def _changed(recipe: Recipe, key: str, value: str) -> Recipe:
    if key == "device":
        return replace(recipe, options=replace(recipe.options, **{"memory_bytes": None} | device_options(value)))
    if key == "frozen":
        return replace(recipe, frozen=() if value == "none" else tuple(value.split("+")))
    if key in _DEGREES:
        degrees = value.split("+")
        if not all(degree.isdigit() and int(degree) >= 1 for degree in degrees):
            raise RuntimeConfigError(f"--what-if {key}: expected degrees to consider, like 1+2+4, found {value!r}.")
        allowed = tuple(dict.fromkeys(map(int, degrees)))
        options = recipe.options
        if key == "tensor":
            return replace(recipe, options=replace(options, tensor_degrees=allowed))
        return replace(recipe, options=replace(options, context_degrees=allowed))
    if not value.isdigit() or int(value) < 1:
        raise RuntimeConfigError(f"--what-if devices: expected whole numbers of at least 1, found {value!r}.")
    num_nodes, per_node = split_into_nodes(int(value), recipe.devices_per_node, where="--what-if devices")
    return replace(recipe, num_nodes=num_nodes, devices_per_node=per_node)


def _solve(recipe: Recipe, samples: SampleTable) -> Case:
    model = ModelSpec.from_pretrained(recipe.model_folder, frozen=recipe.frozen)
    cluster = recipe.options.cluster(recipe.num_nodes, recipe.devices_per_node)
    try:
        plan = solve_plan(model, samples, cluster, global_batch_size=recipe.global_batch_size, options=recipe.options)
    except EntrainError as error:
        return Case(recipe=recipe, failure=str(error))
    return Case(recipe=recipe, plan=plan)


def comparison_table(cases: list[Case]) -> Table:
    """One row per case; the first is what others are compared with."""
    from rich.table import Table

    table = Table(title="What if (analytic costs)", title_justify="left")
    varied = [key for key in _DEGREES if len({_allowed(case, key) for case in cases}) > 1]
    words = ("device", "frozen", *varied, "plan")
    numbers = ("per step", "samples/s", "times faster", "device-hours per 1M samples", "memory", "MFU")
    for column in ("device", "devices", "frozen", *varied, "plan", *numbers):
        table.add_column(column, justify="left" if column in words else "right")
    base = cases[0].plan.predicted if cases[0].plan is not None else None
    for case in cases:
        cells = [case.recipe.options.device, f"{case.num_devices:,}", "+".join(case.recipe.frozen) or "none"]
        cells += [_allowed(case, key) for key in varied]
        if case.plan is None or case.plan.predicted is None:
            table.add_row(*cells, f"none: {case.failure}")
            continue
        found = case.plan.predicted
        faster = found.samples_per_second / base.samples_per_second if base is not None else None
        share = found.model_flops_utilization
        table.add_row(
            *cells,
            short_plan(case.plan),
            format_seconds(found.iteration_seconds),
            f"{found.samples_per_second:,.4g}",
            "" if faster is None else f"{faster:.2f}",
            f"{case.device_hours:,.3g}",
            format_bytes(max(found.peak_bytes)),
            "" if share is None else f"{share:.0%}",
        )
    return table


def _allowed(case: Case, key: str) -> str:
    """`1+2+4`: degrees considered."""
    return "+".join(map(str, getattr(case.recipe.options, f"{key}_degrees")))


def short_plan(plan: Plan) -> str:
    """Replicas x pipeline (ranks of the modules), tensor and context degrees, microbatches."""
    degrees = plan.degrees
    ranks: dict[str, set[int]] = {}
    for stage in plan.stages:
        ranks.setdefault(stage.module, set()).add(stage.rank)
    parts = "+".join(str(len(held)) for held in ranks.values())
    shared = ""
    for name, used, degree_of in (
        ("tensor", degrees.tensor, degrees.tensor_of),
        ("context", degrees.context, degrees.context_of),
    ):
        if used != 1:
            shared += f", {name} {'+'.join(str(degree_of(min(held))) for held in ranks.values())}"
    shared += ", recompute" if any(stage.recompute for stage in plan.stages) else ""
    shared += ", sharded" if plan.shards_state else ""
    return f"{degrees.data} x {degrees.pipeline} ({parts}){shared}, {plan.num_microbatches} microbatches"


def plain_cases(cases: list[Case]) -> list[dict[str, Any]]:
    """For JSON."""
    from entrain_opt.plan import to_plain

    return [
        {
            "device": case.recipe.options.device,
            "devices": case.num_devices,
            "frozen": list(case.recipe.frozen),
            "tensor_degrees": list(case.recipe.options.tensor_degrees),
            "context_degrees": list(case.recipe.options.context_degrees),
            "plan": None if case.plan is None else to_plain(case.plan),
            "device_hours_per_million_samples": case.device_hours,
            "failure": case.failure,
        }
        for case in cases
    ]
