"""What a plan may say that the runtime does not execute, refused before anything is built.

Promise: a plan that passes is trained exactly; one that does not is named with what to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import ParallelDegrees, Plan, StagePlan
from entrain_opt.planner.options import AUTO, SEARCH, PlanOptions
from entrain_opt.runtime.lora import Lora
from entrain_opt.runtime.tensor_layers import check_tensor
from entrain_opt.runtime.trained import updates_each_value
from entrain_opt.spec.model import ModelSpec


def executable_options(
    options: PlanOptions,
    folder: str | Path,
    *,
    make_optimizer: Callable[[list[dict[str, list[nn.Parameter]]]], Optimizer],
    lora: Lora | None = None,
) -> PlanOptions:
    """The same options without the choices that the runtime would refuse for a model and its optimizer.

    Backwards of a run with adapters are not split: its weight gradients are those of small matrices, and the plan,
    which counts all weights as trained, would expect too much of it.

    Only what the planner may choose among is left out. What is asked for by itself stays, and is refused by name: by
    `check_executable`, or where the optimizer is made.

    Args:
        options: of the planner.
        folder: of the model.
        make_optimizer: of the run, from parameter groups; asked for one of a made-up parameter.
        lora: adapters that train.
    """
    context, tensor, shares = options.context_degrees, options.tensor_degrees, options.data_parallel
    divisible = updates_each_value(make_optimizer([{"params": [nn.Parameter(torch.zeros(1, 1))]}]))
    if 1 in context:
        context = (1,)
    if 1 in tensor:
        tensor = tuple(degree for degree in tensor if degree == 1 or (divisible and _divides(folder, degree, lora)))
    if shares == SEARCH and not divisible:
        shares = "all_reduce"
    schedule = "eager" if options.schedule == AUTO and lora is not None else options.schedule
    return replace(options, context_degrees=context, tensor_degrees=tensor, data_parallel=shares, schedule=schedule)


def _divides(folder: str | Path, degree: int, lora: Lora | None) -> bool:
    """Whether the layers of all modules can be divided over so many devices."""
    modules = ModelSpec.from_pretrained(folder).modules
    plan = Plan(
        model=str(folder),
        degrees=ParallelDegrees(tensor=degree),
        stages=tuple(StagePlan(module=module.name, layers=(0, module.num_layers), rank=0) for module in modules),
        global_batch_size=1,
        num_microbatches=1,
    )
    try:
        check_tensor(folder, plan, lora)
    except RuntimeConfigError:
        return False
    return True


def check_executable(folder: str | Path, plan: Plan, lora: Lora | None = None) -> None:
    """Raise unless the runtime executes a plan.

    Args:
        folder: of the model.
        plan: checked.
        lora: adapters that train.

    Raises:
        RuntimeConfigError: names the degree or layer, and what to change.
    """
    check_context(plan)
    check_tensor(folder, plan, lora)


def check_context(plan: Plan) -> None:
    """Raise RuntimeConfigError for a plan that divides samples over devices."""
    degrees = {stage.module: plan.degrees.context_of(stage.rank) for stage in plan.stages}
    wide = [f"{degree} for module {name}" for name, degree in degrees.items() if degree > 1]
    if wide:
        raise RuntimeConfigError(
            f"degrees.context: expected 1, found {' and '.join(wide)}. Context parallelism is planned for and "
            "compared, not executed. Make a plan with context_degrees: [1] to train."
        )
