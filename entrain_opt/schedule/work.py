"""What one replica has to compute in one iteration: units of encoder and language-model work and who needs whom.

The media items of an encoder microbatch whose gradients come back at different times form separate parts (split
backward): one part for each language-model microbatch that consumes them. An encoder that gets no gradients is never
split. Parts are numbered by the microbatch that consumes them, earliest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.plan import PipelineShape

IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderUnit:
    """One part of one encoder microbatch.

    Attributes:
        encoder: which encoder.
        microbatch, part: names of the unit in every action.
        media: indices into the batch's media columns, ascending.
        consumers: language-model microbatches that need its output, ascending; one only, if gradients return.
    """

    encoder: int
    microbatch: int
    part: int
    media: IntArray
    consumers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LlmUnit:
    """One language-model microbatch.

    Attributes:
        microbatch: name of the unit in every action.
        samples: indices into the batch's sample columns, ascending: the packing order.
        sources: the encoder units it consumes, as positions in `ReplicaWork.encoder_units`.
    """

    microbatch: int
    samples: IntArray
    sources: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaWork:
    """All units of one replica: encoder units by (microbatch, encoder, part), language-model units by microbatch."""

    encoder_units: tuple[EncoderUnit, ...]
    llm_units: tuple[LlmUnit, ...]
    num_microbatches: int

    def units_of_encoder(self, encoder: int) -> tuple[EncoderUnit, ...]:
        return tuple(unit for unit in self.encoder_units if unit.encoder == encoder)


def replica_work(costs: BatchCosts, assignment: Assignment, shape: PipelineShape, replica: int) -> ReplicaWork:
    """The units of one replica under an assignment. Microbatches without samples or media have no unit."""
    media_sample = costs.media_sample
    mine = costs.has_media & (assignment.replica[media_sample] == replica)
    encoder_units: list[EncoderUnit] = []
    sources: dict[int, list[int]] = {}
    num_microbatches = int(assignment.num_microbatches[replica])
    consumer = assignment.llm_microbatch[media_sample]
    for microbatch in range(num_microbatches):
        in_microbatch = mine & (assignment.encoder_microbatch == microbatch)
        for encoder in range(shape.num_encoders):
            media = np.flatnonzero(in_microbatch & (costs.encoder_index == encoder))
            if not len(media):
                continue
            consumers = np.unique(consumer[media])
            groups = (
                [(media[consumer[media] == c], (int(c),)) for c in consumers]
                if shape.encoder_has_backward(encoder)
                else [(media, tuple(int(c) for c in consumers))]
            )
            for part, (items, needed_by) in enumerate(groups):
                for c in needed_by:
                    sources.setdefault(c, []).append(len(encoder_units))
                encoder_units.append(
                    EncoderUnit(encoder=encoder, microbatch=microbatch, part=part, media=items, consumers=needed_by)
                )
    llm_units = []
    for microbatch in range(num_microbatches):
        samples = np.flatnonzero((assignment.replica == replica) & (assignment.llm_microbatch == microbatch))
        if len(samples):
            llm_units.append(
                LlmUnit(microbatch=microbatch, samples=samples, sources=tuple(sources.get(microbatch, ())))
            )
    return ReplicaWork(
        encoder_units=tuple(encoder_units), llm_units=tuple(llm_units), num_microbatches=num_microbatches
    )
