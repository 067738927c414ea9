"""The work of one replica as integers: every (stage, unit) is a slot, every action on it an operation.

Slot `i` has three operations: its forward `i`, its backward `num_slots + i` (whole, or of the inputs only) and its
weight gradients `2 * num_slots + i`. The slots of a stage follow each other, in the order of the units in
`ReplicaWork`, so schedules, simulations and searches touch flat lists only.

Price: O(stages * units) once per replica, in arrays; nothing here depends on time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assignment import BatchCosts
from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from entrain_opt.schedule.links import Rows
from entrain_opt.schedule.work import EncoderUnit, LlmUnit, ReplicaWork

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkGraph:
    """Slots of one replica and who needs whom.

    Attributes:
        shape: the stages.
        items: per stage, the items of each unit (media for encoder stages, samples for the others).
        num_slots: (stage, unit) pairs.
        units: per stage, its units in slot order.
        stage_first: [stages + 1] first slot of each stage.
        slot_stage, slot_rank, slot_microbatch, slot_part: [slots].
        forward_targets: per slot, the slots whose forward needs its output; all of one stage.
        backward_targets: per slot, the slots that its backward sends gradients to.
        missing: [3 * slots] how many operations each operation waits for.
        encoder_consumers: per encoder, per unit, the language-model units (by position) that need it.
        llm_sources: per language-model unit, the (encoder, unit position) pairs that it needs.
    """

    shape: PipelineShape
    items: tuple[Rows, ...]
    num_slots: int
    units: tuple[tuple[EncoderUnit, ...] | tuple[LlmUnit, ...], ...]
    stage_first: tuple[int, ...]
    slot_stage: list[int]
    slot_rank: list[int]
    slot_microbatch: list[int]
    slot_part: list[int]
    forward_targets: Rows
    backward_targets: Rows
    missing: IntArray
    encoder_consumers: tuple[tuple[tuple[int, ...], ...], ...]
    llm_sources: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def num_llm_units(self) -> int:
        return len(self.llm_sources)

    def slots_of_stage(self, stage: int) -> range:
        return range(self.stage_first[stage], self.stage_first[stage + 1])

    def action(self, operation: int, *, split: bool = False) -> Compute:
        """The action an operation stands for; `split` says that its weight gradients run on their own."""
        kind, slot = divmod(operation, self.num_slots)
        name = (self.slot_stage[slot], self.slot_microbatch[slot], self.slot_part[slot])
        if kind == 0:
            return Forward(*name)
        if kind == 2:
            return BackwardWeight(*name)
        return BackwardInput(*name) if split else Backward(*name)

    def actions(self, orders: list[list[int]]) -> tuple[tuple[Compute, ...], ...]:
        """Actions of each rank for lists of operations."""
        split = split_slots(orders, self.num_slots)
        count = self.num_slots
        return tuple(tuple(self.action(op, split=op - count in split) for op in order) for order in orders)

    def operations(self, compute: tuple[tuple[Compute, ...], ...]) -> list[list[int]]:
        """Operations of each rank for lists of actions.

        Raises:
            ScheduleError: an action is not part of the work, or runs on a rank that does not hold its stage.
        """
        slot_of = {
            (self.slot_stage[slot], self.slot_microbatch[slot], self.slot_part[slot]): slot
            for slot in range(self.num_slots)
        }
        offset = {
            Forward: 0,
            Backward: self.num_slots,
            BackwardInput: self.num_slots,
            BackwardWeight: 2 * self.num_slots,
        }
        orders: list[list[int]] = []
        for rank, actions in enumerate(compute):
            order = []
            for action in actions:
                slot = slot_of.get((action.stage, action.microbatch, action.part), -1)
                if slot < 0 or self.slot_rank[slot] != rank:
                    raise ScheduleError(
                        f"schedule: rank {rank} runs {action}, which is not part of its work (stages "
                        f"{self.shape.stages_of_rank(rank)}). Make the schedule from the same work and shape."
                    )
                order.append(offset[type(action)] + slot)
            orders.append(order)
        return orders


def split_slots(orders: list[list[int]], num_slots: int) -> set[int]:
    """Slots whose weight gradients run on their own."""
    first = 2 * num_slots
    return {operation - first for order in orders for operation in order if operation >= first}


def work_graph(work: ReplicaWork, shape: PipelineShape) -> WorkGraph:
    """Compile the work of one replica.

    Raises:
        ScheduleError: a stage without a backward follows one with a backward, so gradients could not return.
    """
    check_backward_stages(shape)
    per_encoder = [work.units_of_encoder(encoder) for encoder in range(shape.num_encoders)]
    position_of_llm = {unit.microbatch: i for i, unit in enumerate(work.llm_units)}
    place = [(-1, -1)] * len(work.encoder_units)
    counters = [0] * shape.num_encoders
    for i, unit in enumerate(work.encoder_units):
        place[i] = (unit.encoder, counters[unit.encoder])
        counters[unit.encoder] += 1
    encoder_of = [shape.encoder_of_stage(stage) for stage in range(shape.num_stages)]
    units = tuple(work.llm_units if e is None else per_encoder[e] for e in encoder_of)
    first = [0]
    for stage_units in units:
        first.append(first[-1] + len(stage_units))
    sources = tuple(tuple(place[source] for source in unit.sources) for unit in work.llm_units)
    consumers = tuple(
        tuple(tuple(position_of_llm[c] for c in unit.consumers) for unit in encoder_units)
        for encoder_units in per_encoder
    )
    first_llm = shape.num_encoder_stages
    has_backward = shape.has_backward
    consumer_rows = [Rows.of(rows) for rows in consumers]
    forward_of_stages = []
    for stage, stage_units in enumerate(units):
        encoder = encoder_of[stage]
        if stage + 1 < shape.num_stages and encoder_of[stage + 1] == encoder:
            one = np.ones(len(stage_units), dtype=np.int64)
            forward_of_stages.append(Rows(sizes=one, values=first[stage + 1] + np.arange(len(stage_units))))
        elif encoder is not None:
            forward_of_stages.append(consumer_rows[encoder].plus(first[first_llm]))
        else:
            nothing = np.zeros(len(stage_units), dtype=np.int64)
            forward_of_stages.append(Rows(sizes=nothing, values=nothing[:0]))
    forward = Rows.join(forward_of_stages)
    counts = np.array([len(stage_units) for stage_units in units])
    returns = np.repeat(np.array(has_backward, dtype=bool), counts)
    waits_backward = np.where(returns, 1 + forward.sizes, 0)
    waits_forward = np.bincount(forward.values, minlength=first[-1])
    items_of = {
        encoder: Rows.of([unit.media.tolist() for unit in rows]) for encoder, rows in enumerate(per_encoder)
    } | {None: Rows.of([unit.samples.tolist() for unit in work.llm_units])}
    return WorkGraph(
        shape=shape,
        items=tuple(items_of[encoder] for encoder in encoder_of),
        num_slots=first[-1],
        units=units,
        stage_first=tuple(first),
        slot_stage=np.repeat(np.arange(len(units)), counts).tolist(),
        slot_rank=np.repeat(np.array(shape.ranks_of_stages), counts).tolist(),
        slot_microbatch=[unit.microbatch for stage_units in units for unit in stage_units],
        slot_part=[getattr(unit, "part", 0) for stage_units in units for unit in stage_units],
        forward_targets=forward,
        backward_targets=_reverse(forward, returns),
        missing=np.concatenate([waits_forward, waits_backward, np.ones(first[-1], dtype=np.int64)]),
        encoder_consumers=consumers,
        llm_sources=sources,
    )


def _reverse(forward: Rows, returns: NDArray[np.bool_]) -> Rows:
    """Per slot, the slots whose targets it is, ascending; of those that get gradients."""
    source = forward.row_of_value
    used = returns[source]
    source, target = source[used], forward.values[used]
    return Rows(sizes=np.bincount(target, minlength=len(forward)), values=source[np.argsort(target, kind="stable")])


def check_backward_stages(shape: PipelineShape) -> None:
    """Raise ScheduleError unless the stages without a backward form a prefix of every path to the loss."""
    has_backward = shape.has_backward
    paths = [[*shape.stages_of_encoder(e), *shape.stages_of_llm] for e in range(shape.num_encoders)]
    for path in paths or [list(shape.stages_of_llm)]:
        for stage, following in pairwise(path):
            if has_backward[stage] and not has_backward[following]:
                raise ScheduleError(
                    f"stage_has_backward: stage {stage} runs a backward but stage {following}, which returns its "
                    f"gradients, does not. Let every stage after a trained one run a backward."
                )


def slot_amounts(graph: WorkGraph, costs: BatchCosts) -> list[int]:
    """[slots] patches (encoder stages) or tokens (language-model stages) that a slot holds while in flight."""
    shape = graph.shape
    amounts: list[int] = []
    for stage in range(shape.num_stages):
        is_encoder = stage < shape.num_encoder_stages
        values = costs.patches if is_encoder else costs.tokens
        amounts += sum_over_units(graph, stage, values).astype(np.int64).tolist()
    return amounts


def sum_over_units(graph: WorkGraph, stage: int, values: NDArray[np.generic]) -> FloatArray:
    """[units of the stage] sums of a per-item column (media for encoder stages, samples for the others)."""
    items = graph.items[stage]
    if not len(items):
        return np.zeros(0)
    sums = np.bincount(items.row_of_value, weights=values[items.values], minlength=len(items))
    return sums.astype(np.float64, copy=False)
