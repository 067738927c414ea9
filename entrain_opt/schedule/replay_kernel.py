"""The replay of given orders, compiled; `replay.py` says what it models."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.compiled import compiled
from entrain_opt.schedule.columns import (
    BACKWARD,
    BACKWARD_END,
    FORWARD,
    FORWARD_END,
    HAS_BACKWARD,
    NONE,
    RANK,
    STAGE,
)

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@compiled
def play_orders(
    stages: IntArray, slots: IntArray, links: IntArray, orders: IntArray, order_first: IntArray,
    durations: FloatArray, transfer: FloatArray, missing: IntArray,
) -> tuple[FloatArray, IntArray]:  # fmt: skip
    """Run each rank's operations in order.

    Args:
        stages, slots, links: as in `columns.py`.
        orders, order_first: operations rank after rank, [ranks + 1] offsets into them.
        durations: [3 * n] seconds.
        transfer: [n] seconds to send an output (or the gradient back) to another rank.
        missing: [3 * n] how many operations each operation waits for; used up.

    Returns:
        [4, 3 * n] start, end, ready and sent seconds; [ranks] the operation that each rank still waits for, or -1.
    """
    count, num_ranks = len(slots), len(order_first) - 1
    times = np.zeros((4, 3 * count))
    start, end, ready, sent = times[0], times[1], times[2], times[3]
    clock = np.zeros(num_ranks)
    place, waiting = order_first[:-1].copy(), np.full(num_ranks, NONE, dtype=np.int64)
    busy_until = np.zeros((2, num_ranks, num_ranks))
    runnable = np.arange(num_ranks)[::-1].copy()
    num_runnable = num_ranks
    while num_runnable:
        num_runnable -= 1
        rank = runnable[num_runnable]
        waiting[rank] = NONE
        now = clock[rank]
        while place[rank] < order_first[rank + 1]:
            operation = orders[place[rank]]
            if missing[operation]:
                waiting[rank] = operation
                break
            place[rank] += 1
            now = max(now, ready[operation])
            start[operation] = now
            now += durations[operation]
            end[operation] = now
            kind, slot = operation // count, operation % count
            last = now
            if kind < 2:
                # A forward's output goes to all its targets in one message, gradients go to each source on their own.
                first, stop = slots[slot, FORWARD], slots[slot, FORWARD_END]
                if kind == 1:
                    first, stop = slots[slot, BACKWARD], slots[slot, BACKWARD_END]
                arrival = now
                for i in range(first, stop):
                    target = links[i]
                    target_rank = stages[slots[target, STAGE], RANK]
                    if kind == 1 or i == first:
                        arrival = now
                        if target_rank != rank:
                            seconds = transfer[slot] if kind == 0 else transfer[target]
                            arrival = max(now, busy_until[kind, rank, target_rank]) + seconds
                            busy_until[kind, rank, target_rank] = arrival
                    last = max(last, arrival)
                    waits = target + kind * count
                    ready[waits] = max(ready[waits], arrival)
                    missing[waits] -= 1
                    if not missing[waits] and waiting[target_rank] == waits:
                        waiting[target_rank] = NONE
                        runnable[num_runnable] = target_rank
                        num_runnable += 1
                if kind == 1 or stages[slots[slot, STAGE], HAS_BACKWARD]:
                    following = operation + count
                    ready[following] = max(ready[following], now)
                    missing[following] -= 1
            sent[operation] = last
        clock[rank] = now
    return times, waiting
