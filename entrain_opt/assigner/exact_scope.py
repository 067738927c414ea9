"""What the exact policy may choose from, its whole-number times, and the times of its hint.

A scope is *complete* where all placements are few. One that would be too large is narrowed around the hint: samples
stay within `WINDOW` microbatches of where they are, media items stay together as they are, and if that is not enough
only samples in and next to the busiest microbatches may move.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from entrain_opt.assigner.joint import normalised_loads
from entrain_opt.assigner.work import Placement, SampleWork
from entrain_opt.assignment import Assignment, FloatArray, IntArray
from entrain_opt.schedule.durations import slot_seconds
from entrain_opt.schedule.graph import WorkGraph, split_slots, work_graph
from entrain_opt.schedule.orders import fixed_order
from entrain_opt.schedule.replay import replay
from entrain_opt.schedule.work import EncoderUnit, LlmUnit, replica_work

#: Resolution: the hint's makespan has about this many ticks.
TICKS = 1 << 20
#: A scope is complete up to this many microbatches and choices of pieces and samples.
COMPLETE_MICROBATCHES, COMPLETE_CHOICES = 4, 60
#: How far a sample moves from the hint, and how far ahead its media may be encoded, in narrowed scopes.
WINDOW, DEFERRAL = 3, 2
#: Choices in a narrowed scope, and intervals above which no model is built.
MAX_CHOICES, MAX_INTERVALS = 1200, 4000

Pair = tuple[int, int]
#: Stage, encoder microbatch (or -1), language-model microbatch (or -1 where no gradients return).
Unit = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Media items of one sample and encoder that are encoded together."""

    sample: int
    encoder: int
    media: IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What the solver may choose from.

    Attributes:
        count: microbatches.
        pieces: all media.
        pairs: per piece, its (encoder microbatch, language-model microbatch) choices.
        llm: per sample, its microbatch choices.
        complete: whether these are all placements.
    """

    count: int
    pieces: tuple[Piece, ...]
    pairs: tuple[tuple[Pair, ...], ...]
    llm: tuple[tuple[int, ...], ...]
    complete: bool

    @property
    def num_choices(self) -> int:
        return sum(map(len, self.pairs)) + sum(map(len, self.llm))


def choose_scope(work: SampleWork, num_microbatches: int | None, hint: Placement) -> Scope:
    """Everything if that is little, otherwise a neighbourhood of the hint."""
    most = work.num_samples if num_microbatches is None else min(num_microbatches, work.num_samples)
    count = max(most, hint.num_microbatches)
    if count <= COMPLETE_MICROBATCHES:
        everywhere = tuple(range(count))
        scope = _scope(work, count, _pieces(work, None), [everywhere] * work.num_samples, count, complete=True)
        if scope.num_choices <= COMPLETE_CHOICES:
            return scope
    return _narrowed(work, hint)


def _narrowed(work: SampleWork, hint: Placement) -> Scope:
    count, home = hint.num_microbatches, hint.llm_microbatch
    pieces = _pieces(work, hint)
    near = [tuple(range(max(0, m - WINDOW), min(count, m + WINDOW + 1))) for m in home.tolist()]
    load = np.bincount(home, weights=normalised_loads(work).sum(axis=1), minlength=count)
    free = np.zeros(count, dtype=bool)
    best = _scope(work, count, pieces, [(m,) for m in home.tolist()], 0, complete=False, hint=hint)
    for busy in np.argsort(-load, kind="stable").tolist():
        free[max(0, busy - 1) : busy + 2] = True
        llm = [tuple(m for m in near[s] if free[m]) if free[home[s]] else (int(home[s]),) for s in range(len(home))]
        scope = _scope(work, count, pieces, llm, DEFERRAL, complete=False, hint=hint)
        if scope.num_choices > MAX_CHOICES:
            break
        best = scope
    return best


def _pieces(work: SampleWork, hint: Placement | None) -> list[Piece]:
    """Single media items, or what the hint encodes together."""
    costs = work.costs
    rows = np.flatnonzero(costs.has_media)
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in rows.tolist():
        key = (int(costs.media_sample[row]), int(costs.encoder_index[row]))
        groups.setdefault((*key, row if hint is None else int(hint.encoder_microbatch[row])), []).append(row)
    return [Piece(sample=key[0], encoder=key[1], media=np.array(media)) for key, media in groups.items()]


def _scope(
    work: SampleWork, count: int, pieces: list[Piece], llm: list[tuple[int, ...]], deferral: int, *, complete: bool,
    hint: Placement | None = None,
) -> Scope:  # fmt: skip
    pairs = []
    for piece in pieces:
        mine = llm[piece.sample]
        chosen = {(k, j) for j in mine for k in range(max(0, j - deferral), j + 1)}
        if hint is not None:
            own = (int(hint.encoder_microbatch[piece.media[0]]), int(hint.llm_microbatch[piece.sample]))
            chosen = {own} if len(mine) == 1 else chosen | {own}
        pairs.append(tuple(sorted(chosen)))
    return Scope(count=count, pieces=tuple(pieces), pairs=tuple(pairs), llm=tuple(llm), complete=complete)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticks:
    """Whole-number times, rounded up: per stage the ticks of each item, and of each unit.

    `rounding_seconds` is how much all of that rounding can add to a schedule.
    """

    seconds_per_tick: float
    forward: tuple[IntArray, ...]
    backward: tuple[IntArray, ...]
    weight: tuple[IntArray, ...]
    transfer: tuple[IntArray, ...]
    fixed: IntArray
    rounding_seconds: float


def to_ticks(work: SampleWork, *, split: bool, longest_seconds: float, most_units: int) -> Ticks:
    """Costs of every stage in ticks; `split` takes the weight gradients out of the backwards."""
    stages, shape = work.costs.stage_costs(work.shape), work.shape
    tick = longest_seconds / TICKS
    added = 0.0

    def whole(seconds: FloatArray, times: int = 1) -> IntArray:
        nonlocal added
        ticks = np.ceil(seconds / tick - 1e-6)
        added += float(np.maximum(ticks * tick - seconds, 0.0).sum()) * times
        return ticks.astype(np.int64)

    shares = [share if split else 0.0 for share in stages.weight_gradient_share]
    backward = [b if has else 0 * b for b, has in zip(stages.backward_seconds, shape.has_backward, strict=True)]
    fixed_backward = np.where(shape.has_backward, stages.backward_fixed_seconds, 0.0)
    fixed = np.array([stages.forward_fixed_seconds, fixed_backward, [stages.send_fixed_seconds] * shape.num_stages])
    return Ticks(
        seconds_per_tick=tick,
        forward=tuple(whole(f) for f in stages.forward_seconds),
        backward=tuple(whole(b * (1 - share)) for b, share in zip(backward, shares, strict=True)),
        weight=tuple(whole(b * share) for b, share in zip(backward, shares, strict=True)),
        transfer=tuple(whole(t, 2) for t in stages.send_seconds),
        fixed=whole(fixed, 2 * most_units),
        rounding_seconds=added,
    )


def hint_times(
    work: SampleWork, hint: Placement, schedule: str, ticks: Ticks
) -> tuple[dict[tuple[int, Unit], int], int]:
    """When everything starts if the hint runs in the order of `schedule`, and when the last operation ends."""
    costs, shape = work.costs, work.shape
    assignment = Assignment(
        replica=np.zeros(work.num_samples, dtype=np.int64),
        encoder_microbatch=hint.encoder_microbatch,
        llm_microbatch=hint.llm_microbatch,
        num_microbatches=np.array([hint.num_microbatches]),
    )
    graph = work_graph(replica_work(costs, assignment, shape, 0), shape)
    orders = fixed_order(graph, schedule, costs, slot_seconds(graph, costs))
    split = split_slots(orders, graph.num_slots)
    names = _unit_names(graph)
    kinds = [[0] * graph.num_slots for _ in range(4)]
    for stage in range(shape.num_stages):
        units: Iterable[EncoderUnit | LlmUnit] = graph.units[stage]
        for unit, slot in zip(units, graph.slots_of_stage(stage), strict=True):
            items = unit.samples if isinstance(unit, LlmUnit) else unit.media
            arrays = (ticks.forward, ticks.backward, ticks.weight, ticks.transfer)
            for kind, array in enumerate(arrays):
                fixed = int(ticks.fixed[(0, 1, 1, 2)[kind], stage]) if kind != 2 else 0
                kinds[kind][slot] = int(array[stage][items].sum()) + fixed
    whole = [b if slot in split else b + w for slot, (b, w) in enumerate(zip(kinds[1], kinds[2], strict=True))]
    durations = [float(value) for value in (*kinds[0], *whole, *kinds[2])]
    times = replay(graph, orders, durations, [float(t) for t in kinds[3]])
    starts: dict[tuple[int, Unit], int] = {}
    for slot, name in enumerate(names):
        starts[0, name] = int(times.start[slot])
        if shape.has_backward[name[0]]:
            starts[1, name] = begin = int(times.start[graph.num_slots + slot])
            later = times.start[2 * graph.num_slots + slot]
            starts[2, name] = int(later) if slot in split else begin + kinds[1][slot]
    return starts, int(times.makespan_seconds)


def _unit_names(graph: WorkGraph) -> list[Unit]:
    names: list[Unit] = []
    for stage in range(graph.shape.num_stages):
        for unit in graph.units[stage]:
            if isinstance(unit, LlmUnit):
                names.append((stage, -1, unit.microbatch))
            else:
                returns = graph.shape.encoder_has_backward(unit.encoder)
                names.append((stage, unit.microbatch, unit.consumers[0] if returns else -1))
    return names
