"""Gradients across ranks: summed over replicas, tied copies joined, one norm over everything.

Sums, not means: the loss is already divided by the label tokens of the whole global batch. A replica whose batch never
reached a parameter takes part with zeros, so the number of collectives depends on the plan only. Where devices share
layers, each sums its own part over the replicas; a whole parameter inside a divided part is summed over the devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from entrain_opt.runtime.p2p import PipelineGroups
from entrain_opt.runtime.stages import RankModel


class GradientReducer:
    """Owns the gradients of one rank's trained parameters.

    A parameter held by two stages of this rank (a tied embedding) belongs to the lower one, whose backward ends last.
    """

    def __init__(self, model: RankModel, groups: PipelineGroups) -> None:
        self._groups = groups
        self._device = next(model.parameters()).device
        self._pending: list[_PendingSum] = []
        self._parameters: dict[int, dict[str, nn.Parameter]] = {}
        taken: set[str] = set()
        for stage in sorted(model.stages):
            mine = {name: p for name, p in model.stage_parameters(stage).items() if name not in taken}
            taken |= set(mine)
            optimized = {name: model.masters.of(parameter) for name, parameter in mine.items()}
            self._parameters[stage] = {name: p for name, p in optimized.items() if p is not None}
        self._tied = [
            parameter
            for owner in sorted(set(model.family.tied().values()))
            for name, parameter in self.named_parameters().items()
            if name == owner
        ]
        # Where a replica's ranks hold a copy each, the first stage's rank counts it in the norm.
        first_llm_stage = model.plan.pipeline_shape.stages_of_llm[0]
        self._counts_tied = groups.tied is None or first_llm_stage in model.stages
        mine = self.named_parameters()
        self._partial = [p for name, p in mine.items() if name in model.divided.partial]
        # What every device of a tensor group holds alike, the first one counts.
        shards = model.divided.shards
        self._counted = [p for name, p in mine.items() if name in shards or groups.tensor.place == 0]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What a loss can reach and the optimizer updates: parameters or their masters, by Hugging Face name."""
        return {name: p for stage in self._parameters.values() for name, p in stage.items()}

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in self.named_parameters().values():
            parameter.grad = None

    def zero_missing(self) -> None:
        """Give zeros to parameters that no microbatch reached: zero, not absent, on every rank alike."""
        for parameter in self.named_parameters().values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def start_reduce(self, stage: int) -> None:
        """Start to sum one stage's gradients over the replicas, as one message per dtype.

        Never blocks: replicas reach a stage's reduction at different times, and a rank that waited here could keep the
        pipeline of its own replica from moving on.
        """
        parameters = list(self._parameters[stage].values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._groups.data is not None:
            self._pending += _start_sum([p.grad for p in parameters if p.grad is not None], self._groups.data)

    def finish(self) -> None:
        """Wait for the reductions, then join the gradients of a parameter whose copies live on two ranks."""
        with self._groups.waits.on("the sum of gradients over replicas"):
            self._finish_sums()
        self.zero_missing()
        self._join("the gradients of the tied embedding", self._tied, self._groups.tied)
        what = "the gradients of whole parameters between divided ones"
        self._join(what, self._partial, self._groups.tensor.group)

    def _finish_sums(self) -> None:
        for pending in self._pending:
            pending.finish()
        self._pending.clear()

    @property
    def _norm_group(self) -> dist.ProcessGroup | None:
        """The ranks whose gradients make up the model's."""
        return self._groups.replica_ranks

    def _join(self, what: str, parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        """Sum the gradients of parameters of which each rank of a group has a share."""
        if group is None or not parameters:
            return
        with self._groups.waits.on(what):
            for pending in _start_sum([p.grad for p in parameters if p.grad is not None], group):
                pending.finish()

    def global_norm(self) -> Tensor:
        """Euclidean norm of all gradients of the model, each parameter once; equal on every rank."""
        tied = {id(parameter) for parameter in self._tied}
        grads = [p.grad for p in self._counted if p.grad is not None and (self._counts_tied or id(p) not in tied)]
        total = nn.utils.get_total_norm(grads).double() ** 2 if grads else torch.zeros((), dtype=torch.float64)
        total = total.to(self._device)
        if self._norm_group is not None:
            with self._groups.waits.on("the gradient norm of the other ranks"):
                dist.all_reduce(total, group=self._norm_group)
        return total.sqrt()

    def clip(self, norm: float, max_norm: float) -> None:
        """Scale every gradient so that the global norm is at most `max_norm`."""
        if not math.isfinite(norm) or norm <= max_norm:
            return
        for parameter in self.named_parameters().values():
            if parameter.grad is not None:
                parameter.grad.mul_(max_norm / (norm + 1e-6))


@dataclass(frozen=True, slots=True)
class _PendingSum:
    """A running all-reduce of several gradients in one flat tensor."""

    work: dist.Work
    flat: Tensor
    gradients: list[Tensor]

    def finish(self) -> None:
        self.work.wait()
        for gradient, summed in zip(self.gradients, self.flat.split([g.numel() for g in self.gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def _start_sum(gradients: list[Tensor], group: dist.ProcessGroup) -> list[_PendingSum]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    pending = []
    for same in by_dtype.values():
        flat = torch.cat([gradient.flatten() for gradient in same])
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        pending.append(_PendingSum(work, flat, same))
    return pending
