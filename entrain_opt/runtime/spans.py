"""What every rank did in one step, as measured: spans, and the trace that they make together.

While a `SpanLog` hangs on a rank's `WaitLog`, the executor notes its computations in it, and every wait, send and
receive notes itself. Spans of all ranks become Chrome trace events of the same form as the simulator's, so that the
measured and the predicted timeline lie over each other in one file.

Ranks of one machine share a clock. Clocks of several machines are laid over each other at the instant at which the
first rank of each had agreed on the step with all others; the error is the time of one small message. Devices that
share a pipeline rank's layers do the same at the same time: the first one of them speaks for all.

Spans are of the host: on a GPU a computation ends for it when its kernels are queued, so gaps and waits there say less.

Price: nothing while no log hangs there; a list append per action where one does.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from entrain_opt.plan import PipelineShape
from entrain_opt.schedule.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward, Message
from entrain_opt.simulator import Timeline
from entrain_opt.simulator.timeline import KINDS
from entrain_opt.simulator.trace import MICROSECONDS, action_event, process_names, trace_events

_KIND_OF: dict[type, str] = dict(zip((Forward, Backward, BackwardInput, BackwardWeight), KINDS[:4], strict=True))

Unit = tuple[int, int, int]
"""(stage, microbatch, part)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSpan:
    """A forward, backward, reduction or optimizer step; `kind` is one of `KINDS`, seconds are of `now`."""

    kind: str
    unit: Unit
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitSpan:
    """A wait for another rank, in words, and the message that came, if it was one."""

    what: str
    start: float
    end: float
    message: Message | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageSpan:
    """One end of a message: from being handed over to being sent, or from being expected to being there."""

    message: Message
    is_send: bool
    start: float
    end: float


@dataclass(slots=True)
class SpanLog:
    """One rank's spans of one step, in the order of their ends.

    Attributes:
        agreed: when every rank had begun this step.
    """

    actions: list[ActionSpan] = field(default_factory=list)
    waits: list[WaitSpan] = field(default_factory=list)
    messages: list[MessageSpan] = field(default_factory=list)
    agreed: float | None = None
    _sent: set[tuple[Message, int]] = field(default_factory=set)
    _posted: dict[Message, float] = field(default_factory=dict)
    _reducing: list[tuple[int, float]] = field(default_factory=list)

    def computed(self, action: Compute, start: float, end: float) -> None:
        """A forward or backward."""
        unit = (action.stage, action.microbatch, action.part)
        self.actions.append(ActionSpan(kind=_KIND_OF[type(action)], unit=unit, start=start, end=end))

    def reducing(self, stage: int) -> None:
        """The sum of a stage's gradients over the replicas begins; it lasts until it is seen to be done."""
        self._reducing.append((stage, now()))

    def reduced(self) -> None:
        """All sums that have begun are done."""
        end = now()
        for stage, start in self._reducing:
            self.actions.append(ActionSpan(kind="reduce", unit=(stage, -1, 0), start=start, end=end))
        self._reducing.clear()

    def stepped(self, stages: Sequence[int], start: float, end: float) -> None:
        """The optimizer stepped, for all stages of this rank at once."""
        self.actions.append(ActionSpan(kind="step", unit=(stages[0], -1, 0), start=start, end=end))

    def sent(self, message: Message, peer: int, start: float, end: float) -> None:
        """A message was handed over for a rank; a second call for both is a wait until it has left."""
        if (message, peer) not in self._sent:
            self._sent.add((message, peer))
            self.messages.append(MessageSpan(message=message, is_send=True, start=start, end=end))
        else:
            self.waits.append(WaitSpan(what="a message to leave", start=start, end=end))

    def received(self, message: Message, start: float, end: float) -> None:
        """A receive was posted; a second call for the same message is the wait for its tensor."""
        if message not in self._posted:
            self._posted[message] = start
            return
        posted = self._posted.pop(message)
        self.messages.append(MessageSpan(message=message, is_send=False, start=posted, end=end))
        self.waits.append(WaitSpan(what="a message", start=start, end=end, message=message))

    def waited(self, what: str, start: float, end: float) -> None:
        """A wait for something else than a message. One before any action is for every rank to begin the step."""
        if self.agreed is None and not self.actions:
            self.agreed = end
        self.waits.append(WaitSpan(what=what, start=start, end=end))


def now() -> float:
    """Seconds of the clock of all spans."""
    return time.perf_counter()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """What one rank knows of a step.

    Attributes:
        replica, rank: where it stands; `rank` within the replica.
        machine: whose clock its seconds are of.
        agreed: when every rank had begun the step.
        log: its spans.
        predicted: events of its replica as simulated; empty but on one rank of each replica.
    """

    replica: int
    rank: int
    machine: str
    agreed: float
    log: SpanLog
    predicted: list[dict[str, Any]] = field(default_factory=list)


