"""What a rank does and waits for, in words.

Every wait for another rank goes through `WaitLog.on`. So a watchdog in another thread can say which rank waits for what
while it waits, and a connection that breaks raises an error that says the same.

Price: two attribute writes, one object and one reading of the clock per wait; the words are made only when somebody
reads them. Where a step is traced, the same reading begins the span.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist

from entrain_opt.errors import TrainingError
from entrain_opt.runtime.spans import SpanLog, now
from entrain_opt.schedule.actions import Message


class PeerLost(TrainingError):
    """This rank waited for another one, and the connection broke or the time was up."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message that a rank waits to receive."""

    message: Message
    peer: int

    def __str__(self) -> str:
        m = self.message
        forward = m.source_stage < m.target_stage
        what, direction = ("activations", "forward") if forward else ("gradients", "backward")
        return (
            f"{what} of microbatch {m.microbatch}, part {m.part}, from stage {m.source_stage} to stage "
            f"{m.target_stage} ({direction}), sent by rank {self.peer}"
        )


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message that a rank has sent and whose arrival it waits for."""

    message: Message
    peer: int

    def __str__(self) -> str:
        m = self.message
        return (
            f"rank {self.peer} to take the message of microbatch {m.microbatch}, part {m.part}, from stage "
            f"{m.source_stage} to stage {m.target_stage}"
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """What is waited for, and since when (on the clock of spans)."""

    what: object
    since_seconds: float

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return now() - self.since_seconds

    @property
    def peer(self) -> int | None:
        """The one rank that is waited for; None for several."""
        return getattr(self.what, "peer", None)

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s for {self.what}"


class WaitLog:
    """What one rank does now; written by its main thread, read by any.

    Attributes:
        doing: the action of the schedule that runs, or that the current wait belongs to.
        current: the wait that it is in, if any.
        spans: notes everything that this step does; None if nobody asked for it.
    """

    def __init__(self) -> None:
        self.spans: SpanLog | None = None
        self.doing: object = "no step yet"
        self.current: Wait | None = None

    def on(self, what: object) -> _Waiting:
        """Context of one wait; `what` completes the words "waits for".

        Raises:
            PeerLost: in place of the RuntimeError with which a broken connection or a timeout shows itself.
        """
        return _Waiting(self, what)

    def describe(self) -> str:
        """What the rank does, as the end of a sentence that begins with its name."""
        wait = self.current
        return f"has waited {wait} (at {self.doing})" if wait is not None else f"is at {self.doing}"


class _Waiting:
    __slots__ = ("_log", "_outer", "_wait", "_what")

    def __init__(self, log: WaitLog, what: object) -> None:
        self._log = log
        self._what = what
        self._outer: Wait | None = None

    def __enter__(self) -> None:
        self._outer = self._log.current
        self._wait = self._log.current = Wait(self._what, now())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._log.current = self._outer
        if isinstance(error, RuntimeError):
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise PeerLost(f"Rank {dist.get_rank()} waited {self._wait}, in vain: {first_line}") from error
        if self._log.spans is not None:
            self._note(self._log.spans)

    def _note(self, spans: SpanLog) -> None:
        start, end = self._wait.since_seconds, now()
        match self._what:
            case Incoming(message=message):
                spans.received(message, start, end)
            case Outgoing(message=message, peer=peer):
                spans.sent(message, peer, start, end)
            case what:
                spans.waited(str(what), start, end)
