"""A placement in the making, for policies that change it step by step."""

from __future__ import annotations

from dataclasses import dataclass

from entrain_opt.assigner.work import Placement, SampleWork, place_media
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
        """Without empty microbatches."""
        return place_media(work, self.media, self.llm)
