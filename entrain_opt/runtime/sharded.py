"""Optimizer state shared out over replicas: each updates its own rows of every parameter (plan: data_parallel sharded).

As stage 1 and 2 of ZeRO (Rajbhandari et al. 2020), once per step whatever the number of microbatches:

1. A stage's float32 gradients are summed over the replicas so that each gets its rows (reduce-scatter), in buckets of
   `BUCKET_BYTES`; a gradient is dropped as soon as it lies in a bucket. Norm and clipping work on the rows.
2. The optimizer holds the rows only: views of float32 parameters, float32 masters of shorter ones.
3. After its step every replica gets the others' rows, in the parameters' own type (all-gather), two buckets at a time.

Promise: the weights of summing all gradients everywhere, for optimizers that update each value by itself; sums over
two replicas are the same bits. Price: as many bytes as an all-reduce, fewer where parameters are bfloat16; the gather
comes after the step, when no backward is left to hide it. Masters and moments take 1 / replicas of their bytes, within
one row of each parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from entrain_opt.plan.shares import BUCKET_BYTES, owned_rows, row_dim
from entrain_opt.runtime.master import MasterWeights, add_in_float32
from entrain_opt.runtime.p2p import PipelineGroups
from entrain_opt.runtime.shards import Shard


@dataclass(slots=True)
class HeldParameter:
    """A trained parameter, the rows of it that this replica updates, and its gradient on the way to them."""

    parameter: nn.Parameter
    own: nn.Parameter | None
    """None: there are fewer rows than replicas, and none is this one's."""
    rows: tuple[tuple[int, int], ...]
    """[first, end) of every replica."""
    gradient: Tensor | None = None
    """float32 sum of a shorter parameter's gradients; others have theirs in `parameter.grad`."""

    @property
    def row_size(self) -> int:
        """Values of one row."""
        return self.parameter.numel() // max(end for _, end in self.rows)

    def counts(self) -> list[int]:
        """Values that each replica owns."""
        return [(end - first) * self.row_size for first, end in self.rows]

    def flat(self, tensor: Tensor, replica: int) -> Tensor:
        """A replica's rows of a tensor of the parameter's shape, as a view of one dimension."""
        first, end = self.rows[replica]
        return tensor.view(-1)[first * self.row_size : end * self.row_size]

    def take_gradient(self) -> Tensor | None:
        """The whole gradient of this rank, which is forgotten; None if no backward reached the parameter."""
        found = self.parameter.grad if self.gradient is None else self.gradient
        self.parameter.grad = self.gradient = None
        return found

    def add_gradient(self, parameter: Tensor) -> None:
        """Add the gradient of one backward to the float32 sum."""
        assert parameter.grad is not None
        self.gradient = add_in_float32(self.gradient, parameter.grad)
        parameter.grad = None


