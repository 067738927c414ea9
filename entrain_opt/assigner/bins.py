"""Greedy filling of microbatches under the memory caps.

Each sample goes to the microbatch with the least load that still has room. Where none has room, one more microbatch is
opened: a cap is never exceeded, the number of microbatches is. Price: O(N log K) without binding caps.
"""

from __future__ import annotations

import heapq

import numpy as np

from entrain_opt.assigner.work import SampleWork
from entrain_opt.assignment import IntArray


class Microbatches:
    """Microbatches being filled.

    Attributes:
        microbatch: [N] the answer so far; -1 for samples not placed yet.
        misfits: samples that found no room, so that a microbatch was opened for them.
    """

    def __init__(self, work: SampleWork, num_microbatches: int) -> None:
        self._work = work
        self.microbatch: IntArray = np.full(work.num_samples, -1, dtype=np.int64)
        self.misfits: list[int] = []
        self._llm_seconds: list[float] = []
        self._encoder_seconds: list[float] = []
        self._patches: list[int] = []
        self._tokens: list[int] = []
        self._counts: list[int] = []
        self.open(num_microbatches)

    @property
    def count(self) -> int:
        return len(self._counts)

    def open(self, num_microbatches: int) -> None:
        """Add empty microbatches."""
        for column in (self._llm_seconds, self._encoder_seconds, self._patches, self._tokens, self._counts):
            column.extend([0] * num_microbatches)

    def place_by_encoder(self, samples: IntArray) -> None:
        """Each sample, in the given order, to the microbatch with the least encoder work."""
        self._place(samples, self._encoder_seconds, self._llm_seconds)

    def place_by_llm(self, samples: IntArray) -> None:
        """Each sample, in the given order, to the microbatch with the least language-model work."""
        self._place(samples, self._llm_seconds, self._encoder_seconds)

    def _place(self, samples: IntArray, first: list[float], second: list[float]) -> None:
        work = self._work
        rows = zip(
            samples.tolist(),
            work.encoder_seconds[samples].tolist(),
            work.llm_seconds[samples].tolist(),
            work.patches[samples].tolist(),
            work.tokens[samples].tolist(),
            strict=True,
        )
        most_patches, most_tokens = work.patches_limit, work.tokens_limit

        def has_room(microbatch: int, patches: int, tokens: int) -> bool:
            return (
                self._patches[microbatch] + patches <= most_patches and self._tokens[microbatch] + tokens <= most_tokens
            )

        heap = [(first[m], second[m], self._counts[m], m) for m in range(self.count)]
        heapq.heapify(heap)
        for sample, encoder_seconds, llm_seconds, patches, tokens in rows:
            full = []
            while heap and not has_room(heap[0][3], patches, tokens):
                full.append(heapq.heappop(heap))
            if heap:
                chosen = heapq.heappop(heap)[3]
            else:
                chosen = self.count
                self.open(1)
                self.misfits.append(sample)
            self.microbatch[sample] = chosen
            self._encoder_seconds[chosen] += encoder_seconds
            self._llm_seconds[chosen] += llm_seconds
            self._patches[chosen] += patches
            self._tokens[chosen] += tokens
            self._counts[chosen] += 1
            heapq.heappush(heap, (first[chosen], second[chosen], self._counts[chosen], chosen))
            for entry in full:
                heapq.heappush(heap, entry)


def split_above_caps(work: SampleWork, microbatch: IntArray) -> IntArray:
    """[N] microbatches within the memory caps: one that is above is cut into consecutive pieces, in sample order.

    Args:
        work: N samples.
        microbatch: [N] dense microbatch of each sample.
    """
    if not np.isfinite(work.patches_limit) and not np.isfinite(work.tokens_limit):
        return microbatch
    order = np.argsort(microbatch, kind="stable")
    split = np.empty_like(microbatch)
    current, source, patches, tokens = -1, -1, 0, 0
    for sample in order.tolist():
        patches += int(work.patches[sample])
        tokens += int(work.tokens[sample])
        if microbatch[sample] != source or patches > work.patches_limit or tokens > work.tokens_limit:
            current, source = current + 1, int(microbatch[sample])
            patches, tokens = int(work.patches[sample]), int(work.tokens[sample])
        split[sample] = current
    return split
