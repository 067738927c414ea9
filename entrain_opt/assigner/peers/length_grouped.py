"""`length_grouped`: samples of similar length together, as Hugging Face's `group_by_length` does.

The samples of a replica are sorted by language-model tokens and cut into microbatches of equal count. The longest come
first, as there, so that running out of memory shows in the first step. There the sampler shuffles and sorts groups of
some dozens of batches; here the global batch is given and is the one group. Replicas are dealt the sorted samples in
turn, as its distributed sampler does, so the lengths of the replicas match microbatch by microbatch.

It knows neither seconds nor images: it saves padding where there is padding, and makes microbatches *uneven*.
Promise: the same answer however the batch lists the samples. Price: one sort.
"""

from __future__ import annotations

import numpy as np

from entrain_opt.assigner.peers.common import place_sorted
from entrain_opt.assigner.replicas import equal_blocks
from entrain_opt.assigner.work import Placement, SampleWork
from entrain_opt.assignment import IntArray


def length_order(work: SampleWork) -> IntArray:
    """[N] most tokens first; then by work and patches, so that only identical samples are told apart by index."""
    return np.lexsort((-work.patches, -work.encoder_seconds, -work.llm_seconds, -work.tokens))


def split_by_length(work: SampleWork, num_replicas: int) -> IntArray:
    """[N] replica of each sample: sorted by length and dealt in turn; counts differ by at most one."""
    replica = np.empty(work.num_samples, dtype=np.int64)
    replica[length_order(work)] = np.arange(work.num_samples) % num_replicas
    return replica


def place_length_grouped(work: SampleWork, num_microbatches: int) -> Placement:
    """Consecutive samples by falling length, equal counts give or take one; cut further only by memory caps."""
    blocks = equal_blocks(work.num_samples, min(num_microbatches, work.num_samples))
    return place_sorted(work, length_order(work), blocks)
