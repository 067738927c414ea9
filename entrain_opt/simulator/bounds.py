"""What no schedule can beat, for a given assignment.

A rank cannot start before its first input can be there (*head*: the cheapest way through the stages before it), has to
do all of its work, and the iteration cannot end before what must follow its last action (*tail*). So
head + work + tail of any rank, and the longest chain of dependencies, are lower bounds of the pipeline's time.

With weight gradients that may run on their own (`split_backward=True`, the default, true for every order) nothing has
to follow the last action of a trained stage. With `split_backward=False`, for orders without split backwards, the
uniform case is exactly 1F1B's (K + P - 1)(f + b).

Price: O(stages * units).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule.durations import SlotSeconds, slot_seconds
from entrain_opt.schedule.graph import WorkGraph, work_graph
from entrain_opt.schedule.work import replica_work

FloatArray = NDArray[np.float64]


def work_bound(
    costs: BatchCosts, assignment: Assignment, shape: PipelineShape, *, split_backward: bool = True
) -> float:
    """Seconds that no schedule of this assignment can beat: the busiest rank with the waiting it cannot avoid."""
    bounds = rank_bounds(costs, assignment, shape, split_backward=split_backward)
    chains = [longest_chain(costs, assignment, shape, replica) for replica in range(assignment.num_replicas)]
    return max(float(bounds.max(initial=0.0)), *chains, 0.0)


def balanced_1f1b_bound(
    costs: BatchCosts, assignment: Assignment, shape: PipelineShape, *, split_backward: bool = True
) -> float:
    """What 1F1B would take if all work were even (`balanced_1f1b_seconds`), but never above `work_bound`.

    So no schedule of this assignment beats it; the difference to `work_bound` is what uneven microbatches, stages and
    replicas cost at least.
    """
    if not costs.num_samples:
        return 0.0
    even = balanced_1f1b_seconds(
        costs, shape, num_microbatches=int(assignment.num_microbatches.max()), num_replicas=assignment.num_replicas
    )
    return min(even, work_bound(costs, assignment, shape, split_backward=split_backward))


def balanced_1f1b_seconds(
    costs: BatchCosts, shape: PipelineShape, *, num_microbatches: int, num_replicas: int = 1
) -> float:
    """What 1F1B takes if all work were spread evenly over ranks, replicas and microbatches: (K + P - 1)(f + b).

    A yardstick, not a bound: split backwards, interleaved chunks, or small microbatches first and last beat it.

    Args:
        costs: of the global batch.
        shape: the stages of a replica.
        num_microbatches: of each replica.
        num_replicas: data-parallel replicas.
    """
    stages = costs.stage_costs(shape)
    ranks, total = shape.num_ranks, 0.0
    for stage in range(shape.num_stages):
        fixed = stages.forward_fixed_seconds[stage]
        total += float(stages.forward_seconds[stage].sum()) + fixed * num_microbatches * num_replicas
        if shape.has_backward[stage]:
            fixed = stages.backward_fixed_seconds[stage]
            total += float(stages.backward_seconds[stage].sum()) + fixed * num_microbatches * num_replicas
    return total / (num_replicas * ranks) * (num_microbatches + ranks - 1) / max(num_microbatches, 1)


def rank_bounds(
    costs: BatchCosts, assignment: Assignment, shape: PipelineShape, *, split_backward: bool = True
) -> FloatArray:
    """[replicas, ranks] head + work + tail of each rank; 0 for a rank without work."""
    bounds = np.zeros((assignment.num_replicas, shape.num_ranks))
    for replica in range(assignment.num_replicas):
        graph = work_graph(replica_work(costs, assignment, shape, replica), shape)
        seconds = slot_seconds(graph, costs)
        head, tail = _head(graph, seconds), _tail(graph, seconds, split_backward)
        rank_of = np.asarray(graph.slot_rank, dtype=np.int64)
        has_backward = np.asarray(shape.has_backward, dtype=bool)[np.asarray(graph.slot_stage, dtype=np.int64)]
        work = seconds.forward + np.where(has_backward, seconds.backward, 0.0)
        for rank in range(shape.num_ranks):
            mine = rank_of == rank
            if mine.any():
                bounds[replica, rank] = head[mine].min() + work[mine].sum() + tail[mine].min()
    return bounds


def longest_chain(costs: BatchCosts, assignment: Assignment, shape: PipelineShape, replica: int) -> float:
    """Seconds of the longest chain of dependencies of a replica, weight gradients left out."""
    graph = work_graph(replica_work(costs, assignment, shape, replica), shape)
    seconds = slot_seconds(graph, costs)
    head = _head(graph, seconds)
    back = _backward_end(graph, seconds, head + seconds.forward)
    return float(max((head + seconds.forward).max(initial=0.0), back.max(initial=0.0)))


def _least_backward(seconds: SlotSeconds) -> FloatArray:
    """[slots] seconds until upstream gets its gradients, split or whole."""
    return np.minimum(seconds.backward_input, seconds.backward)


def _head(graph: WorkGraph, seconds: SlotSeconds) -> FloatArray:
    """[slots] earliest start of each forward if no rank were ever busy. Slots stand in dependency order."""
    head = [0.0] * graph.num_slots
    forward, transfer = seconds.forward.tolist(), seconds.transfer.tolist()
    for slot in range(graph.num_slots):
        for target in graph.forward_targets[slot]:
            sent = transfer[slot] if graph.slot_rank[target] != graph.slot_rank[slot] else 0.0
            head[target] = max(head[target], head[slot] + forward[slot] + sent)
    return np.array(head)


def _backward_end(graph: WorkGraph, seconds: SlotSeconds, forward_end: FloatArray) -> FloatArray:
    """[slots] earliest end of each input backward if no rank were ever busy; 0 without a backward."""
    end = [0.0] * graph.num_slots
    start = forward_end.tolist()
    backward, transfer = _least_backward(seconds).tolist(), seconds.transfer.tolist()
    for slot in range(graph.num_slots - 1, -1, -1):
        if not graph.shape.has_backward[graph.slot_stage[slot]]:
            continue
        end[slot] = start[slot] + backward[slot]
        for target in graph.backward_targets[slot]:
            sent = transfer[target] if graph.slot_rank[target] != graph.slot_rank[slot] else 0.0
            start[target] = max(start[target], end[slot] + sent)
    return np.array(end)


def _tail(graph: WorkGraph, seconds: SlotSeconds, split_backward: bool) -> FloatArray:
    """[slots] what must follow the last action of each slot."""
    count = graph.num_slots
    after_backward, after_forward = [0.0] * count, [0.0] * count
    forward, transfer = seconds.forward.tolist(), seconds.transfer.tolist()
    backward = (_least_backward(seconds) if split_backward else seconds.backward).tolist()
    has_backward = [graph.shape.has_backward[stage] for stage in graph.slot_stage]
    for slot in range(count):
        for target in graph.backward_targets[slot]:
            sent = transfer[target] if graph.slot_rank[target] != graph.slot_rank[slot] else 0.0
            after_backward[slot] = max(after_backward[slot], sent + backward[target] + after_backward[target])
    for slot in range(count - 1, -1, -1):
        own = backward[slot] + after_backward[slot] if has_backward[slot] else 0.0
        for target in graph.forward_targets[slot]:
            sent = transfer[slot] if graph.slot_rank[target] != graph.slot_rank[slot] else 0.0
            own = max(own, sent + forward[target] + after_forward[target])
        after_forward[slot] = own
    trained_tail = [0.0] * count if split_backward else after_backward
    return np.array([trained_tail[i] if has_backward[i] else after_forward[i] for i in range(count)])
