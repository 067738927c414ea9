"""Messages between the pipeline ranks of a replica.

Every directed edge between two ranks has its own process group, one for activations and one for gradients, so that
messages match by order alone and neither direction waits for the other. Sends never block; receives are posted when the
schedule says so and waited for when their tensor is used. Shapes follow from the assignment, so nothing is negotiated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from entrain_opt.plan import Plan
from entrain_opt.runtime.waiting import Incoming, Outgoing, WaitLog
from entrain_opt.schedule.actions import Message


@dataclass(frozen=True, kw_only=True)
class PipelineGroups:
    """Process groups of one rank.

    Attributes:
        replica, pipeline_rank: where this rank stands.
        edges: group of each (source stage, target stage) whose stages are on different ranks.
        pipeline: all ranks of this replica, None if it is alone.
        data: all replicas of this pipeline rank, None without data parallelism.
        tied: the ranks of this replica that hold copies of the tied embedding, None if one rank holds it.
        waits: what this rank waits for.
    """

    replica: int
    pipeline_rank: int
    edges: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    pipeline: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    tied: dist.ProcessGroup | None = None
    waits: WaitLog = field(default_factory=WaitLog)


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
    plan: Plan, *, tied_stages: tuple[int, ...] = (), timeout_seconds: float | None = None
) -> PipelineGroups:
    """Create all groups of a plan; every rank of the world must call this.

    Args:
        plan: checked against the world size before.
        tied_stages: stages that hold copies of one tied parameter.
        timeout_seconds: of a message; None takes PyTorch's own, half an hour.
    """
    if not dist.is_initialized():
        return PipelineGroups(replica=0, pipeline_rank=0)
    # A new group does not take over the timeout of the first one.
    timeout = None if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    degrees = plan.degrees
    replica, pipeline_rank = divmod(dist.get_rank(), degrees.pipeline)
    rank_of = plan.pipeline_shape.ranks_of_stages
    edges: dict[tuple[int, int], dist.ProcessGroup] = {}
    pipeline = data = tied = None
    tied_ranks = sorted({rank_of[stage] for stage in tied_stages})
    for r in range(degrees.data):
        shared: dict[tuple[int, int, bool], dist.ProcessGroup] = {}
        for source, target in stage_edges(plan):
            # Chunks of an interleaved schedule share the group of their rank pair: order on it is the schedule's.
            ends = (rank_of[source], rank_of[target])
            ranks = [degrees.global_rank(r, end) for end in ends]
            key = (ends[0], ends[1], source < target)
            if key not in shared:
                shared[key] = dist.new_group(ranks, timeout=timeout)
            if r == replica and pipeline_rank in ends:
                edges[source, target] = shared[key]
        if degrees.pipeline > 1:
            group = dist.new_group([degrees.global_rank(r, p) for p in range(degrees.pipeline)], timeout=timeout)
            pipeline = group if r == replica else pipeline
        if len(tied_ranks) > 1:
            group = dist.new_group([degrees.global_rank(r, p) for p in tied_ranks], timeout=timeout)
            tied = group if r == replica and pipeline_rank in tied_ranks else tied
    if degrees.data > 1:
        for p in range(degrees.pipeline):
            group = dist.new_group([degrees.global_rank(r, p) for r in range(degrees.data)], timeout=timeout)
            data = group if p == pipeline_rank else data
    return PipelineGroups(
        replica=replica, pipeline_rank=pipeline_rank, edges=edges, pipeline=pipeline, data=data, tied=tied
    )


class Mailbox:
    """The messages of one iteration on one rank."""

    def __init__(self, plan: Plan, groups: PipelineGroups, device: torch.device) -> None:
        self._plan = plan
        self._groups = groups
        self._device = device
        self._rank_of = plan.pipeline_shape.ranks_of_stages
        self._sends: list[tuple[dist.Work, Tensor, Outgoing]] = []
        self._receives: dict[Message, tuple[dist.Work, Tensor]] = {}

    def _peer(self, stage: int) -> int:
        return self._plan.degrees.global_rank(self._groups.replica, self._rank_of[stage])

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending. The tensor is kept until `finish`."""
        group = self._groups.edges[message.source_stage, message.target_stage]
        tensor = tensor.contiguous()
        peer = self._peer(message.target_stage)
        outgoing = Outgoing(message, peer)
        with self._groups.waits.on(outgoing):
            work = dist.isend(tensor, peer, group=group)
        assert work is not None
        self._sends.append((work, tensor, outgoing))
        self._sends = [sent for sent in self._sends if not sent[0].is_completed()]

    def post(self, message: Message, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Post a receive into a fresh tensor."""
        group = self._groups.edges[message.source_stage, message.target_stage]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        peer = self._peer(message.source_stage)
        with self._groups.waits.on(Incoming(message, peer)):
            work = dist.irecv(tensor, peer, group=group)
        assert work is not None
        self._receives[message] = (work, tensor)

    def take(self, message: Message) -> Tensor:
        """Wait for a posted receive.

        Raises:
            PeerLost: the connection broke or the time was up; names the message and the rank.
        """
        work, tensor = self._receives.pop(message)
        with self._groups.waits.on(Incoming(message, self._peer(message.source_stage))):
            work.wait()
        return tensor

    def finish(self) -> None:
        """Wait until every send has left."""
        for work, _, outgoing in self._sends:
            with self._groups.waits.on(outgoing):
                work.wait()
        self._sends.clear()
