"""How long every operation of a replica takes, from the costs per item.

A forward or backward takes the sum over the unit's items plus the stage's fixed part. Where the weight gradients run
on their own, they take `weight_gradient_share` of the sum; the fixed part, and what splitting costs, stays with the
input gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assignment import BatchCosts, StageCosts
from entrain_opt.schedule.graph import WorkGraph, sum_over_units

FloatArray = NDArray[np.float64]

#: Resolution of integer time: the longest operation has this many ticks.
TICKS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotSeconds:
    """[slots] seconds of each operation, and of sending a slot's output (or the gradient back) to another rank.

    `backward_input` is what a split backward takes but for its weight gradients, the price of splitting included.
    """

    forward: FloatArray
    backward: FloatArray
    backward_input: FloatArray
    weight: FloatArray
    transfer: FloatArray

    def operations(self, split: set[int]) -> FloatArray:
        """[3 * slots] seconds of each operation, for the slots whose weight gradients run on their own."""
        is_split = np.zeros(len(self.forward), dtype=bool)
        is_split[list(split)] = True
        return np.concatenate([self.forward, np.where(is_split, self.backward_input, self.backward), self.weight])

    def choices(self) -> FloatArray:
        """[4 * slots] seconds of forwards, whole backwards, weight gradients, and backwards without these."""
        return np.concatenate([self.forward, self.backward, self.weight, self.backward_input])


def slot_seconds(graph: WorkGraph, costs: BatchCosts, stages: StageCosts | None = None) -> SlotSeconds:
    """Seconds of every operation.

    Args:
        graph: the work of one replica.
        costs: of the global batch.
        stages: `costs.stage_costs(graph.shape)`, if at hand.
    """
    stages = stages or costs.stage_costs(graph.shape)
    known: dict[tuple[int, int], FloatArray] = {}

    def sums(stage: int, values: FloatArray) -> FloatArray:
        # Inner stages of a module mostly share their columns.
        key = (id(graph.items[stage]), id(values))
        if key not in known:
            known[key] = sum_over_units(graph, stage, values)
        return known[key]

    columns: dict[str, list[FloatArray]] = {column.name: [] for column in fields(SlotSeconds)}
    for stage in range(graph.shape.num_stages):
        by_items = sums(stage, stages.backward_seconds[stage])
        backward, weight = (
            by_items + stages.backward_fixed_seconds[stage],
            by_items * stages.weight_gradient_share[stage],
        )
        share, fixed = stages.split_costs(stage)
        columns["forward"].append(sums(stage, stages.forward_seconds[stage]) + stages.forward_fixed_seconds[stage])
        columns["backward"].append(backward)
        columns["backward_input"].append(backward - weight + share * by_items + fixed)
        columns["weight"].append(weight)
        columns["transfer"].append(sums(stage, stages.send_seconds[stage]) + stages.send_fixed_seconds)
    return SlotSeconds(**{name: np.concatenate(arrays) for name, arrays in columns.items()})


def to_ticks(seconds: FloatArray, longest_seconds: float) -> NDArray[np.int64]:
    """Integer times for the list scheduler, to the nearest tick."""
    if longest_seconds <= 0:
        return np.zeros(len(seconds), dtype=np.int64)
    return np.rint(seconds * (TICKS / longest_seconds)).astype(np.int64)
