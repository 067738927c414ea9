"""What several peers need: placing whole samples, and the seconds of each pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_opt.assigner.bins import split_above_caps
from entrain_opt.assigner.work import Placement, SampleWork, microbatch_sums, place_samples
from entrain_opt.assignment import FloatArray, IntArray


def place_together(work: SampleWork, microbatch: IntArray) -> Placement:
    """Encoder and language-model part of each sample in the same microbatch; one above a cap is cut in sample order."""
    microbatch = split_above_caps(work, microbatch)
    return place_samples(work, microbatch, microbatch)


def place_sorted(work: SampleWork, order: IntArray, microbatch: IntArray) -> Placement:
    """Like `place_together`, but one above a cap is cut along `order`.

    Args:
        work: N samples.
        order: [N] samples by position.
        microbatch: [N] dense microbatch of each position.
    """
    by_sample = np.empty_like(microbatch)
    by_sample[order] = split_above_caps(work.take(order), microbatch)
    return place_samples(work, by_sample, by_sample)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSeconds:
    """What each of R pipeline ranks spends; stages that share a rank add up.

    Attributes:
        forward, backward: [R, N] per sample.
        forward_fixed, backward_fixed: [R] per microbatch, with the latency of one message per stage.
    """

    forward: FloatArray
    backward: FloatArray
    forward_fixed: FloatArray
    backward_fixed: FloatArray

    def of_microbatches(self, microbatch: IntArray, count: int) -> tuple[FloatArray, FloatArray]:
        """[R, K] forward and backward seconds of microbatches that hold whole samples."""

        def sums(seconds: FloatArray, fixed: FloatArray) -> FloatArray:
            return np.array([microbatch_sums(microbatch, row, count) for row in seconds]) + fixed[:, None]

        return sums(self.forward, self.forward_fixed), sums(self.backward, self.backward_fixed)


def rank_seconds(work: SampleWork) -> RankSeconds:
    """The seconds of N samples on each rank."""
    shape, costs = work.shape, work.costs.stage_costs(work.shape)
    ranks, encoder_stages = np.array(shape.ranks_of_stages), shape.num_encoder_stages

    def per_rank(stages: tuple[FloatArray, ...]) -> FloatArray:
        seconds = np.zeros((shape.num_ranks, work.num_samples))
        for stage, values in enumerate(stages):
            media = stage < encoder_stages
            per_sample = np.bincount(work.costs.media_sample, values, work.num_samples) if media else values
            seconds[ranks[stage]] += per_sample
        return seconds

    def fixed_per_rank(stages: tuple[float, ...]) -> FloatArray:
        return np.bincount(ranks, np.array(stages) + costs.send_fixed_seconds, shape.num_ranks).astype(np.float64)

    return RankSeconds(
        forward=per_rank(costs.forward_seconds),
        backward=per_rank(costs.backward_seconds),
        forward_fixed=fixed_per_rank(costs.forward_fixed_seconds),
        backward_fixed=fixed_per_rank(costs.backward_fixed_seconds),
    )
