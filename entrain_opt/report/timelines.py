"""A simulated iteration as pictures see it: bars and arrows, loads, idle time and memory of each rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assignment import BatchCosts
from entrain_opt.cost import CostModel
from entrain_opt.plan import Plan
from entrain_opt.planner.replay import parts_at_peak, peak_parts
from entrain_opt.report.bench import MicrobatchLoads
from entrain_opt.report.views import (
    Arrow,
    Bar,
    BubblesView,
    LoadsView,
    MemoryCurveView,
    MemoryPeakView,
    TimelineView,
)
from entrain_opt.schedule.work import EncoderUnit
from entrain_opt.simulator import Timeline
from entrain_opt.simulator.run import ReplicaRun
from entrain_opt.simulator.timeline import REDUCE
from entrain_opt.units import format_bytes, format_seconds

#: Meaning of each cause of `simulator/causes.py`, in a few words.
CAUSE_MEANINGS = {
    "fill": "waiting for the first microbatches to arrive",
    "drain": "waiting for the last gradients",
    "stage_imbalance": "another stage is slower on average",
    "microbatch_imbalance": "microbatches differ in size",
    "deferred_gradients": "gradients of deferred samples come later",
    "communication": "inputs still on their way",
    "replica_imbalance": "another replica is slower",
}


def rank_names(plan: Plan) -> tuple[str, ...]:
    """`0 · vision 0-7` for each pipeline rank."""
    names = []
    for rank in range(plan.degrees.pipeline):
        held = [stage for stage in plan.stages if stage.rank == rank]
        names.append(f"{rank} · " + ", ".join(f"{s.module} {s.layers[0]}-{s.layers[1] - 1}" for s in held))
    return tuple(names)


def timeline_view(
    timeline: Timeline, costs: BatchCosts, plan: Plan, replica: int, *, limit_seconds: float | None = None
) -> TimelineView:
    """Bars and arrows of one replica; `limit_seconds` is the end of the axis, None for that of the iteration."""
    run = timeline.runs[replica]
    bars = [bar for rank in range(len(run.orders)) for bar in _compute_bars(run, costs, plan, rank)]
    events = timeline.events
    for index in np.flatnonzero((events.replica == replica) & (events.kind >= REDUCE)):
        if events.end[index] > events.start[index]:
            kind = "gradient reduction" if events.kind[index] == REDUCE else "optimizer step"
            bars.append(
                Bar(
                    rank=int(events.rank[index]),
                    kind=kind,
                    label="",
                    what=plan.stages[int(events.stage[index])].module,
                    start=float(events.start[index]),
                    seconds=float(events.end[index] - events.start[index]),
                )
            )
    arrows = _arrows(run)
    busy = timeline.busy_seconds[replica] / max(timeline.makespan_seconds, 1e-12)
    return TimelineView(
        ranks=rank_names(plan),
        bars=tuple(bars),
        arrows=arrows,
        end_seconds=timeline.makespan_seconds,
        limit_seconds=limit_seconds or timeline.makespan_seconds,
        summary=(
            f"Replica {replica}: {len(busy)} pipeline ranks, iteration of {format_seconds(timeline.makespan_seconds)}. "
            f"Ranks compute {busy.min():.0%} to {busy.max():.0%} of the time. "
            + (f"{len(arrows)} encoder outputs are deferred." if arrows else "Nothing is deferred.")
        ),
    )


def _compute_bars(run: ReplicaRun, costs: BatchCosts, plan: Plan, rank: int) -> list[Bar]:
    graph, count = run.graph, run.graph.num_slots
    bars = []
    for operation in run.orders[rank]:
        kind, slot = divmod(operation, count)
        stage = graph.slot_stage[slot]
        unit = graph.units[stage][slot - graph.stage_first[stage]]
        label = str(unit.microbatch)
        if isinstance(unit, EncoderUnit):
            label += f".{unit.part}" if unit.part else ""
            waits = unit.consumers[0] > unit.microbatch
            name = "deferred" if waits else "encoder"
            samples = len(np.unique(costs.media_sample[unit.media]))
            patches = int(costs.patches[unit.media].sum())
            contents = f"{samples} samples, {len(unit.media)} media, {patches:,} patches"
            if waits:
                contents += f", for microbatch {', '.join(map(str, unit.consumers))}"
        else:
            name = "LLM"
            contents = f"{len(unit.samples)} samples, {int(costs.tokens[unit.samples].sum()):,} tokens"
        bars.append(
            Bar(
                rank=rank,
                kind=f"{name} forward" if kind == 0 else f"{name} backward" if kind == 1 else "weight gradients",
                label=label,
                what=f"{plan.stages[stage].module}, microbatch {label}",
                start=float(run.times.start[operation]),
                seconds=float(run.times.end[operation] - run.times.start[operation]),
                contents=contents,
            )
        )
    return bars


def _arrows(run: ReplicaRun) -> tuple[Arrow, ...]:
    graph, shape = run.graph, run.graph.shape
    return tuple(
        Arrow(
            from_rank=graph.slot_rank[slot],
            from_seconds=float(run.times.end[slot]),
            to_rank=graph.slot_rank[target],
            to_seconds=float(run.times.start[target]),
        )
        for encoder in range(shape.num_encoders)
        for slot in graph.slots_of_stage(shape.stages_of_encoder(encoder)[-1])
        for target in graph.forward_targets[slot]
        if graph.slot_microbatch[target] > graph.slot_microbatch[slot]
    )


def loads_view(loads: MicrobatchLoads, replica: int, *, limit_seconds: float) -> LoadsView:
    """The microbatches of one replica."""
    encoder, llm = loads.encoder[replica], loads.llm[replica]

    def said(name: str, values: np.ndarray) -> str:
        if not len(values) or values.sum() <= 0:
            return f"{name}: no work"
        return f"{name}: largest {values.max() / values.mean():.2f} times the mean"

    return LoadsView(
        encoder=tuple(encoder.tolist()),
        encoder_deferred=tuple(loads.encoder_deferred[replica].tolist()),
        llm=tuple(llm.tolist()),
        llm_deferred=tuple(loads.llm_deferred[replica].tolist()),
        limit_seconds=limit_seconds,
        summary=f"{len(llm)} microbatches. {said('Encoder', encoder)}. {said('LLM', llm)}.",
    )


def bubbles_view(timeline: Timeline, plan: Plan, *, limit_seconds: float) -> BubblesView:
    """Why ranks wait, means over replicas."""
    causes = timeline.bubble_causes()
    total = timeline.idle_seconds.mean(axis=0)
    largest = max(causes, key=lambda name: float(causes[name].sum()))
    share = float(causes[largest].sum()) / max(float(timeline.idle_seconds.sum()), 1e-12)
    return BubblesView(
        ranks=rank_names(plan),
        causes=tuple(
            (name.replace("_", " "), CAUSE_MEANINGS[name], tuple(seconds.mean(axis=0).tolist()))
            for name, seconds in causes.items()
        ),
        limit_seconds=limit_seconds,
        summary=(
            f"Ranks wait {format_seconds(float(total.min()))} to {format_seconds(float(total.max()))} of "
            f"{format_seconds(timeline.pipeline_seconds)}; {share:.0%} of it is {largest.replace('_', ' ')} "
            f"({CAUSE_MEANINGS[largest]})."
        ),
    )


def memory_peak_view(
    timeline: Timeline, costs: CostModel, plan: Plan, recomputed: NDArray[np.float64], *, limit_bytes: int
) -> MemoryPeakView:
    """What makes up the peak of each pipeline rank, on the replica where it is highest.

    Args:
        timeline: of one iteration.
        costs: of the model.
        plan: that it is of.
        recomputed: [replicas, ranks] from `recomputed_bytes`.
        limit_bytes: memory of one rank.
    """
    parts: dict[str, list[float]] = {}
    for rank in range(plan.degrees.pipeline):
        peaks = timeline.peak_bytes[:, rank] + recomputed[:, rank]
        replica = int(peaks.argmax())
        moving = parts_at_peak(timeline.memory[replica][rank].parts)
        for name, value in peak_parts(costs, plan, rank, moving, float(recomputed[replica, rank])).items():
            parts.setdefault(name, []).append(value)
    totals = np.array(list(parts.values())).sum(axis=0)
    worst = int(totals.argmax())
    return MemoryPeakView(
        ranks=rank_names(plan),
        parts=tuple((name, tuple(values)) for name, values in parts.items() if any(values)),
        limit_bytes=float(limit_bytes),
        summary=(
            f"Rank {worst} needs most: {format_bytes(float(totals[worst]))} of {format_bytes(limit_bytes)}; rank "
            f"{int(totals.argmin())} least: {format_bytes(float(totals.min()))}."
        ),
    )


def memory_curve_view(timeline: Timeline, plan: Plan, replica: int, *, limit_bytes: int) -> MemoryCurveView:
    """Bytes over time of one replica."""
    seconds, num_bytes = [], []
    for curve in timeline.memory[replica]:
        # Of changes at one instant only the last is a state.
        last = np.append(np.diff(curve.seconds) > 0, True)[: len(curve.seconds)]
        times, total = curve.seconds[last], curve.parts.sum(axis=1)[last] + curve.weight_bytes
        seconds.append((0.0, *times.tolist(), timeline.makespan_seconds))
        end = float(total[-1]) if len(total) else curve.weight_bytes
        num_bytes.append((curve.weight_bytes, *total.tolist(), end))
    peaks = [max(values) for values in num_bytes]
    return MemoryCurveView(
        ranks=rank_names(plan),
        seconds=tuple(seconds),
        num_bytes=tuple(num_bytes),
        end_seconds=timeline.makespan_seconds,
        limit_bytes=float(limit_bytes),
        summary=f"Replica {replica}: peaks from {format_bytes(min(peaks))} to {format_bytes(max(peaks))}.",
    )
