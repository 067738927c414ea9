"""What the assigner knows of each sample, and what it answers for one replica.

Seconds here are forward plus backward *per stage*, so that encoder and language-model work can be compared: a module
spread over more stages needs proportionally more seconds to be the bottleneck. Several encoders count as one unified
encoder: each item's seconds are divided by the stages of its own encoder, then added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assignment import BatchCosts, FloatArray, IntArray
from entrain_opt.errors import AssignmentError
from entrain_opt.plan import PipelineShape


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleWork:
    """Per-sample loads of N samples with M media entries; the input of every policy.

    Attributes:
        costs, shape: what the loads were made from, for policies that simulate.
        media_stage_seconds: [encoder stages, M] forward plus backward of each media entry on each encoder stage.
        llm_stage_seconds: [llm stages, N] the same for language-model stages.
        encoder_seconds: [N] per stage of the unified encoder; 0 for a sample that no encoder computes on.
        llm_seconds: [N] per language-model stage.
        patches: [N] sums over the sample's media items.
        tokens: [N] of the packed sequence.
    """

    costs: BatchCosts
    shape: PipelineShape
    media_stage_seconds: FloatArray
    llm_stage_seconds: FloatArray
    encoder_seconds: FloatArray
    llm_seconds: FloatArray
    patches: IntArray
    tokens: IntArray

    @property
    def num_samples(self) -> int:
        return len(self.llm_seconds)

    @property
    def patches_limit(self) -> float:
        return np.inf if self.shape.patches_limit is None else self.shape.patches_limit

    @property
    def tokens_limit(self) -> float:
        return np.inf if self.shape.tokens_limit is None else self.shape.tokens_limit

    @property
    def canonical_order(self) -> IntArray:
        """[N] heaviest encoder work first, then heaviest language-model work, tokens, patches; index breaks ties.

        Policies that run in this order give the same answer for the same samples however the batch lists them, down
        to the rounding of their sums.
        """
        return np.lexsort((-self.patches, -self.tokens, -self.llm_seconds, -self.encoder_seconds))

    def take(self, samples: IntArray) -> SampleWork:
        """The work of some samples, in the given order."""
        return sample_work(self.costs.take(samples), self.shape)

    def fewest_microbatches(self, samples: NDArray[np.bool_] | slice = slice(None)) -> int:
        """How many microbatches the memory caps need at least, by volume."""
        needed = 1
        for amounts, limit in ((self.patches, self.patches_limit), (self.tokens, self.tokens_limit)):
            if np.isfinite(limit) and limit > 0:
                needed = max(needed, -(-int(amounts[samples].sum()) // int(limit)))
        return needed

    def check(self) -> None:
        """Raise AssignmentError naming a sample that no microbatch could hold."""
        loads = (("patches", self.patches, self.shape.patches_limit), ("tokens", self.tokens, self.shape.tokens_limit))
        for what, amounts, limit in loads:
            if limit is not None and self.num_samples and amounts.max() > limit:
                sample = int(amounts.argmax())
                raise AssignmentError(
                    f"sample {sample}: expected at most {limit} {what} ({what}_in_flight), found {amounts[sample]}. It "
                    "fits no microbatch: skip or shrink the sample, or make a plan with more memory per stage."
                )


def sample_work(costs: BatchCosts, shape: PipelineShape) -> SampleWork:
    """The loads that the policies balance.

    Raises:
        AssignmentError: the costs and the pipeline shape do not belong together.
    """
    _check_match(costs, shape)
    stages = costs.stage_costs(shape)
    num_encoder_stages = shape.num_encoder_stages
    seconds = [f + b for f, b in zip(stages.forward_seconds, stages.backward_seconds, strict=True)]
    media_stage_seconds = np.array(seconds[:num_encoder_stages]).reshape(num_encoder_stages, costs.num_media)
    llm_stage_seconds = np.array(seconds[num_encoder_stages:])
    unified = np.zeros(costs.num_media)
    for encoder in range(shape.num_encoders):
        unified += media_stage_seconds[list(shape.stages_of_encoder(encoder))].mean(axis=0)
    media_sample, media_patches = costs.media_sample, np.where(costs.has_media, costs.patches, 0)
    return SampleWork(
        costs=costs,
        shape=shape,
        media_stage_seconds=media_stage_seconds,
        llm_stage_seconds=llm_stage_seconds,
        encoder_seconds=np.bincount(media_sample, unified, costs.num_samples).astype(np.float64),
        llm_seconds=llm_stage_seconds.mean(axis=0),
        patches=np.bincount(media_sample, media_patches, costs.num_samples).astype(np.int64),
        tokens=costs.tokens,
    )


def _check_match(costs: BatchCosts, shape: PipelineShape) -> None:
    if costs.stages is not None and (
        len(costs.stages.forward_seconds) != shape.num_stages
        or costs.stages.num_encoder_stages != shape.num_encoder_stages
    ):
        raise AssignmentError(
            f"costs.stages: expected {shape.num_encoder_stages} encoder stages of {shape.num_stages}, as in the "
            f"pipeline shape, found {costs.stages.num_encoder_stages} of {len(costs.stages.forward_seconds)}."
        )
    lost = np.flatnonzero((costs.encoder_seconds > 0) & (costs.encoder_index >= shape.num_encoders))
    if len(lost):
        raise AssignmentError(
            f"sample {costs.media_sample[lost[0]]}: expected media for one of {shape.num_encoders} encoders, found "
            f"media item {lost[0]} for encoder {costs.encoder_index[lost[0]]}. Give the pipeline shape that encoder's "
            "stages, or costs without that media."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The answer for one replica: microbatch of every media entry (-1: no media) and of every sample."""

    encoder_microbatch: IntArray
    llm_microbatch: IntArray
    num_microbatches: int


def place_samples(work: SampleWork, encoder: IntArray, llm: IntArray) -> Placement:
    """The placement that keeps all media items of a sample together, without empty microbatches.

    Args:
        work: N samples.
        encoder: [N] microbatch of each sample's media items; ignored for samples without media.
        llm: [N] microbatch of each sample.
    """
    return place_media(work, encoder[work.costs.media_sample], llm)


def place_media(work: SampleWork, media: IntArray, llm: IntArray) -> Placement:
    """The placement of single media items, without empty microbatches.

    A microbatch exists for its samples; media of one without samples wait for the next, still in time for their own.

    Args:
        work: N samples.
        media: [M] microbatch of each media entry, not after its sample's; ignored where there is no media.
        llm: [N] microbatch of each sample.
    """
    used, dense_llm = np.unique(llm, return_inverse=True)
    dense_media = np.where(work.costs.has_media, np.searchsorted(used, media), -1)
    return Placement(encoder_microbatch=dense_media, llm_microbatch=dense_llm, num_microbatches=len(used))


def microbatch_sums(microbatch: IntArray, values: FloatArray | IntArray, num_microbatches: int) -> FloatArray:
    """[K] sums of per-item values over microbatches; items at -1 do not count."""
    placed = microbatch >= 0
    return np.bincount(microbatch[placed], values[placed], num_microbatches).astype(np.float64)
