"""Small random changes of a placement, for searches.

Heavy samples are chosen more often: where they stand decides most.
"""

from __future__ import annotations

import random
from bisect import bisect
from dataclasses import dataclass

import numpy as np

from entrain_opt.assigner.joint import normalised_loads
from entrain_opt.assigner.work import Placement, SampleWork
from entrain_opt.assignment import IntArray

#: How far a microbatch moves in the order, and how far ahead a media item is encoded, at most.
NEAR = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A placement in the making.

    Attributes:
        media: [M] microbatch of each media entry; meaningless where there is no media.
        llm: [N] microbatch of each sample.
        count: microbatches; some may be empty.
    """

    media: IntArray
    llm: IntArray
    count: int

    @classmethod
    def together(cls, work: SampleWork, microbatch: IntArray) -> Layout:
        """All media items of a sample in its own microbatch."""
        return cls(media=microbatch[work.costs.media_sample], llm=microbatch, count=int(microbatch.max()) + 1)

    @classmethod
    def of(cls, placement: Placement) -> Layout:
        return cls(media=placement.encoder_microbatch, llm=placement.llm_microbatch, count=placement.num_microbatches)

    def placement(self, work: SampleWork) -> Placement:
        """Without empty microbatches: media of one without samples waits for the next, still in time."""
        used, llm = np.unique(self.llm, return_inverse=True)
        media = np.minimum(np.searchsorted(used, self.media), llm[work.costs.media_sample])
        media = np.where(work.costs.has_media, media, -1)
        return Placement(encoder_microbatch=media, llm_microbatch=llm, num_microbatches=len(used))


class Moves:
    """Proposes changes.

    Args:
        work: N > 1 samples.
        chance: where choices come from.
    """

    def __init__(self, work: SampleWork, chance: random.Random) -> None:
        self._chance = chance
        self._sample_of_media = work.costs.media_sample
        self._media = np.flatnonzero(work.costs.has_media).tolist()
        self._num_samples = work.num_samples
        weights = np.sqrt(normalised_loads(work).max(axis=1))
        self._cumulated = np.cumsum(weights if weights.any() else np.ones(work.num_samples)).tolist()

    def propose(self, layout: Layout) -> Layout:
        """A changed copy. The order of microbatches changes most often: it matters most."""
        draw = self._chance.random()
        if draw < 0.6 and layout.count > 1:
            return self._reorder(layout)
        if draw < 0.8 or not self._media:
            return self._exchange(layout)
        return self._encode_earlier(layout)

    def _reorder(self, layout: Layout) -> Layout:
        """Swap two microbatches, or take one out and put it in elsewhere, near or far."""
        chance, count = self._chance, layout.count
        i, j = int(layout.llm[self._heavy_sample()]), chance.randrange(count)
        if chance.random() < 0.5:
            j = max(0, min(count - 1, i + chance.choice((-1, 1)) * chance.randint(1, NEAR)))
        if chance.random() < 0.5:
            place = np.arange(count)
            place[i], place[j] = j, i
        else:
            order = list(range(count))
            order.insert(j, order.pop(i))
            place = np.empty(count, dtype=np.int64)
            place[order] = np.arange(count)
        llm = place[layout.llm]
        return Layout(media=np.minimum(place[layout.media], llm[self._sample_of_media]), llm=llm, count=count)

    def _heavy_sample(self) -> int:
        place = bisect(self._cumulated, self._chance.random() * self._cumulated[-1])
        return min(place, self._num_samples - 1)

    def _exchange(self, layout: Layout) -> Layout:
        """Move a sample to another microbatch (perhaps a new one), or swap two samples; their media goes with them."""
        chance, llm = self._chance, layout.llm.copy()
        first = self._heavy_sample()
        moved, count = [first], layout.count
        if chance.random() < 0.5:
            llm[first] = chance.randrange(count)
        else:
            second = chance.randrange(self._num_samples)
            llm[first], llm[second] = llm[second], llm[first]
            moved.append(second)
        media = layout.media.copy()
        with_them = np.isin(self._sample_of_media, moved)
        media[with_them] = llm[self._sample_of_media[with_them]]
        return Layout(media=media, llm=llm, count=count)

    def _encode_earlier(self, layout: Layout) -> Layout:
        """Encode one media item, or all of a sample one after the other, up to NEAR microbatches ahead."""
        chance, media = self._chance, layout.media.copy()
        item = chance.choice(self._media)
        sample = self._sample_of_media[item]
        if chance.random() < 0.5:
            media[item] = max(0, int(layout.llm[sample]) - chance.randint(0, NEAR))
        else:
            items = np.flatnonzero(self._sample_of_media == sample)
            step = chance.randint(0, NEAR)
            media[items] = np.maximum(0, layout.llm[sample] - step * np.arange(len(items))[::-1] // len(items))
        return Layout(media=media, llm=layout.llm, count=layout.count)
