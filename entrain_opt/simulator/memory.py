"""Bytes over time on every rank, as a result of when things ran.

- weights: all stages of the rank, all the time;
- activations: `activation_bytes` per patch or token, from the start of a forward to the end of its backward (of its
  weight gradients, where they run on their own, with the gradients kept for them; of the forward itself, where no
  backward follows);
- messages: outputs and gradients that crossed between ranks, on the sender until they are sent, on the receiver from
  arrival until the operation that needs them (the last one, if several do) has ended. Encoder outputs that wait for a
  deferred microbatch are of this kind, also when both stages share a rank;
- logits: on the last stage, from the start of a forward to the end of its (input) backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assignment import BatchCosts, StageCosts
from entrain_opt.schedule.columns import KEPT_PERCENT
from entrain_opt.schedule.graph import WorkGraph, sum_over_units
from entrain_opt.simulator.run import ReplicaRun, forward_edges

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

PARTS = ("activations", "messages", "logits")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurve:
    """Bytes of one rank as a step function.

    Attributes:
        seconds: [T] when it changes, ascending.
        parts: [T, 3] bytes from then on, in the order of `PARTS`.
        weight_bytes: what is there all the time.
    """

    seconds: FloatArray
    parts: FloatArray
    weight_bytes: float

    @property
    def peak_bytes(self) -> float:
        return self.weight_bytes + float(self.parts.sum(axis=1).max(initial=0.0))


def memory_curves(run: ReplicaRun, costs: BatchCosts, stages: StageCosts) -> list[MemoryCurve]:
    """Bytes over time of each rank of a replica."""
    graph, count = run.graph, run.graph.num_slots
    shape = graph.shape
    stage_of = np.asarray(graph.slot_stage, dtype=np.int64)
    rank_of = np.asarray(graph.slot_rank, dtype=np.int64)
    has_backward = np.asarray(shape.has_backward, dtype=bool)[stage_of]
    is_split = np.zeros(count, dtype=bool)
    is_split[list(run.split)] = True
    start, end, sent, ready = run.times.start, run.times.end, run.times.sent, run.times.ready
    end_forward, end_backward = end[:count], end[count : 2 * count]
    no_logits_after = np.where(has_backward, end_backward, end_forward)
    released = np.where(is_split, end[2 * count :], no_logits_after)
    held, crossing = slot_bytes(graph, costs, stages)
    pieces: list[tuple[IntArray, FloatArray, FloatArray, FloatArray, int]] = [
        (rank_of, start[:count], released, held, 0)
    ]
    kept = np.where(is_split, held * KEPT_PERCENT / 100, 0.0)
    pieces.append((rank_of, start[count : 2 * count], released, kept, 0))
    last = stage_of == shape.num_stages - 1
    logits = sum_over_units(
        graph, shape.num_stages - 1, costs.tokens if costs.label_tokens is None else costs.label_tokens
    )
    pieces.append((rank_of[last], start[:count][last], no_logits_after[last], logits * stages.logit_bytes, 2))
    source, target = forward_edges(graph)
    if len(source):
        consumed = np.zeros(count)
        np.maximum.at(consumed, source, end_forward[target])
        receiver = np.zeros(count, dtype=np.int64)
        receiver[source] = rank_of[target]
        unit = np.unique(source)
        remote = receiver[unit] != rank_of[unit]
        to_llm = (stage_of[unit] < shape.num_encoder_stages) & (consumed[unit] > 0)
        ends_encoder = np.zeros(shape.num_stages, dtype=bool)
        ends_encoder[[shape.stages_of_encoder(e)[-1] for e in range(shape.num_encoders)]] = True
        waits = unit[remote | (to_llm & ends_encoder[stage_of[unit]])]
        pieces.append((receiver[waits], sent[waits], consumed[waits], crossing[waits], 1))
        out = unit[remote]
        pieces.append((rank_of[out], end_forward[out], sent[out], crossing[out], 1))
        back = unit[remote & has_backward[unit]]
        pieces.append((rank_of[back], ready[count + back], end_backward[back], crossing[back], 1))
    weight_bytes = stages.weight_bytes or (0.0,) * shape.num_stages
    weights = [sum(weight_bytes[stage] for stage in shape.stages_of_rank(rank)) for rank in range(shape.num_ranks)]
    return _curves(pieces, weights)


def slot_bytes(graph: WorkGraph, costs: BatchCosts, stages: StageCosts) -> tuple[FloatArray, FloatArray]:
    """[slots] bytes of activations in flight, and of the output sent on."""
    shape = graph.shape
    activation_bytes = stages.activation_bytes or (0.0,) * shape.num_stages
    output_bytes = stages.output_bytes or (0.0,) * shape.num_stages
    held, crossing = [np.zeros(0)], [np.zeros(0)]
    for stage in range(shape.num_stages):
        encoder = shape.encoder_of_stage(stage)
        amount = sum_over_units(graph, stage, costs.tokens if encoder is None else costs.patches)
        held.append(amount * activation_bytes[stage])
        if encoder is not None and stage == shape.stages_of_encoder(encoder)[-1]:
            amount = sum_over_units(graph, stage, costs.feature_tokens)
        crossing.append(amount * output_bytes[stage])
    return np.concatenate(held), np.concatenate(crossing)


def _curves(
    pieces: list[tuple[IntArray, FloatArray, FloatArray, FloatArray, int]], weight_bytes: list[float]
) -> list[MemoryCurve]:
    """Of each rank, from (rank, since, until, bytes, part) of everything that is held."""
    there = [size > 0 for _, _, _, size, _ in pieces]
    # What ends at an instant is gone before what begins then is there: ends stand before begins, and sorts are stable.
    ranks = [owner[mine] for (owner, *_), mine in zip(pieces, there, strict=True)]
    untils = [until[mine] for (_, _, until, _, _), mine in zip(pieces, there, strict=True)]
    sinces = [since[mine] for (_, since, _, _, _), mine in zip(pieces, there, strict=True)]
    sizes = np.concatenate([size[mine] for (_, _, _, size, _), mine in zip(pieces, there, strict=True)])
    kinds = np.repeat([kind for *_, kind in pieces], [len(since) for since in sinces])
    rank, times = np.concatenate(ranks + ranks), np.concatenate(untils + sinces)
    order = np.lexsort((times, rank))
    parts = np.zeros((len(order), len(PARTS)))
    parts[np.arange(len(order)), np.concatenate([kinds, kinds])[order]] = np.concatenate([-sizes, sizes])[order]
    ends = np.cumsum(np.bincount(rank, minlength=len(weight_bytes))).tolist()
    times = times[order]
    return [
        MemoryCurve(seconds=times[start:end], parts=np.cumsum(parts[start:end], axis=0), weight_bytes=weights)
        for start, end, weights in zip([0, *ends[:-1]], ends, weight_bytes, strict=True)
    ]
