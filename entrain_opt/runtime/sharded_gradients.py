"""Gradients where replicas share out the optimizer's state: each gets the sums of its own rows; see `sharded.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from entrain_opt.runtime.gradients import GradientReducer
from entrain_opt.runtime.p2p import PipelineGroups
from entrain_opt.runtime.sharded import Bucket, HeldParameter, ShardedWeights, buckets_of
from entrain_opt.runtime.stages import RankModel


class ShardedReducer(GradientReducer):
    """`GradientReducer` of a rank whose optimizer holds this replica's rows only."""

    def __init__(self, model: RankModel, groups: PipelineGroups) -> None:
        super().__init__(model, groups)
        assert isinstance(model.masters, ShardedWeights)
        self._weights = model.masters
        self._scatters: list[_Scatter] = []
        whole, taken = dict[int, list[HeldParameter]](), set[str]()
        for stage in sorted(model.stages):
            mine = {name: p for name, p in model.stage_parameters(stage).items() if name not in taken}
            taken |= set(mine)
            whole[stage] = [self._weights.held(parameter) for parameter in mine.values()]
        self._whole = whole

    def clear(self) -> None:
        super().clear()
        for held in (held for stage in self._whole.values() for held in stage):
            held.take_gradient()

    def start_reduce(self, stage: int) -> None:
        """Start to sum one stage's gradients, each replica's rows to it; never blocks."""
        for bucket in buckets_of(self._whole[stage], torch.float32.itemsize):
            self._scatters.append(_Scatter.start(bucket, self._weights.replica, self._groups))

    def _finish_sums(self) -> None:
        for scatter in self._scatters:
            scatter.finish()
        self._scatters.clear()

    @property
    def _norm_group(self) -> dist.ProcessGroup | None:
        """Every rank has gradients that no other has."""
        return dist.group.WORLD


def make_reducer(model: RankModel, groups: PipelineGroups) -> GradientReducer:
    """The reducer that fits what the optimizer of a rank holds."""
    return (ShardedReducer if isinstance(model.masters, ShardedWeights) else GradientReducer)(model, groups)


@dataclass(frozen=True, slots=True)
class _Scatter:
    """A running sum of which each replica gets its rows."""

    work: dist.Work
    flat: Tensor
    mine: Tensor
    bucket: Bucket
    replica: int

    @classmethod
    def start(cls, bucket: Bucket, replica: int, groups: PipelineGroups) -> _Scatter:
        alone, _ = bucket.members[0]
        if len(bucket.members) == 1 and len(set(alone.counts())) == 1:
            # A large parameter whose rows divide: its gradient is the message as it lies in memory.
            gradient = alone.take_gradient()
            flat = torch.zeros_like(alone.parameter, dtype=torch.float32) if gradient is None else gradient
            flat, mine = flat.contiguous().view(-1), flat.new_empty(bucket.room)
            return cls(_reduce_scatter(mine, flat, groups.data), flat, mine, bucket, replica)
        flat = torch.zeros(bucket.replicas * bucket.room, device=alone.parameter.device)
        for held, at in bucket.members:
            gradient = held.take_gradient()
            if gradient is not None:
                for room, values in bucket.pairs(flat, held, at, gradient.contiguous()):
                    room.copy_(values)
        mine = flat.new_empty(bucket.room)
        return cls(_reduce_scatter(mine, flat, groups.data), flat, mine, bucket, replica)

    def finish(self) -> None:
        self.work.wait()
        for held, at in self.bucket.members:
            if held.own is not None:
                held.own.grad = self.mine[at : at + held.own.numel()].view(held.own.shape)


def _reduce_scatter(mine: Tensor, flat: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Older releases of PyTorch have the same by another name."""
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = collective(mine, flat, group=group, async_op=True)
    return work
