"""What would happen: every replica's schedule played through with the predicted costs.

Model, and what it leaves out:
- A rank computes one action at a time, in its order, as soon as the inputs are there.
- Transfers overlap compute and start when their output is ready; each pair of ranks carries one message at a time in
  each direction. Compute is not slowed down by transfers.
- The data-parallel reduction of a stage starts when the slowest replica has finished the stage's last backward; it
  overlaps compute of other stages on the rank and runs one after the other per rank, last stage first.
- Optimizer steps of a rank follow its compute and the stage's reduction, one after the other.
- The slowest replica decides; an optimizer step never starts the next iteration early.

Price: about 2 us per action; memory O(actions).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assignment import Assignment, BatchCosts, StageCosts
from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule.orders import ReplicaSchedule
from entrain_opt.simulator.memory import memory_curves
from entrain_opt.simulator.run import ReplicaRun, produced_seconds, run_replica, schedules_of_replicas
from entrain_opt.simulator.timeline import REDUCE, STEP, Events, Timeline

FloatArray = NDArray[np.float64]


def simulate(
    costs: BatchCosts,
    assignment: Assignment,
    shape: PipelineShape,
    *,
    schedule: str | ReplicaSchedule | Sequence[ReplicaSchedule] = "eager",
    trained_stages: Sequence[bool] | None = None,
) -> Timeline:
    """Play one iteration of all replicas through.

    Args:
        costs: of the global batch.
        assignment: which sample in which microbatch of which replica.
        shape: the stages of every replica.
        schedule: the name of an order (`schedule.ORDERS`), or the schedule of each replica.
        trained_stages: which stages hold trained weights; None takes those that run a backward pass.

    Raises:
        ScheduleError: unknown order, a memory limit that makes progress impossible, or a schedule of other work.
    """
    stages = costs.stage_costs(shape)
    if len(stages.forward_seconds) != shape.num_stages:
        raise ScheduleError(
            f"costs.stages: expected costs of {shape.num_stages} stages, found {len(stages.forward_seconds)}. "
            f"Make them for the same shape."
        )
    trained = tuple(shape.has_backward if trained_stages is None else trained_stages)
    runs = tuple(
        run_replica(costs, assignment, shape, replica, schedule=one, stages=stages)
        for replica, one in enumerate(schedules_of_replicas(schedule, assignment.num_replicas))
    )
    events = [_compute_events(replica, run) for replica, run in enumerate(runs)]
    events.append(_update_events(runs, shape, stages, trained))
    joined = Events.join(events)
    return Timeline(
        shape=shape,
        num_replicas=assignment.num_replicas,
        events=joined,
        makespan_seconds=float(joined.end.max(initial=0.0)),
        memory=tuple(tuple(memory_curves(run, costs, stages)) for run in runs),
        runs=runs,
    )


def _compute_events(replica: int, run: ReplicaRun) -> Events:
    graph, count = run.graph, run.graph.num_slots
    operations = np.array(list(chain.from_iterable(run.orders)), dtype=np.int64)
    slot = operations % max(count, 1)
    is_split = np.zeros(count + 1, dtype=bool)
    is_split[list(run.split)] = True
    kind = operations // max(count, 1)
    kind = np.where(kind == 2, 3, kind + ((kind == 1) & is_split[slot]))
    rank = np.repeat(np.arange(len(run.orders)), [len(order) for order in run.orders])

    def column(values: list[int]) -> NDArray[np.int64]:
        return np.asarray(values, dtype=np.int64)[slot]

    return Events(
        replica=np.full(len(operations), replica),
        rank=rank,
        kind=kind,
        stage=column(graph.slot_stage),
        microbatch=column(graph.slot_microbatch),
        part=column(graph.slot_part),
        start=run.times.start[operations],
        end=run.times.end[operations],
        arrived=run.times.ready[operations],
        produced=produced_seconds(run)[operations],
    )


def _update_events(
    runs: tuple[ReplicaRun, ...], shape: PipelineShape, stages: StageCosts, trained: tuple[bool, ...]
) -> Events:
    """Reductions over the replicas and optimizer steps."""
    reduce_seconds = stages.reduce_seconds or (0.0,) * shape.num_stages
    step_seconds = stages.step_seconds or (0.0,) * shape.num_stages
    rows: list[tuple[float, ...]] = []
    for rank in range(shape.num_ranks):
        held = [stage for stage in shape.stages_of_rank(rank) if trained[stage]]
        compute_end = [float(run.times.end[run.orders[rank]].max(initial=0.0)) for run in runs]
        reduced: dict[int, float] = {}
        free = 0.0
        for stage in reversed(held):
            ready = max(
                (_gradients_ready(run, stage, end) for run, end in zip(runs, compute_end, strict=True)), default=0.0
            )
            start = max(ready, free)
            free = reduced[stage] = start + reduce_seconds[stage]
            rows += [(replica, rank, REDUCE, stage, start, free, ready) for replica in range(len(runs))]
        for replica, free_at in enumerate(compute_end):
            now = free_at
            for stage in held:
                start = max(now, reduced[stage])
                now = start + step_seconds[stage]
                rows.append((replica, rank, STEP, stage, start, now, reduced[stage]))
    table = np.array(rows, dtype=np.float64).reshape(-1, 7)
    replica_, rank_, kind, stage_ = table[:, :4].astype(np.int64).T
    nothing = np.full(len(table), -1)
    return Events(
        replica=replica_,
        rank=rank_,
        kind=kind,
        stage=stage_,
        microbatch=nothing,
        part=nothing,
        start=table[:, 4],
        end=table[:, 5],
        arrived=table[:, 6],
        produced=table[:, 6],
    )


def _gradients_ready(run: ReplicaRun, stage: int, compute_end: float) -> float:
    """End of a stage's last backward; a stage without work is ready when its rank is."""
    graph, count = run.graph, run.graph.num_slots
    slots = graph.slots_of_stage(stage)
    if not slots:
        return compute_end
    last = np.array([2 if slot in run.split else 1 for slot in slots]) if run.split else 1
    return float(run.times.end[last * count + np.arange(slots.start, slots.stop)].max())
