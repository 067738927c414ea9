"""Which of Lightning's precisions are executed, and how.

- `32-true`: everything in float32.
- `bf16-mixed`: weights, gradients and optimizer state in float32; autocast computes matrix products in bfloat16.
- `bf16-true`: weights and activations in bfloat16; gradients are summed in float32, and the optimizer updates float32
  masters of the trained weights (runtime/master.py), which checkpoints hold. Frozen weights are bfloat16 alone.
  Buffers (rotary frequencies) keep the type that the model gave them.
"""

from __future__ import annotations

from typing import Literal

from pytorch_lightning.plugins.precision import Precision

from entrain_opt.cost.precision import precisions
from entrain_opt.errors import RuntimeConfigError


class _StageHalfPrecision(Precision):
    """`bf16-true` whose types are those of the stages: nothing is cast around them.

    Lightning's own plugin would cast buffers too, and set PyTorch's default type during a step.
    """

    precision: Literal["bf16-true"] = "bf16-true"


def plugin_of_stages(plugin: Precision) -> Precision:
    """The plugin that runs stages under a precision of Lightning's."""
    return _StageHalfPrecision() if plugin.precision == "bf16-true" else plugin


def check_precision(precision: str) -> None:
    """Raise RuntimeConfigError for a precision that is not executed, saying why."""
    if precision in precisions():
        return
    reason = ""
    if precision.startswith("16"):
        reason = (
            "float16 needs a loss scale that all stages agree on, and a step that overflows in one stage must be "
            "undone in all; bfloat16 needs neither. "
        )
    raise RuntimeConfigError(f"trainer.precision: expected one of {precisions()}, found {precision!r}. {reason}")
