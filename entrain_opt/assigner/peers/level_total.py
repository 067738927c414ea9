"""`karmarkar_karp`: total work levelled with the largest differencing method, as trainers for reinforcement learning
do. A microbatch above a memory cap is cut into consecutive pieces."""

from __future__ import annotations

import numpy as np

from entrain_opt.assigner.karmarkar_karp import largest_differencing
from entrain_opt.assigner.peers.common import place_together
from entrain_opt.assigner.work import Placement, SampleWork


def place_karmarkar_karp(work: SampleWork, num_microbatches: int) -> Placement:
    """Equal sums of encoder and language-model seconds per stage; heaviest microbatch first."""
    order = work.canonical_order
    microbatch = np.empty(work.num_samples, dtype=np.int64)
    microbatch[order] = largest_differencing((work.encoder_seconds + work.llm_seconds)[order], num_microbatches)
    return place_together(work, microbatch)
