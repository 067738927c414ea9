"""Why ranks wait: every idle second of a rank has exactly one cause.

A gap ends with an event whose last input came late. In this order:

- `communication`: the part of a gap in which that input was computed but still on its way.
- `deferred_gradients`: before a backward of an encoder unit that a later microbatch consumes: the part of the gap after
  the language model had finished the backward of the unit's own microbatch, when the gradient would have been there
  without deferral (the whole gap, if the language model has no such microbatch).
- `fill`: gaps up to the rank's first backward (up to its first forward, if it runs no backward).
- `drain`: later gaps behind the rank's last forward, and the time from its last event to the replica's end.
- Gaps between fill and drain would vanish if all stages and microbatches were equal. The same order is played once more
  with every operation of a stage taking that stage's mean time and transfers taking none: `stage_imbalance` is what
  remains then (at most the gaps themselves), `microbatch_imbalance` the rest.
- `stage_imbalance` is also all of the time of a rank that has no work while its replica has some.
- `replica_imbalance`: from the end of the own replica to the end of the slowest one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from entrain_opt.schedule.replay import replay
from entrain_opt.simulator.run import ReplicaRun, produced_seconds

if TYPE_CHECKING:
    from entrain_opt.simulator.timeline import Timeline

FloatArray = NDArray[np.float64]

CAUSES = (
    "fill",
    "drain",
    "stage_imbalance",
    "microbatch_imbalance",
    "deferred_gradients",
    "communication",
    "replica_imbalance",
)


def bubble_causes(timeline: Timeline) -> dict[str, FloatArray]:
    """[replicas, ranks] idle seconds by cause; they add up to the idle time."""
    size = (timeline.num_replicas, timeline.shape.num_ranks)
    causes = {name: np.zeros(size) for name in CAUSES}
    pipeline = timeline.pipeline_seconds
    for replica, run in enumerate(timeline.runs):
        end = run.times.makespan_seconds
        actual, mean = _steady_and_rest(run), _mean_steady(run)
        for rank in range(timeline.shape.num_ranks):
            causes["replica_imbalance"][replica, rank] = pipeline - end
            if not run.orders[rank]:
                causes["stage_imbalance"][replica, rank] = end
                continue
            for name in ("fill", "drain", "deferred_gradients", "communication"):
                causes[name][replica, rank] = actual[rank][name]
            stage_part = min(actual[rank]["steady"], mean[rank])
            causes["stage_imbalance"][replica, rank] = stage_part
            causes["microbatch_imbalance"][replica, rank] = actual[rank]["steady"] - stage_part
    return causes


def _steady_and_rest(run: ReplicaRun) -> list[dict[str, float]]:
    """Per rank: idle seconds of the replica's own time, with the gaps of neither fill nor drain as `steady`."""
    start, end = run.times.start, run.times.end
    produced = produced_seconds(run)
    without_deferral = _gradient_without_deferral(run)
    result: list[dict[str, float]] = []
    for order in run.orders:
        operations = np.array(order, dtype=np.int64)
        if not len(operations):
            result.append({})
            continue
        since = np.concatenate([[0.0], end[operations[:-1]]])
        until = start[operations]
        computed = np.clip(produced[operations], since, until)
        deferred_from = np.clip(without_deferral[operations], since, computed)
        rest = deferred_from - since
        fill, drain = _phases(operations, run.graph.num_slots)
        result.append(
            {
                "communication": float((until - computed).sum()),
                "deferred_gradients": float((computed - deferred_from).sum()),
                "fill": float(rest[fill].sum()),
                "drain": float(rest[drain].sum()) + run.times.makespan_seconds - float(end[operations[-1]]),
                "steady": float(rest[~fill & ~drain].sum()),
            }
        )
    return result


def _phases(operations: NDArray[np.int64], num_slots: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which gaps (each before the operation at its place) belong to the fill and to the drain."""
    places = np.arange(len(operations))
    forwards = np.flatnonzero(operations < num_slots)
    backwards = np.flatnonzero(operations >= num_slots)
    fill = places <= (backwards[0] if len(backwards) else 0)
    drain = ~fill & (places > (forwards[-1] if len(forwards) else -1))
    return fill, drain


def _gradient_without_deferral(run: ReplicaRun) -> FloatArray:
    """[3 * slots] for the backward of a deferred encoder unit: when its own microbatch's gradient was there.

    Infinite for every other operation, so that nothing of its gap counts as deferral.
    """
    graph, count = run.graph, run.graph.num_slots
    first_llm = graph.shape.num_encoder_stages
    result = np.full(3 * count, np.inf)
    llm_slot = {graph.slot_microbatch[slot]: slot for slot in graph.slots_of_stage(first_llm)}
    for stage in range(first_llm):
        if not graph.shape.has_backward[stage]:
            continue
        encoder = graph.shape.encoder_of_stage(stage)
        assert encoder is not None
        for unit, slot in enumerate(graph.slots_of_stage(stage)):
            consumer = graph.stage_first[first_llm] + graph.encoder_consumers[encoder][unit][0]
            microbatch = graph.slot_microbatch[slot]
            if graph.slot_microbatch[consumer] > microbatch:
                own = llm_slot.get(microbatch)
                result[count + slot] = 0.0 if own is None else run.times.end[count + own]
    return result


def _mean_steady(run: ReplicaRun) -> list[float]:
    """Per rank: steady idle seconds if every operation of a stage took that stage's mean and transfers took none."""
    graph, count = run.graph, run.graph.num_slots
    durations = run.seconds.operations(run.split)
    group = np.concatenate(
        [np.asarray(graph.slot_stage, dtype=np.int64) + kind * graph.shape.num_stages for kind in range(3)]
    )
    sizes = np.bincount(group, minlength=3 * graph.shape.num_stages)
    means = np.bincount(group, weights=durations, minlength=len(sizes)) / np.maximum(sizes, 1)
    times = replay(graph, run.orders, means[group], np.zeros(count))
    start, end = times.start, times.end
    steady = []
    for order in run.orders:
        operations = np.array(order, dtype=np.int64)
        if not len(operations):
            steady.append(0.0)
            continue
        fill, drain = _phases(operations, count)
        gaps = start[operations] - np.concatenate([[0.0], end[operations[:-1]]])
        steady.append(float(gaps[~fill & ~drain].sum()))
    return steady
