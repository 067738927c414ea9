"""`dip`: sub-microbatches per modality, after DIP (PipeWeaver, arXiv 2504.14145).

There a microbatch is a fixed number of samples as they come. Its images are split into vision sub-microbatches and its
sequences into language sub-microbatches, each of the size its module needs to run efficiently, and a search schedules
them all. Here encoder and language model share one numbering of microbatches, so a sub-microbatch is a finer
microbatch:

1. Parents: consecutive samples, equal counts, half as many as microbatches were asked for (more if memory caps cut
   them).
2. The K microbatches go to the parents: one each, then one by one to the parent whose sub-microbatches are the largest
   share of the batch's patches or tokens. None is cut below the size at which a stage spends 95 % of its time on work
   rather than on fixed seconds.
3. A parent with s microbatches has its samples cut, in order, into s runs of about equal *patches* for the encoder and
   s runs of about equal *tokens* for the language model: sub-microbatch j of both is its j-th microbatch. A sample
   whose tokens would run before its media are encoded waits for them, inside the parent.

What the mapping loses: both modalities have the same number of sub-microbatches in a parent, the media items of a
sample are not separated, and the schedule search is the schedule's (`search`), not the policy's. Sub-microbatches of a
parent are all under the caps together, which is stricter than each alone.

Depends on the order of the batch by nature. Promise: nothing crosses its parent. Price: O(N + K log K).
"""

from __future__ import annotations

import heapq

import numpy as np

from entrain_opt.assigner.bins import split_above_caps
from entrain_opt.assigner.replicas import equal_blocks
from entrain_opt.assigner.work import Placement, SampleWork, microbatch_sums, place_samples
from entrain_opt.assignment import FloatArray, IntArray

_MICROBATCHES_PER_PARENT = 2
#: The most that fixed seconds may take of a stage's time in a sub-microbatch.
_FIXED_SHARE = 0.05


def place_dip(work: SampleWork, num_microbatches: int) -> Placement:
    """At most K microbatches, unless the memory caps cut the batch into more parents."""
    parents = parent_blocks(work, num_microbatches)
    counts = sub_microbatch_counts(work, parents, num_microbatches)
    bounds = np.searchsorted(parents, np.arange(len(counts) + 1)).tolist()
    encoder, llm = np.empty_like(parents), np.empty_like(parents)
    encodes = np.bincount(work.costs.media_sample, work.costs.has_media, work.num_samples) > 0
    first = 0
    for parent, count in enumerate(counts):
        rows = slice(bounds[parent], bounds[parent + 1])
        encoder[rows] = first + even_runs(work.patches[rows], count)
        llm[rows] = first + even_runs(work.tokens[rows], count)
        first += count
    return place_samples(work, encoder, np.where(encodes, np.maximum(llm, encoder), llm))


def parent_blocks(work: SampleWork, num_microbatches: int) -> IntArray:
    """[N] parent of each sample: consecutive, each within the memory caps."""
    parents = -(-num_microbatches // _MICROBATCHES_PER_PARENT)
    return split_above_caps(work, equal_blocks(work.num_samples, min(parents, work.num_samples)))


def sub_microbatch_counts(work: SampleWork, parents: IntArray, num_microbatches: int) -> list[int]:
    """Microbatches of each parent: one at least, as many as K allows, none below the efficient size."""
    num_parents = int(parents.max()) + 1
    samples = np.bincount(parents)
    size, efficient = np.zeros(num_parents), np.ones(num_parents)
    for amounts, smallest in ((work.patches, _efficient_patches(work)), (work.tokens, _efficient_tokens(work))):
        sums = microbatch_sums(parents, amounts, num_parents)
        if sums.any():
            size = np.maximum(size, sums / sums.sum())
            efficient = np.maximum(efficient, np.ceil(sums / smallest) if smallest > 0 else samples)
    most = np.minimum(samples, efficient).astype(np.int64).tolist()
    if not size.any():
        most, size = samples.tolist(), samples / len(parents)
    counts = [1] * num_parents
    heap = [(-size[parent], parent) for parent in range(num_parents) if most[parent] > 1]
    heapq.heapify(heap)
    for _ in range(num_microbatches - num_parents):
        if not heap:
            break
        parent = heapq.heappop(heap)[1]
        counts[parent] += 1
        if counts[parent] < most[parent]:
            heapq.heappush(heap, (-size[parent] / counts[parent], parent))
    return counts


def even_runs(sizes: IntArray, count: int) -> IntArray:
    """[n] run of each of n >= count items: consecutive, none empty, cut nearest to equal shares of the total size."""
    if not sizes.any():
        return equal_blocks(len(sizes), count)
    middles = np.cumsum(sizes) - sizes / 2
    starts = [0]
    for run in range(1, count):
        start = int(np.searchsorted(middles, run * sizes.sum() / count))
        starts.append(min(max(start, starts[-1] + 1), len(sizes) - count + run))
    return np.repeat(np.arange(count), np.diff([*starts, len(sizes)]))


def _efficient_patches(work: SampleWork) -> float:
    return _efficient_size(work, slice(None, work.shape.num_encoder_stages), work.media_stage_seconds, work.patches)


def _efficient_tokens(work: SampleWork) -> float:
    return _efficient_size(work, slice(work.shape.num_encoder_stages, None), work.llm_stage_seconds, work.tokens)


def _efficient_size(work: SampleWork, stages: slice, seconds: FloatArray, amounts: IntArray) -> float:
    """Patches or tokens at which fixed seconds take their largest share; 0 where there are none, inf without work."""
    costs = work.costs.stage_costs(work.shape)
    fixed = sum(costs.forward_fixed_seconds[stages]) + sum(costs.backward_fixed_seconds[stages])
    if fixed == 0:
        return 0.0
    total = float(seconds.sum())
    return (1 / _FIXED_SHARE - 1) * fixed * float(amounts.sum()) / total if total > 0 else np.inf
