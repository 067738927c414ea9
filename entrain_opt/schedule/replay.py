"""When everything happens if each rank runs its list in order: the core of every simulation.

Each rank runs one operation at a time, in its order, as soon as the inputs are there. A transfer overlaps compute and
starts when its output is ready (the receive is posted ahead); each pair of ranks carries one message at a time in each
direction, activations and gradients apart.

Promise: exact for the given durations. Price: O(operations), about 0.1 us each; the loop over time is compiled
(`replay_kernel.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entrain_opt.errors import ScheduleError
from entrain_opt.schedule import columns
from entrain_opt.schedule.graph import WorkGraph
from entrain_opt.schedule.links import Links
from entrain_opt.schedule.replay_kernel import play_orders

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replay:
    """Times of one replica.

    Attributes:
        start, end: [3 * slots] seconds of each operation; 0 for operations that do not exist.
        ready: [3 * slots] when the last input of the operation was there.
        sent: [3 * slots] when the output of an operation has reached the last other rank that needs it, or its end.
        makespan_seconds: end of the last operation.
    """

    start: FloatArray
    end: FloatArray
    ready: FloatArray
    sent: FloatArray
    makespan_seconds: float


def replay(graph: WorkGraph, orders: list[list[int]], durations: ArrayLike, transfer: ArrayLike) -> Replay:
    """Run the orders.

    Args:
        graph: the work of one replica.
        orders: per rank, its operations in order.
        durations: [3 * slots] seconds.
        transfer: [slots] seconds to send an output (or the gradient back) to another rank.

    Raises:
        ScheduleError: the orders wait for each other in a circle, or an operation is missing.
    """
    slots, links = np.zeros((graph.num_slots, columns.SLOT_COLUMNS), dtype=np.int64), Links()
    slots[:, columns.STAGE] = graph.slot_stage
    slots[:, columns.FORWARD], slots[:, columns.FORWARD_END] = links.add(graph.forward_targets)
    slots[:, columns.BACKWARD], slots[:, columns.BACKWARD_END] = links.add(graph.backward_targets)
    stages = np.zeros((graph.shape.num_stages, columns.STAGE_COLUMNS), dtype=np.int64)
    stages[:, columns.RANK] = graph.shape.ranks_of_stages
    stages[:, columns.HAS_BACKWARD] = graph.shape.has_backward
    times, waiting = play_orders(
        stages,
        slots,
        links.joined(),
        np.array(list(chain.from_iterable(orders)), dtype=np.int64),
        np.array([0, *accumulate(len(order) for order in orders)], dtype=np.int64),
        np.array(durations, dtype=np.float64),
        np.array(transfer, dtype=np.float64),
        graph.missing.copy(),
    )
    if any(op >= 0 for op in waiting):
        heads = ", ".join(f"rank {r} at {graph.action(op)}" for r, op in enumerate(waiting) if op >= 0)
        raise ScheduleError(
            f"schedule: the orders cannot go on: {heads} wait for operations that are missing or stand later in "
            f"another order. Make the order with schedule_replica or check it with check_schedule."
        )
    start, end, ready, sent = times
    return Replay(start=start, end=end, ready=ready, sent=sent, makespan_seconds=float(end.max(initial=0.0)))
