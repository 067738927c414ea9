"""A placement in the making, for policies that change it step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entrain_opt.assigner.work import Placement, SampleWork
from entrain_opt.assignment import IntArray


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
