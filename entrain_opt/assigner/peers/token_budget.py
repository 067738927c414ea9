"""`token_budget`: microbatches filled up to a number of tokens, as packing data loaders do.

First-fit decreasing: samples by falling tokens, each into the first microbatch that still has room. The budget is the
mean, total tokens / K, and at least the longest sample; where packing at that budget takes more than K microbatches,
it grows by bisection to the smallest one found that does not. So there may be fewer than K. Memory caps bind as
well, patches included; if they need more than K microbatches, the budget is the smallest that takes no more than they
do. Such loaders read a shard per replica; here the replicas are dealt the samples by length, which is kinder.

It knows tokens only: equal tokens are equal language-model work but for attention, and say nothing of the encoder's.
Promise: no microbatch above the budget; the same answer however the batch lists the samples. Price: about 20 packings
of N samples; 4 ms for 128, 50 ms for 512.
"""

from __future__ import annotations

import numpy as np

from entrain_opt.assigner.peers.length_grouped import length_order
from entrain_opt.assigner.work import Placement, SampleWork, place_samples
from entrain_opt.assignment import IntArray


def place_token_budget(work: SampleWork, num_microbatches: int) -> Placement:
    """At most K microbatches unless the memory caps need more; the fullest by token count first."""
    microbatch = pack_first_fit(work, smallest_budget(work, num_microbatches))
    return place_samples(work, microbatch, microbatch)


def smallest_budget(work: SampleWork, num_microbatches: int) -> int:
    """Tokens per microbatch: the mean, or as much more as packing into K microbatches takes."""
    total = int(work.tokens.sum())

    def packed(budget: int) -> int:
        return int(pack_first_fit(work, budget).max()) + 1

    allowed = max(num_microbatches, packed(total))
    # `high` always packs into what is allowed. First-fit is not monotone in its budget: a smaller one may exist.
    low, high = max(int(work.tokens.max()), -(-total // num_microbatches)), total
    if packed(low) <= allowed:
        return low
    while high - low > 1:
        middle = (low + high) // 2
        if packed(middle) <= allowed:
            high = middle
        else:
            low = middle
    return high


def pack_first_fit(work: SampleWork, budget: int) -> IntArray:
    """[N] microbatch of each sample by first-fit decreasing.

    Args:
        work: N >= 1 samples.
        budget: tokens, at least those of the longest sample.
    """
    order = length_order(work)
    most_tokens, most_patches = min(budget, work.tokens_limit), work.patches_limit
    tokens_room = np.full(work.num_samples, most_tokens, dtype=np.float64)
    patches_room = np.full(work.num_samples, most_patches, dtype=np.float64)
    microbatch = np.empty(work.num_samples, dtype=np.int64)
    used = 0
    for sample, tokens, patches in zip(
        order.tolist(), work.tokens[order].tolist(), work.patches[order].tolist(), strict=True
    ):
        # The first unused one always has room: every sample fits alone.
        fits = (tokens_room[: used + 1] >= tokens) & (patches_room[: used + 1] >= patches)
        chosen = int(fits.argmax())
        used = max(used, chosen + 1)
        tokens_room[chosen] -= tokens
        patches_room[chosen] -= patches
        microbatch[sample] = chosen
    return microbatch
