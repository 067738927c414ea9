"""How even an assignment is, and what it defers.

Loads are forward plus backward seconds per stage, as the policies see them (`work.py`). The microbatches of all
replicas count together: a replica that is slower than the others makes an assignment uneven too.

Price: O(samples + media), below a millisecond for 4,096 samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_opt.assigner.work import SampleWork, sample_work
from entrain_opt.assignment import Assignment, BatchCosts, FloatArray, IntArray
from entrain_opt.plan import PipelineShape


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSpread:
    """How even the loads of one module's microbatches are.

    Attributes:
        std_seconds: standard deviation over microbatches.
        coefficient_of_variation: deviation over mean; 0 is even.
        max_over_mean: 1 is even, also where there is no load.
    """

    std_seconds: float
    coefficient_of_variation: float
    max_over_mean: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignmentStatistics:
    """What a comparison of assignments wants to know.

    Attributes:
        encoder, llm: of all encoders together, and of the language model.
        deferred_samples: samples whose language-model part waits for a later microbatch than some encoder part.
        deferred_tokens: encoder output that waits, in tokens of the language model.
        deferred_bytes: the same in bytes; None where the costs do not say how large a token is.
    """

    encoder: LoadSpread
    llm: LoadSpread
    deferred_samples: int
    deferred_tokens: int
    deferred_bytes: float | None


def media_seconds(work: SampleWork) -> FloatArray:
    """[M] forward plus backward of each media entry, per stage of its encoder; 0 for no media."""
    seconds = np.zeros(work.costs.num_media)
    for encoder in range(work.shape.num_encoders):
        seconds += work.media_stage_seconds[list(work.shape.stages_of_encoder(encoder))].mean(axis=0)
    return np.where(work.costs.has_media, seconds, 0.0)


def load_spread(loads: FloatArray) -> LoadSpread:
    """The spread of [microbatches] seconds."""
    mean = float(loads.mean()) if len(loads) else 0.0
    if mean <= 0:
        return LoadSpread(std_seconds=0.0, coefficient_of_variation=0.0, max_over_mean=1.0)
    deviation = float(loads.std())
    return LoadSpread(
        std_seconds=deviation, coefficient_of_variation=deviation / mean, max_over_mean=float(loads.max()) / mean
    )


def assignment_statistics(
    costs: BatchCosts, assignment: Assignment, shape: PipelineShape, *, replica: int | None = None
) -> AssignmentStatistics:
    """The statistics of an assignment.

    Args:
        costs: of the global batch.
        assignment: of it.
        shape: the stages of a replica.
        replica: only this one; None counts the microbatches of all replicas together.

    Raises:
        AssignmentError: costs that do not match the shape.
    """
    work = sample_work(costs, shape)
    width = max(int(assignment.num_microbatches.max(initial=0)), 1)
    exists = np.arange(width) < assignment.num_microbatches[:, None]
    counted = np.ones(costs.num_samples, dtype=bool)
    if replica is not None:
        exists[np.arange(assignment.num_replicas) != replica] = False
        counted = assignment.replica == replica

    def spread(replica_of: IntArray, microbatch: IntArray, seconds: FloatArray) -> LoadSpread:
        sums = np.bincount(replica_of * width + microbatch, weights=seconds, minlength=exists.size)
        return load_spread(sums.astype(np.float64)[exists.ravel()])

    sample, placed = costs.media_sample, costs.has_media
    waits = placed & counted[sample] & (assignment.encoder_microbatch < assignment.llm_microbatch[sample])
    return AssignmentStatistics(
        encoder=spread(
            assignment.replica[sample[placed]],
            assignment.encoder_microbatch[placed],
            media_seconds(work)[placed],
        ),
        llm=spread(assignment.replica, assignment.llm_microbatch, work.llm_seconds),
        deferred_samples=len(np.unique(sample[waits])),
        deferred_tokens=int(costs.feature_tokens[waits].sum()),
        deferred_bytes=_deferred_bytes(costs, shape, np.flatnonzero(waits)),
    )


def _deferred_bytes(costs: BatchCosts, shape: PipelineShape, waiting: IntArray) -> float | None:
    if costs.stages is None or not costs.stages.output_bytes:
        return None
    total = 0.0
    for encoder in range(shape.num_encoders):
        mine = waiting[costs.encoder_index[waiting] == encoder]
        token_bytes = costs.stages.output_bytes[shape.stages_of_encoder(encoder)[-1]]
        total += float(costs.feature_tokens[mine].sum()) * token_bytes
    return total
