"""What other trainers do, for comparison: neither policy defers, so both modules share one split.

`in_order` is what a plain data loader does: samples as they come, the same number in each microbatch give or take one.
`karmarkar_karp` levels total work with the largest differencing method, as trainers for reinforcement learning do.
Both cut a microbatch that exceeds a memory cap into consecutive pieces.
"""

from __future__ import annotations

import numpy as np

from entrain_opt.assigner.bins import split_above_caps
from entrain_opt.assigner.karmarkar_karp import largest_differencing
from entrain_opt.assigner.replicas import equal_blocks
from entrain_opt.assigner.work import Placement, SampleWork, place_samples
from entrain_opt.assignment import IntArray


def place_in_order(work: SampleWork, num_microbatches: int) -> Placement:
    """Consecutive samples; any number of samples and microbatches works."""
    return _place_together(work, equal_blocks(work.num_samples, min(num_microbatches, work.num_samples)))


def place_karmarkar_karp(work: SampleWork, num_microbatches: int) -> Placement:
    """Equal sums of encoder and language-model seconds per stage; heaviest microbatch first."""
    order = work.canonical_order
    microbatch = np.empty(work.num_samples, dtype=np.int64)
    microbatch[order] = largest_differencing((work.encoder_seconds + work.llm_seconds)[order], num_microbatches)
    return _place_together(work, microbatch)


def _place_together(work: SampleWork, microbatch: IntArray) -> Placement:
    microbatch = split_above_caps(work, microbatch)
    return place_samples(work, microbatch, microbatch)
