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
from entrain_opt.errors import ScheduleError
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
    """The units of one replica under an assignment. Microbatches without samples or media have no unit.

    Raises:
        ScheduleError: a media item goes through an encoder that the shape does not have.
    """
    encoder_units = _encoder_units(costs, assignment, shape, replica) if shape.num_encoders else []
    sources: dict[int, list[int]] = {}
    for position, unit in enumerate(encoder_units):
        for consumer in unit.consumers:
            sources.setdefault(consumer, []).append(position)
    samples = np.flatnonzero(assignment.replica == replica)
    samples = samples[np.argsort(assignment.llm_microbatch[samples], kind="stable")]
    llm_units = [
        LlmUnit(microbatch=microbatch, samples=group, sources=tuple(sources.get(microbatch, ())))
        for (microbatch,), group in _groups(samples, [assignment.llm_microbatch[samples]])
    ]
    return ReplicaWork(
        encoder_units=tuple(encoder_units),
        llm_units=tuple(llm_units),
        num_microbatches=int(assignment.num_microbatches[replica]),
    )


def _encoder_units(costs: BatchCosts, assignment: Assignment, shape: PipelineShape, replica: int) -> list[EncoderUnit]:
    media_sample = costs.media_sample
    media = np.flatnonzero(costs.has_media & (assignment.replica[media_sample] == replica))
    encoder = costs.encoder_index[media]
    if len(media) and encoder.max() >= shape.num_encoders:
        raise ScheduleError(
            f"media_encoder: expected 0 to {shape.num_encoders - 1} (encoder_stages of the shape), found "
            f"{encoder.max()} for media item {media[encoder.argmax()]}."
        )
    microbatch, consumer = assignment.encoder_microbatch[media], assignment.llm_microbatch[media_sample[media]]
    splits = np.array([shape.encoder_has_backward(e) for e in range(shape.num_encoders)])[encoder]
    returned_by = np.where(splits, consumer, -1)
    order = np.lexsort((media, returned_by, encoder, microbatch))
    consumer_of = dict(zip(media.tolist(), consumer.tolist(), strict=True))
    columns = [column[order] for column in (microbatch, encoder, returned_by)]
    units: list[EncoderUnit] = []
    previous, part = (-1, -1), 0
    for (m, e, one_consumer), items in _groups(media[order], columns):
        part = part + 1 if (m, e) == previous else 0
        previous = (m, e)
        consumers = (one_consumer,) if one_consumer >= 0 else tuple(sorted({consumer_of[i] for i in items.tolist()}))
        units.append(EncoderUnit(encoder=e, microbatch=m, part=part, media=items, consumers=consumers))
    return units


def _groups(items: IntArray, columns: list[IntArray]) -> list[tuple[tuple[int, ...], IntArray]]:
    """Runs of equal column values, in the given order: the values and the items of each run."""
    if not len(items):
        return []
    changes = np.zeros(len(items), dtype=bool)
    changes[0] = True
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    first = np.flatnonzero(changes)
    values = zip(*(column[first].tolist() for column in columns), strict=True)
    bounds = [*first.tolist(), len(items)]
    return [(value, items[bounds[i] : bounds[i + 1]]) for i, value in enumerate(values)]
