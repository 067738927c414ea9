"""Learning rates over time, beside those of `torch.optim.lr_scheduler`."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from entrain_opt.errors import RuntimeConfigError


class WarmupCosine(LambdaLR):
    """Each group's rate grows linearly to its own value, then falls along a cosine.

    Args:
        optimizer: whose groups are scheduled.
        warmup_steps: optimizer steps until the full rate; the first step already has 1 / warmup_steps of it.
        total_steps: when the last rate is reached; it stays from there on.
        final_share: the last rate, as a share of the full one.

    Raises:
        RuntimeConfigError: more warm-up than steps, or a share that is not one.
    """

    def __init__(self, optimizer: Optimizer, warmup_steps: int, total_steps: int, final_share: float = 0.0) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise RuntimeConfigError(
                f"scheduler.warmup_steps: expected 0 to total_steps - 1 ({total_steps - 1}), found {warmup_steps}."
            )
        if not 0 <= final_share <= 1:
            raise RuntimeConfigError(f"scheduler.final_share: expected 0 to 1, found {final_share}.")

        def share(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
            return final_share + (1 - final_share) * (1 + math.cos(math.pi * progress)) / 2

        super().__init__(optimizer, share)
