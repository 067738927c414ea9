"""Messages between the pipeline ranks of a replica.

Every directed edge between two ranks has its own process group, one for activations and one for gradients, so that
messages match by order alone and neither direction waits for the other. Sends never block; receives are posted when the
schedule says so and waited for when their tensor is used. Shapes follow from the assignment, so nothing is negotiated.

A pipeline rank whose layers several devices share (a tensor group) has the same hidden rows, and gradients of them, on
each device. So the device at place i of the receiving group is served by the one at place i modulo the size of the
sending group, and nothing is sent twice to one device or added up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from entrain_opt.plan import Plan
from entrain_opt.runtime.executable import check_context
from entrain_opt.runtime.tensor_group import TensorGroup
from entrain_opt.runtime.waiting import Incoming, Outgoing, WaitLog
from entrain_opt.schedule.actions import Message


@dataclass(frozen=True, kw_only=True)
class Link:
    """One end of a directed edge: the rank at the other end, and the process group of the two."""

    peer: int
    group: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class PipelineGroups:
    """Process groups of one rank.

    Attributes:
        replica, pipeline_rank: where this rank stands.
        outgoing: whom this rank serves (perhaps nobody), per (source stage, target stage) on different pipeline ranks.
        incoming: who serves this rank, likewise.
        tensor: the devices that share this pipeline rank's layers.
        replica_ranks: all ranks of this replica, None if it is alone.
        data: this pipeline rank and place in its tensor group in all replicas, None without data parallelism.
        tied: the ranks of this replica that hold copies of the tied embedding (or of the same part of it), None if
            one rank holds it.
        waits: what this rank waits for.
    """

    replica: int
    pipeline_rank: int
    outgoing: dict[tuple[int, int], tuple[Link, ...]] = field(default_factory=dict)
    incoming: dict[tuple[int, int], Link] = field(default_factory=dict)
    tensor: TensorGroup = field(default_factory=TensorGroup)
    replica_ranks: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    tied: dist.ProcessGroup | None = None
    waits: WaitLog = field(default_factory=WaitLog)

    @property
    def is_first_of_replica(self) -> bool:
        return self.pipeline_rank == 0 and self.tensor.place == 0


def stage_edges(plan: Plan) -> list[tuple[int, int]]:
    """(source, target) of every pair of neighbouring stages on different ranks, both directions, in a fixed order."""
    shape = plan.pipeline_shape
    ranks = shape.ranks_of_stages
    pairs = [(stage, stage + 1) for stage in shape.stages_of_llm[:-1]]
    for encoder in range(shape.num_encoders):
        stages = shape.stages_of_encoder(encoder)
        pairs += [(stage, stage + 1) for stage in stages[:-1]]
        pairs.append((stages[-1], shape.stages_of_llm[0]))
    pairs = [(a, b) for a, b in sorted(pairs) if ranks[a] != ranks[b]]
    return pairs + [(b, a) for a, b in pairs]


def make_groups(
    plan: Plan,
    *,
    tied_stages: tuple[int, ...] = (),
    timeout_seconds: float | None = None,
    waits: WaitLog | None = None,
) -> PipelineGroups:
    """Create all groups of a plan; every rank of the world must call this.

    Args:
        plan: checked against the world size before.
        tied_stages: stages that hold copies of one tied parameter.
        timeout_seconds: of a message; None takes PyTorch's own, half an hour.
        waits: where this rank notes what it waits for.

    Raises:
        RuntimeConfigError: the plan has context degrees above 1.
    """
    check_context(plan)
    waits = waits or WaitLog()
    if not dist.is_initialized():
        return PipelineGroups(replica=0, pipeline_rank=0, waits=waits)
    # A new group does not take over the timeout of the first one.
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    degrees, mine = plan.degrees, dist.get_rank()
    replica, pipeline_rank, place = degrees.place_of(mine)
    widths, rank_of = degrees.tensor_degrees, plan.pipeline_shape.ranks_of_stages

    def new_group(ranks: list[int]) -> dist.ProcessGroup | None:
        """A group of these ranks, if this one is among them; None for fewer than two."""
        group = dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None
        return group if mine in ranks else None

    outgoing: dict[tuple[int, int], tuple[Link, ...]] = {
        edge: () for edge in stage_edges(plan) if rank_of[edge[0]] == pipeline_rank
    }
    incoming: dict[tuple[int, int], Link] = {}
    tensor = replica_ranks = data = tied = None
    tied_ranks = sorted({rank_of[stage] for stage in tied_stages})
    for r in range(degrees.data):
        shared: dict[tuple[int, int, bool], dist.ProcessGroup | None] = {}
        for edge in stage_edges(plan):
            source, target = rank_of[edge[0]], rank_of[edge[1]]
            for i in range(widths[target]):
                # Chunks of an interleaved schedule share the group of their rank pair: order on it is the schedule's.
                sender = degrees.global_rank(r, source, i % widths[source])
                receiver = degrees.global_rank(r, target, i)
                key = (sender, receiver, edge[0] < edge[1])
                if key not in shared:
                    shared[key] = new_group([sender, receiver])
                group = shared[key]
                if group is not None and mine == sender:
                    outgoing[edge] = (*outgoing[edge], Link(peer=receiver, group=group))
                elif group is not None:
                    incoming[edge] = Link(peer=sender, group=group)
        of_rank = [[degrees.global_rank(r, p, i) for i in range(width)] for p, width in enumerate(widths)]
        replica_ranks = new_group([rank for ranks in of_rank for rank in ranks]) or replica_ranks
        for ranks in of_rank:
            tensor = new_group(ranks) or tensor
        if len(tied_ranks) > 1:
            # A module has one tensor degree, so its stages hold the same parts at the same places.
            for copies in zip(*(of_rank[p] for p in tied_ranks), strict=True):
                tied = new_group(list(copies)) or tied
    if degrees.data > 1:
        for p, width in enumerate(widths):
            for i in range(width):
                data = new_group([degrees.global_rank(r, p, i) for r in range(degrees.data)]) or data
    return PipelineGroups(
        replica=replica,
        pipeline_rank=pipeline_rank,
        outgoing=outgoing,
        incoming=incoming,
        tensor=TensorGroup(place=place, size=widths[pipeline_rank], group=tensor, waits=waits),
        replica_ranks=replica_ranks,
        data=data,
        tied=tied,
        waits=waits,
    )


class Mailbox:
    """The messages of one iteration on one rank."""

    def __init__(self, groups: PipelineGroups, device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._sends: list[tuple[dist.Work, Tensor, Outgoing]] = []
        self._receives: dict[Message, tuple[dist.Work, Tensor]] = {}

    def _sender(self, message: Message) -> Link:
        return self._groups.incoming[message.source_stage, message.target_stage]

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending, to every device that this one serves. The tensor is kept until `finish`."""
        tensor = tensor.contiguous()
        for link in self._groups.outgoing[message.source_stage, message.target_stage]:
            outgoing = Outgoing(message, link.peer)
            with self._groups.waits.on(outgoing):
                work = dist.isend(tensor, link.peer, group=link.group)
            assert work is not None
            self._sends.append((work, tensor, outgoing))
        self._sends = [sent for sent in self._sends if not sent[0].is_completed()]

    def post(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Post a receive into a fresh tensor."""
        link = self._sender(message)
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        with self._groups.waits.on(Incoming(message, link.peer)):
            work = dist.irecv(tensor, link.peer, group=link.group)
        assert work is not None
        self._receives[message] = (work, tensor)

    def take(self, message: Message) -> Tensor:
        """Wait for a posted receive.

        Raises:
            PeerLost: the connection broke or the time was up; names the message and the rank.
        """
        work, tensor = self._receives.pop(message)
        with self._groups.waits.on(Incoming(message, self._sender(message).peer)):
            work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until every send has left."""
        for work, _, outgoing in self._sends:
            with self._groups.waits.on(outgoing):
                work.wait()
        self._sends.clear()
