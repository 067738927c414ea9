"""The plan that a run asks for: read from its file, taken from the cache, or solved.

Torch-free: what measures the device is passed in. Every step is cached under a key of all it depends on, so a second
run with the same inputs reads its plan, and processes that start together wait for the one that works.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from entrain_opt.cost import CostModel, MeasuredCosts
from entrain_opt.cost.context import rank_degrees
from entrain_opt.cost.profile import profile_path
from entrain_opt.cost.tensor import tensor_degrees, tensor_rule
from entrain_opt.errors import PlanError, RuntimeConfigError
from entrain_opt.plan import Plan
from entrain_opt.planner.options import PlanOptions
from entrain_opt.planner.solve import input_hash, solve_plan
from entrain_opt.planner.space import groups_fit_nodes
from entrain_opt.spec.cluster import ClusterSpec
from entrain_opt.spec.model import ModelSpec
from entrain_opt.workload.samples import SampleTable


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """A plan and what it was made from.

    Attributes:
        plan: checked against the model, the batch and the number of ranks.
        source: `file`, `cached` or `solved`.
        samples: the data set's table.
        model: its spec.
        cluster: the devices.
        costs: the cost model; every rank must use the same one.
        options: what the planner could choose among.
    """

    plan: Plan
    source: str
    samples: SampleTable
    model: ModelSpec
    cluster: ClusterSpec
    costs: CostModel
    options: PlanOptions


def resolve(
    *,
    model_folder: str | Path,
    dataset: str | Path,
    global_batch_size: int,
    num_nodes: int = 1,
    devices_per_node: int = 1,
    frozen: Sequence[str] = (),
    options: PlanOptions | None = None,
    plan: str | Path = "auto",
    bad_samples: str = "error",
    cache_dir: str | Path = "runs/cache",
    progress: bool = False,
    measure: Callable[[], MeasuredCosts] | None = None,
    accept: Callable[[Plan], None] | None = None,
) -> Resolution:
    """Find or make the plan of a run.

    Args:
        model_folder: Hugging Face folder.
        dataset: JSONL file in chat form, or a trace (Parquet) to plan with only.
        global_batch_size: samples per optimizer step.
        num_nodes, devices_per_node: ranks.
        frozen: parts that do not train.
        options: of the planner.
        plan: `auto`, or the path of a plan file.
        bad_samples: `error` or `skip`.
        cache_dir: for the index, the measured costs and the plans.
        progress: show progress of the index.
        measure: measures the costs if they are asked for and not cached.
        accept: raises for a plan that the caller cannot run; of a file it is asked before the data is read.

    Raises:
        PlanError: the plan file is for other ranks, another model or batch, or nothing fits.
        RuntimeConfigError: measured costs are asked for, but there are none and nothing to measure with.
        WorkloadError: the data is unusable.
    """
    options = options or PlanOptions()
    options.check()
    if bad_samples not in ("error", "skip"):
        raise RuntimeConfigError(f"bad_samples: expected error or skip, found {bad_samples!r}.")
    model = ModelSpec.from_pretrained(model_folder, frozen=frozen)
    cluster = options.cluster(num_nodes, devices_per_node)
    given = None
    if str(plan) != "auto":  # Before the data is read: a wrong file is told at once.
        given = check_plan_file(plan, model, cluster, global_batch_size, frozen)
        if accept is not None:
            accept(given)
    samples = load_samples(dataset, model_folder, bad_samples=bad_samples, cache_dir=cache_dir, progress=progress)
    measured = None
    if options.cost_model == "measured":
        measured = load_measured_costs(
            model_folder, cluster, frozen=frozen, options=options, cache_dir=cache_dir, measure=measure
        )
    costs = CostModel(model, cluster, measured=measured, precision=options.precision)
    if given is not None:
        found, source = given, "file"
    else:
        found, source = _solved(model, samples, cluster, global_batch_size, options, costs, Path(cache_dir))
        if accept is not None:
            accept(found)
    return Resolution(
        plan=found, source=source, samples=samples, model=model, cluster=cluster, costs=costs, options=options
    )


def load_samples(
    dataset: str | Path,
    model_folder: str | Path,
    *,
    bad_samples: str = "error",
    cache_dir: str | Path = "runs/cache",
    progress: bool = False,
) -> SampleTable:
    """The sizes of a data set: the cached index of conversations, or a bare trace to plan with only.

    Raises:
        WorkloadError: the data is unusable.
    """
    from entrain_opt.workload.index import load_index

    policy: Literal["error", "skip"] = "skip" if bad_samples == "skip" else "error"
    return load_index(dataset, model_folder, policy=policy, cache_dir=cache_dir, progress=progress)


def load_measured_costs(
    model_folder: str | Path,
    cluster: ClusterSpec,
    *,
    frozen: Sequence[str],
    options: PlanOptions,
    cache_dir: str | Path,
    measure: Callable[[], MeasuredCosts] | None,
) -> MeasuredCosts:
    """The cached measurement, or a new one, which is then kept."""
    from filelock import FileLock

    path = measured_costs_path(model_folder, cluster, frozen=frozen, options=options, cache_dir=cache_dir)
    if path.exists():
        return MeasuredCosts.read(path)
    if measure is None:
        raise RuntimeConfigError(
            f"cost_model: measured costs of {model_folder} are asked for, but there is no {path}. Make it with "
            "`entrain profile --config RECIPE`, or set cost_model: analytic."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            measure().write(path)
    return MeasuredCosts.read(path)


def measured_costs_path(
    model_folder: str | Path,
    cluster: ClusterSpec,
    *,
    frozen: Sequence[str],
    options: PlanOptions,
    cache_dir: str | Path,
) -> Path:
    """Where the measured costs of a run are kept."""
    return profile_path(
        cache_dir,
        model_folder,
        frozen=frozen,
        precision=options.precision,
        device=options.device,
        num_processes_busy=busy_processes(cluster),
    )


def busy_processes(cluster: ClusterSpec) -> int:
    """Processes of one machine that compute at once in training, and so must while measuring: at most one per core."""
    return max(1, min(cluster.devices_per_node, os.cpu_count() or 1))


def check_plan_file(
    path: str | Path, model: ModelSpec, cluster: ClusterSpec, global_batch_size: int, frozen: Sequence[str]
) -> Plan:
    """Read a plan and check that it is for this run.

    Raises:
        PlanError: it is not; the message names the file and what differs.
    """
    plan = Plan.read(path)
    try:
        plan.degrees.check(cluster.num_devices)
        plan.check(num_layers={module.name: module.num_layers for module in model.modules})
        _check_choices(plan, model, cluster)
        for name, asked, found in (
            ("global_batch_size", global_batch_size, plan.global_batch_size),
            ("frozen", sorted(frozen), sorted(plan.frozen)),
        ):
            if asked != found:
                raise PlanError(
                    f"{name}: the run asks for {asked}, the plan was made for {found}. Make a new plan with "
                    "`entrain plan`, or change the run."
                )
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
    return plan


def _check_choices(plan: Plan, model: ModelSpec, cluster: ClusterSpec) -> None:
    """What a hand-edited plan may get wrong beyond its own numbers: names, and degrees that the cluster cannot have."""
    from entrain_opt.assigner import POLICIES
    from entrain_opt.schedule.orders import ORDERS

    for name, value, allowed in (("policy", plan.policy, tuple(POLICIES)), ("schedule", plan.schedule, ORDERS)):
        if value not in allowed:
            raise PlanError(f"{name}: expected one of {sorted(allowed)}, found {value!r}.")
    per_node, degrees = cluster.devices_per_node, plan.degrees
    for module in model.modules:
        rank = next(stage.rank for stage in plan.stages if stage.module == module.name)
        tensor, context = degrees.tensor_of(rank), degrees.context_of(rank)
        if not tensor_degrees(model, module, (tensor,), per_node):
            raise PlanError(f"degrees.tensor: {tensor} is not possible: {tensor_rule(model, module, per_node)}.")
        if not rank_degrees((tensor,), (context,), per_node):
            raise PlanError(
                f"degrees.context: {context} is not possible: tensor * context degree of module {module.name} "
                f"({tensor * context}) must divide the devices of a node ({per_node})."
            )
    if not groups_fit_nodes(degrees, per_node):
        name = "tensor" if degrees.context == 1 else "context"
        raise PlanError(
            f"degrees.{name}: {getattr(degrees, name)} puts devices of one pipeline rank on two nodes of {per_node}. "
            "Put the larger degrees where they divide the places before them."
        )


def _solved(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    global_batch_size: int,
    options: PlanOptions,
    costs: CostModel,
    cache_dir: Path,
) -> tuple[Plan, str]:
    from filelock import FileLock

    path = cache_dir / f"plan-{input_hash(costs, samples, global_batch_size, options)}.yaml"
    if path.exists():
        return Plan.read(path), "cached"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.exists():
            return Plan.read(path), "cached"
        solve_plan(model, samples, cluster, global_batch_size=global_batch_size, options=options, costs=costs).write(
            path
        )
    return Plan.read(path), "solved"
