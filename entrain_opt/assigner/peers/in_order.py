"""`in_order`: what a plain data loader does. Samples as they come, so the answer depends on the order of the batch."""

from __future__ import annotations

from entrain_opt.assigner.peers.common import place_together
from entrain_opt.assigner.replicas import equal_blocks
from entrain_opt.assigner.work import Placement, SampleWork


def place_in_order(work: SampleWork, num_microbatches: int) -> Placement:
    """Consecutive samples, the same number in each microbatch give or take one; any numbers work."""
    return place_together(work, equal_blocks(work.num_samples, min(num_microbatches, work.num_samples)))
