"""Sums within a tensor group, as autograd sees them.

Devices that share a layer hold the same hidden rows, and each a part of the layer's matrices (Shoeybi et al. 2019,
"Megatron-LM", the functions f and g of section 3):

- `spread`: rows go into the divided part as they are; on the way back, each device has the gradient of its own part
  only, and the sum is that of the rows.
- `gather`: each device has a share of the result; the sum is the result, and its gradient is every share's.

So hidden rows, and what comes before and behind them, are equal on every device of the group, to the bit.

Promise: every device of a group makes the same sums in the same order, because all run the same actions.
Price: two sums forward and two backward per layer, each of one row of hidden states per token; the time that a device
waits in them counts as computing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from entrain_opt.runtime.waiting import WaitLog


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """The devices that share the layers of a pipeline rank, seen from one of them.

    Attributes:
        place: of this device, from 0 on.
        size: devices.
        group: their process group; None for one device.
        waits: what this rank waits for.
    """

    place: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    waits: WaitLog = field(default_factory=WaitLog)

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum (or another reduction) over the group, as a new tensor; no gradient passes."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.group is not None:
            with self.waits.on("the other devices of its tensor group"):
                dist.all_reduce(total, op=op, group=self.group)
        return total

    def spread(self, rows: Tensor) -> Tensor:
        """The same rows; their gradient is summed over the group."""
        spread: Tensor = _Spread.apply(rows, self)
        return spread

    def gather(self, shares: Tensor) -> Tensor:
        """The sum of the group's shares; its gradient goes to each of them."""
        total: Tensor = _Gather.apply(shares, self)
        return total

    def cross_entropy_sum(self, logits: Tensor, labels: Tensor, first: int) -> Tensor:
        """Cross-entropy summed over rows, where each device has the logits of a part of the vocabulary.

        Args:
            logits: [L, own entries] in float32.
            labels: [L] over the whole vocabulary.
            first: the entry that this device's first column is.
        """
        loss: Tensor = _CrossEntropySum.apply(logits, labels, first, self)
        return loss


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.tensor.reduce(gradients[0]), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shares: Tensor, tensor: TensorGroup) -> Tensor:
        return tensor.reduce(shares)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, tensor: TensorGroup) -> Tensor:
        largest = tensor.reduce(logits.amax(dim=1), dist.ReduceOp.MAX)
        powers = (logits - largest[:, None]).exp_()
        column = labels - first
        is_own = (column >= 0) & (column < logits.shape[1])
        column = column.clamp(0, logits.shape[1] - 1)[:, None]
        target = logits.gather(1, column).squeeze(1).masked_fill(~is_own, 0.0)
        total, target = tensor.reduce(torch.stack([powers.sum(dim=1), target]))
        # Kept: the softmax, less one in the column of the label.
        share = powers.div_(total[:, None])
        share.scatter_add_(1, column, -is_own.to(share.dtype)[:, None])
        ctx.save_for_backward(share)
        return (total.log() + largest - target).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (share,) = ctx.saved_tensors
        return share * gradients[0], None, None, None