def rank_trace(
    log: SpanLog, *, replica: int, rank: int, predicted: Timeline | None = None, scale: float = 1.0
) -> RankTrace:
    """Close a rank's log.

    Args:
        log: of the step.
        replica, rank: where this rank stands.
        predicted: the simulated timeline of this replica; given on one of its ranks.
        scale: wall seconds per predicted second; not 1 in an emulated run.
    """
    first = [span.start for span in log.actions]
    agreed = log.agreed if log.agreed is not None else min(first, default=now())  # A single process agrees with none.
    events = [] if predicted is None else [_scaled(event, scale) for event in trace_events(predicted)]
    return RankTrace(replica=replica, rank=rank, machine=platform.node(), agreed=agreed, log=log, predicted=events)


def merged_events(traces: Sequence[RankTrace], shape: PipelineShape) -> list[dict[str, Any]]:
    """One trace of all ranks: a process per replica as measured, and behind them one per replica as simulated.

    Args:
        traces: of every pipeline rank of every replica.
        shape: of a replica.

    Returns:
        Chrome trace events; microsecond 0 is when all ranks had begun the step.
    """
    zero: dict[str, float] = {}
    for trace in traces:
        zero[trace.machine] = min(trace.agreed, zero.get(trace.machine, trace.agreed))
    num_replicas = 1 + max(trace.replica for trace in traces)
    names = [f"replica {replica}, measured" for replica in range(num_replicas)]
    events = process_names(shape, names)
    arrows: dict[tuple[int, Message], int] = {}
    for trace in traces:
        events += _rank_events(trace, shape, zero[trace.machine], arrows)
    names = [f"replica {replica}, simulated" for replica in range(num_replicas)]
    events += process_names(shape, names, first=num_replicas)
    for trace in traces:
        moved = (event for event in trace.predicted if event["ph"] != "M")
        events += [{**event, "pid": num_replicas + trace.replica} for event in moved]
    return events


def _rank_events(
    trace: RankTrace, shape: PipelineShape, zero: float, arrows: dict[tuple[int, Message], int]
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    common = {"pid": trace.replica, "tid": trace.rank}
    for span in trace.log.actions:
        ends = {"start": span.start - zero, "end": span.end - zero}
        events.append(action_event(shape, trace.replica, trace.rank, span.kind, span.unit, **ends))

    def at(seconds: float) -> float:
        return (seconds - zero) * MICROSECONDS

    def arrow(message: Message, phase: str, seconds: float) -> None:
        number = arrows.setdefault((trace.replica, message), len(arrows))
        events.append({**common, "ph": phase, "bp": "e", "cat": "message", "name": "message", "id": number}
                      | {"ts": at(seconds)})  # fmt: skip

    for wait in trace.log.waits:
        args = {"for": wait.what} if wait.message is None else _arguments(wait.message, shape)
        span_of = {"ts": at(wait.start), "dur": (wait.end - wait.start) * MICROSECONDS}
        events.append({**common, "ph": "X", "name": "wait", "cat": "wait", "args": args, **span_of})
        if wait.message is not None:
            arrow(wait.message, "f", wait.end)
    begun: set[Message] = set()
    for one in trace.log.messages:
        args = _arguments(one.message, shape)
        if one.is_send:
            span_of = {"ts": at(one.start), "dur": (one.end - one.start) * MICROSECONDS}
            events.append({**common, "ph": "X", "name": "send", "cat": "send", "args": args, **span_of})
            if one.message not in begun:  # Of several devices that take it, the first is in the trace.
                begun.add(one.message)
                arrow(one.message, "s", one.start)
            continue
        # Several are expected at once, so they are no slices of the rank's thread.
        number = arrows.setdefault((trace.replica, one.message), len(arrows))
        for phase, seconds in (("b", one.start), ("e", one.end)):
            event = {**common, "ph": phase, "name": "receive", "cat": "receive", "id": number, "ts": at(seconds)}
            events.append({**event, "args": args})
    return events


def _arguments(message: Message, shape: PipelineShape) -> dict[str, Any]:
    ranks = shape.ranks_of_stages
    return {
        "from": f"stage {message.source_stage} on rank {ranks[message.source_stage]}",
        "to": f"stage {message.target_stage} on rank {ranks[message.target_stage]}",
        "microbatch": message.microbatch,
        "part": message.part,
    }


def _scaled(event: dict[str, Any], scale: float) -> dict[str, Any]:
    return event | {name: event[name] * scale for name in ("ts", "dur") if name in event}
