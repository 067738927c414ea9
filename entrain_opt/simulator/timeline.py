"""What happened when, and what it says: makespan, bubbles and their causes, memory, a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from entrain_opt.plan import PipelineShape
from entrain_opt.simulator.memory import MemoryCurve
from entrain_opt.simulator.run import ReplicaRun
from entrain_opt.units import format_bytes, format_seconds

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

KINDS = ("forward", "backward", "backward_input", "backward_weight", "reduce", "step")
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, REDUCE, STEP = range(6)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Events:
    """Columns of A events: compute by replica, rank and start; then reductions and steps.

    Attributes:
        replica, rank: where.
        kind: index into `KINDS`.
        stage, microbatch, part: what; microbatch and part are -1 for reductions and steps.
        start, end: seconds.
        arrived: when the last input was on the rank.
        produced: when the last input had been computed, before its transfer.
    """

    replica: IntArray
    rank: IntArray
    kind: IntArray
    stage: IntArray
    microbatch: IntArray
    part: IntArray
    start: FloatArray
    end: FloatArray
    arrived: FloatArray
    produced: FloatArray

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def join(cls, pieces: list[Events]) -> Events:
        return cls(**{f.name: np.concatenate([getattr(piece, f.name) for piece in pieces]) for f in fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """One simulated iteration.

    Attributes:
        shape: the stages of every replica.
        num_replicas: data-parallel replicas.
        events: everything that ran.
        makespan_seconds: iteration time: the last event's end, optimizer step included.
        memory: per replica, per rank, bytes over time.
        runs: per replica, the operations played through.
    """

    shape: PipelineShape
    num_replicas: int
    events: Events
    makespan_seconds: float
    memory: tuple[tuple[MemoryCurve, ...], ...] = field(repr=False)
    runs: tuple[ReplicaRun, ...] = field(repr=False)

    @property
    def pipeline_seconds(self) -> float:
        """End of the slowest replica's last forward or backward."""
        return max((run.times.makespan_seconds for run in self.runs), default=0.0)

    @property
    def busy_seconds(self) -> FloatArray:
        """[replicas, ranks] seconds of forwards and backwards."""
        events = self.events
        compute = events.kind < REDUCE
        place = events.replica[compute] * self.shape.num_ranks + events.rank[compute]
        seconds = (events.end - events.start)[compute]
        size = self.num_replicas * self.shape.num_ranks
        busy = np.bincount(place, weights=seconds, minlength=size).astype(np.float64, copy=False)
        return busy.reshape(self.num_replicas, self.shape.num_ranks)

    @property
    def idle_seconds(self) -> FloatArray:
        """[replicas, ranks] seconds until the slowest replica's pipeline ends in which a rank computes nothing."""
        return self.pipeline_seconds - self.busy_seconds

    @property
    def bubble_share_of_rank(self) -> FloatArray:
        """[replicas, ranks] idle part of the slowest replica's pipeline time; 0 if nothing runs."""
        pipeline = self.pipeline_seconds
        return self.idle_seconds / pipeline if pipeline > 0 else np.zeros_like(self.busy_seconds)

    @property
    def bubble_share(self) -> float:
        """Mean over all ranks of all replicas."""
        return float(self.bubble_share_of_rank.mean())

    def bubble_share_of_devices(self, widths: Sequence[int]) -> float:
        """Mean over all devices of all replicas.

        Args:
            widths: devices of each rank.
        """
        return float(np.average(self.bubble_share_of_rank.mean(axis=0), weights=widths))

    @property
    def peak_bytes(self) -> FloatArray:
        """[replicas, ranks] highest number of bytes held at once."""
        return np.array([[curve.peak_bytes for curve in curves] for curves in self.memory])

    def bubble_causes(self) -> dict[str, FloatArray]:
        """[replicas, ranks] idle seconds by cause; they add up to `idle_seconds`. See causes.py for definitions."""
        from entrain_opt.simulator.causes import bubble_causes

        return bubble_causes(self)

    def write_trace(self, path: str | Path) -> None:
        """Write a Chrome/Perfetto trace; open it at ui.perfetto.dev."""
        from entrain_opt.simulator.trace import write_trace

        write_trace(self, Path(path))

    def table(self) -> str:
        """The iteration in words and one line per rank."""
        causes = self.bubble_causes()
        share = self.bubble_share_of_rank
        lines = [
            f"iteration {format_seconds(self.makespan_seconds)}, pipeline {format_seconds(self.pipeline_seconds)}, "
            f"bubbles {100 * self.bubble_share:.1f} %",
            f"{'replica':>7} {'rank':>4} {'stages':>8} {'bubble':>7} {'peak':>10}  idle for",
        ]
        for replica in range(self.num_replicas):
            for rank in range(self.shape.num_ranks):
                stages = ",".join(map(str, self.shape.stages_of_rank(rank)))
                parts = [
                    f"{name.replace('_', ' ')} {format_seconds(seconds[replica, rank])}"
                    for name, seconds in causes.items()
                    if seconds[replica, rank] > 1e-9 * max(self.pipeline_seconds, 1e-300)
                ]
                lines.append(
                    f"{replica:>7} {rank:>4} {stages:>8} {100 * share[replica, rank]:>5.1f} % "
                    f"{format_bytes(self.memory[replica][rank].peak_bytes):>10}  {', '.join(parts)}"
                )
        return "\n".join(lines)
