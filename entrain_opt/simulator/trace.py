"""A timeline as Chrome trace events, for ui.perfetto.dev or chrome://tracing.

One process per replica, one thread per rank (named by its stages), a second one for its gradient reductions, which
overlap compute. Arrows join an encoder unit with the later microbatch that its samples were deferred to, and that
microbatch's gradient with the encoder's backward. Counters show bytes over time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrain_opt.plan import PipelineShape
from entrain_opt.simulator.memory import PARTS
from entrain_opt.simulator.run import ReplicaRun

if TYPE_CHECKING:
    from entrain_opt.simulator.timeline import Timeline

MICROSECONDS = 1e6
_LABELS = {
    "forward": "F",
    "backward": "B",
    "backward_input": "Bi",
    "backward_weight": "Bw",
    "reduce": "reduce",
    "step": "step",
}
#: Kinds that are about whole stages, not microbatches.
_OF_STAGES = ("reduce", "step")


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace as JSON, whole or not at all."""
    write_events(trace_events(timeline), path)


def write_events(events: list[dict[str, Any]], path: Path) -> None:
    """Write trace events as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".partial")
    scratch.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    scratch.replace(path)


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """The events of the trace, in the Chrome trace format; times in microseconds."""
    from entrain_opt.simulator.timeline import KINDS

    events = process_names(timeline.shape, [f"replica {replica}" for replica in range(timeline.num_replicas)])
    columns = timeline.events
    rows = zip(
        columns.replica.tolist(),
        columns.rank.tolist(),
        columns.kind.tolist(),
        columns.stage.tolist(),
        columns.microbatch.tolist(),
        columns.part.tolist(),
        columns.start.tolist(),
        columns.end.tolist(),
        strict=True,
    )
    for replica, rank, kind, stage, microbatch, part, start, end in rows:
        unit = (stage, microbatch, part)
        events.append(action_event(timeline.shape, replica, rank, KINDS[kind], unit, start=start, end=end))
    for replica, run in enumerate(timeline.runs):
        events += _arrows(run, replica, first_id=len(events))
    for replica, curves in enumerate(timeline.memory):
        for rank, curve in enumerate(curves):
            for seconds, parts in zip(curve.seconds.tolist(), curve.parts.tolist(), strict=True):
                values = {"weights": curve.weight_bytes, **dict(zip(PARTS, parts, strict=True))}
                events.append(
                    {
                        "ph": "C",
                        "name": f"rank {rank} bytes",
                        "pid": replica,
                        "ts": seconds * MICROSECONDS,
                        "args": values,
                    }
                )
    return events


def action_event(
    shape: PipelineShape, process: int, rank: int, kind: str, unit: tuple[int, int, int], *, start: float, end: float
) -> dict[str, Any]:
    """What a rank did from start to end (seconds).

    Args:
        shape: of the replica.
        process: of the trace: one per replica.
        rank: pipeline rank.
        kind: one of `entrain_opt.simulator.timeline.KINDS`.
        unit: stage, microbatch, part; the last two mean nothing for reductions and steps.
    """
    stage, microbatch, part = unit
    label = _LABELS[kind]
    args: dict[str, Any] = {"stage": stage, "module": module_name(shape, stage)}
    if kind not in _OF_STAGES:
        label += f" {microbatch}" + (f".{part}" if part else "")
        args |= {"microbatch": microbatch, "part": part}
    return {
        "ph": "X",
        "name": label,
        "cat": kind,
        "pid": process,
        "tid": shape.num_ranks + rank if kind == "reduce" else rank,
        "ts": start * MICROSECONDS,
        "dur": (end - start) * MICROSECONDS,
        "args": args,
    }


def module_name(shape: PipelineShape, stage: int) -> str:
    """`encoder` (numbered, if there are several) or `llm`, with the stage's place in it."""
    encoder = shape.encoder_of_stage(stage)
    if encoder is None:
        return f"llm {stage - shape.num_encoder_stages}"
    number = str(encoder) if shape.num_encoders > 1 else ""
    return f"encoder{number} {stage - shape.stages_of_encoder(encoder)[0]}"


def process_names(shape: PipelineShape, names: list[str], *, first: int = 0) -> list[dict[str, Any]]:
    """Names of a trace's processes, one per replica and numbered from `first`, and of their threads."""
    events: list[dict[str, Any]] = []
    for process, title in enumerate(names, start=first):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}})
        for rank in range(shape.num_ranks):
            stages = ", ".join(module_name(shape, stage) for stage in shape.stages_of_rank(rank))
            for thread, name in ((rank, f"rank {rank}: {stages}"), (shape.num_ranks + rank, f"rank {rank}: reduce")):
                common = {"ph": "M", "pid": process, "tid": thread}
                events.append({**common, "name": "thread_name", "args": {"name": name}})
                events.append({**common, "name": "thread_sort_index", "args": {"sort_index": thread}})
    return events


def _arrows(run: ReplicaRun, replica: int, *, first_id: int) -> list[dict[str, Any]]:
    """From each deferred encoder forward to its later forward, and from the gradient back to the encoder's backward."""
    graph, count, times = run.graph, run.graph.num_slots, run.times
    shape = graph.shape
    events: list[dict[str, Any]] = []

    def arrow(name: str, source: int, target: int) -> None:
        for phase, operation, at in (("s", source, times.end[source]), ("f", target, times.start[target])):
            events.append(
                {
                    "ph": phase,
                    "bp": "e",
                    "name": name,
                    "cat": "deferral",
                    "id": first_id + len(events) // 2,
                    "pid": replica,
                    "tid": graph.slot_rank[operation % count],
                    "ts": float(at) * MICROSECONDS,
                }
            )

    for encoder in range(shape.num_encoders):
        for slot in graph.slots_of_stage(shape.stages_of_encoder(encoder)[-1]):
            for target in graph.forward_targets[slot]:
                if graph.slot_microbatch[target] > graph.slot_microbatch[slot]:
                    arrow("deferred", slot, target)
                    if shape.encoder_has_backward(encoder):
                        arrow("gradient of deferred", count + target, count + slot)
    return events