class ShardedWeights(MasterWeights):
    """This replica's rows of the trained parameters: what the optimizer updates and checkpoints see.

    Args:
        parameters: on their device, with their initial values, equal on every replica.
        groups: of this rank; there is a data group.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], groups: PipelineGroups) -> None:
        super().__init__({})
        assert groups.data is not None
        self.replica, self.num_replicas = groups.replica, dist.get_world_size(groups.data)
        self._groups = groups
        self._held: dict[int, HeldParameter] = {}
        for parameter in parameters.values():
            if not parameter.requires_grad or id(parameter) in self._held:
                continue
            # Rows are runs of memory; what a device keeps of a divided matrix may not be one.
            parameter.data = parameter.data.contiguous()
            dim = row_dim(parameter.shape)
            num_rows = parameter.shape[dim] if parameter.ndim else 1
            rows = tuple(owned_rows(num_rows, replica, self.num_replicas) for replica in range(self.num_replicas))
            first, end = rows[self.replica]
            own = None
            if first < end:
                mine = parameter.detach()
                mine = mine.narrow(dim, first, end - first) if parameter.ndim else mine
                own = nn.Parameter(mine if parameter.dtype == torch.float32 else mine.float())
            held = self._held[id(parameter)] = HeldParameter(parameter=parameter, own=own, rows=rows)
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(held.add_gradient)

    def __len__(self) -> int:
        return len(self._held)

    def of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """This replica's rows of a trained parameter, or their master; None if it has none. Frozen ones: themselves."""
        held = self._held.get(id(parameter))
        return parameter if held is None else held.own

    def held(self, parameter: nn.Parameter) -> HeldParameter:
        """What is kept of a trained parameter."""
        return self._held[id(parameter)]

    def shard_of(self, parameter: nn.Parameter, base: Shard | None) -> Shard | None:
        held = self._held.get(id(parameter))
        if held is None or parameter.ndim == 0:
            return base
        whole = base or Shard(shape=tuple(parameter.shape), dim=0, ranges=((0, parameter.shape[0]),))
        return whole.rows(row_dim(parameter.shape), *held.rows[self.replica])

    def write_back(self) -> None:
        """Give every replica the rows that the others updated; every replica must call this."""
        by_dtype: dict[torch.dtype, list[HeldParameter]] = {}
        for held in self._held.values():
            by_dtype.setdefault(held.parameter.dtype, []).append(held)
        running: list[_Gather] = []
        with torch.no_grad(), self._groups.waits.on("the weights that other replicas updated"):
            for same in by_dtype.values():
                for bucket in buckets_of(same, same[0].parameter.element_size()):
                    running.append(_Gather.start(bucket, self._groups))
                    if len(running) > 1:
                        running.pop(0).finish()
            for gather in running:
                gather.finish()


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that share a message, in which each takes the same room for every replica.

    Attributes:
        members: each parameter and where its values begin in a replica's part.
        room: values of a replica's part.
        replicas: how many there are.
    """

    members: tuple[tuple[HeldParameter, int], ...]
    room: int
    replicas: int

    @classmethod
    def of(cls, chosen: Sequence[HeldParameter]) -> Bucket:
        ends = list(accumulate((max(held.counts()) for held in chosen), initial=0))
        return cls(tuple(zip(chosen, ends, strict=False)), ends[-1], len(chosen[0].rows))

    def pairs(self, flat: Tensor, held: HeldParameter, at: int, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of a parameter's values in a message and in a tensor of its shape, in as few pieces as there can be."""
        counts, parts = held.counts(), flat.view(self.replicas, self.room)
        if len(set(counts)) == 1:
            yield parts[:, at : at + counts[0]], whole.view(self.replicas, counts[0])
            return
        for replica, count in enumerate(counts):
            yield parts[replica, at : at + count], held.flat(whole, replica)


def buckets_of(members: Sequence[HeldParameter], item_bytes: int) -> Iterator[Bucket]:
    """Parameters in order, each message of `BUCKET_BYTES` or a single parameter that is larger."""
    chosen: list[HeldParameter] = []
    size = 0
    for held in members:
        if chosen and size + held.parameter.numel() * item_bytes > BUCKET_BYTES:
            yield Bucket.of(chosen)
            chosen, size = [], 0
        chosen.append(held)
        size += held.parameter.numel() * item_bytes
    if chosen:
        yield Bucket.of(chosen)


@dataclass(frozen=True, slots=True)
class _Gather:
    """A running exchange of the replicas' rows."""

    work: dist.Work
    flat: Tensor
    mine: Tensor
    bucket: Bucket

    @classmethod
    def start(cls, bucket: Bucket, groups: PipelineGroups) -> _Gather:
        first = bucket.members[0][0].parameter
        mine = torch.zeros(bucket.room, dtype=first.dtype, device=first.device)
        for held, at in bucket.members:
            if held.own is not None:
                mine[at : at + held.own.numel()].copy_(held.own.detach().view(-1))
        flat = mine.new_empty(bucket.replicas * bucket.room)
        return cls(_all_gather(flat, mine, groups.data), flat, mine, bucket)

    def finish(self) -> None:
        self.work.wait()
        for held, at in self.bucket.members:
            for room, values in self.bucket.pairs(self.flat, held, at, held.parameter.data):
                values.copy_(room)


def _all_gather(flat: Tensor, mine: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Older releases of PyTorch have the same by another name."""
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = collective(flat, mine, group=group, async_op=True)
    return work
