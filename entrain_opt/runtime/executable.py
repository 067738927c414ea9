"""What a plan may say that the runtime does not execute, refused before anything is built.

Promise: a plan that passes is trained exactly; one that does not is named with what to change.
"""

from __future__ import annotations

from pathlib import Path

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import Plan
from entrain_opt.runtime.lora import Lora
from entrain_opt.runtime.tensor_layers import check_tensor


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
