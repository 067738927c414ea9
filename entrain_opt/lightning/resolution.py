"""From a trainer, module and data module to a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from entrain_opt.cost import CostModel, MeasuredCosts
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import Plan
from entrain_opt.planner import resolve as sizes
from entrain_opt.planner.resolve import Resolution, busy_processes, resolve
from entrain_opt.runtime.executable import check_executable, executable_options
from entrain_opt.spec.model import ModelSpec

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from entrain_opt.lightning.strategy import EntrainStrategy


def check_parts(module: Any, data: Any, *, emulated: bool = False) -> None:
    """Raise RuntimeConfigError unless module and data module are ours (or derived from ours)."""
    from entrain_opt.lightning.datamodule import MultimodalDataModule
    from entrain_opt.lightning.module import MultimodalModule

    for name, value, expected in (("model", module, MultimodalModule), ("data", data, MultimodalDataModule)):
        if not isinstance(value, expected):
            raise RuntimeConfigError(
                f"{name}: EntrainStrategy expects a {expected.__name__}, found {type(value).__name__}. Pass "
                f"entrain_opt.{expected.__name__} or a class derived from it to trainer.fit()."
            )
    module.check()
    data.check(emulated=emulated)


def resolve_run(
    strategy: EntrainStrategy, trainer: pl.Trainer, module: Any, data: Any = None, *, progress: bool = False
) -> Resolution:
    """The plan of a run, solved or read; see `entrain_opt.planner.resolve.resolve` for what it raises."""
    data = data if data is not None else trainer.datamodule  # type: ignore[attr-defined]
    check_parts(module, data, emulated=strategy.emulate is not None)
    options = strategy.options
    if strategy.emulate is None and options.device == "cpu" and strategy.root_device.type != "cpu":
        raise RuntimeConfigError(
            f"trainer.strategy.device: expected a device of the catalogue or a cluster file for this run on "
            f"{strategy.root_device.type}, found none. Name it, for example device: A100-80GB."
        )

    if strategy.emulate is None:  # A rehearsal may have choices that only waiting can execute.
        options = executable_options(
            options, module.model_folder, lora=module.lora, make_optimizer=module.make_optimizer
        )

    def accept(plan: Plan) -> None:
        check_executable(module.model_folder, plan, module.lora)

    return resolve(
        model_folder=module.model_folder,
        dataset=data.dataset,
        global_batch_size=data.global_batch_size,
        num_nodes=strategy.planned_nodes[0],
        devices_per_node=strategy.planned_nodes[1],
        frozen=module.frozen,
        options=options,
        plan=strategy.plan_source,
        bad_samples=data.bad_samples,
        cache_dir=strategy.cache_dir,
        progress=progress,
        # Another machine's seconds cannot be measured here.
        measure=None if strategy.emulate is not None and options.device != "cpu" else _measurement(strategy, module),
        accept=None if strategy.emulate is not None else accept,
    )


def resolution_of(
    strategy: EntrainStrategy, trainer: pl.Trainer, module: Any, plan: Plan, measured: MeasuredCosts | None
) -> Resolution:
    """What the first rank resolved, on another rank: same plan and costs, own view of the table."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    check_parts(module, data, emulated=strategy.emulate is not None)
    samples = sizes.load_samples(
        data.dataset, module.model_folder, bad_samples=data.bad_samples, cache_dir=strategy.cache_dir
    )
    options = strategy.options
    cluster = options.cluster(*strategy.planned_nodes)
    model = ModelSpec.from_pretrained(module.model_folder, frozen=module.frozen)
    costs = CostModel(model, cluster, measured=measured, precision=options.precision)
    return Resolution(
        plan=plan, source="rank 0", samples=samples, model=model, cluster=cluster, costs=costs, options=options
    )


def _measurement(strategy: EntrainStrategy, module: Any) -> Callable[[], MeasuredCosts]:
    def measure() -> MeasuredCosts:
        from entrain_opt.runtime.measure import measure_costs

        busy = busy_processes(strategy.options.cluster(*strategy.planned_nodes))
        return measure_costs(
            module.model_folder,
            frozen=module.frozen,
            num_processes_busy=busy,
            precision=strategy.options.precision,
            device=strategy.root_device.type,
        )

    return measure
