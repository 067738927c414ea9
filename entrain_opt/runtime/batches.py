"""From the rows of a global batch to what one rank needs of it.

Every rank computes the same assignment and schedule from the same table of sizes, then loads only its own content: the
first encoder stage decodes images, the first language-model stage reads ids, the last one reads labels, and all others
load nothing. Runs in a loader process, ahead of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from entrain_opt.cost.analytic import model_flops
from entrain_opt.errors import WorkloadError
from entrain_opt.plan import Plan
from entrain_opt.runtime.families import Family, MediaUnit
from entrain_opt.runtime.rank_work import ActionSeconds, Agreement, CostSource, plan_rank
from entrain_opt.runtime.stages import PackedText
from entrain_opt.runtime.unreadable import Decoded
from entrain_opt.schedule.actions import Action
from entrain_opt.schedule.work import EncoderUnit, LlmUnit, ReplicaWork
from entrain_opt.simulator import Timeline
from entrain_opt.workload.samples import SampleTable

UnitKey = tuple[int, int, int]
"""(encoder, microbatch, part)"""


class SampleReader(Protocol):
    """Content of one row of the sample table; `entrain_opt.runtime.reader.ChatReader` for chat data."""

    def pixels(self, row: int, item: int) -> Tensor:
        """What the encoder takes of one media item of a sample: [tiles, channels, height, width] of an image, say."""

    def shapes(self, row: int) -> Sequence[tuple[int, ...]]:
        """Shape of each media item of a sample; asked for only where the family `needs_shapes`."""

    def text(self, row: int) -> Any:
        """`EncodedSample` of one sample."""


@dataclass(frozen=True, slots=True)
class UnitName:
    """Which encoder unit a language-model microbatch consumes."""

    encoder: int
    microbatch: int
    part: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBatch:
    """One global batch, as one rank executes it.

    Attributes:
        actions: this rank's schedule with messages.
        sources: encoder units that each language-model microbatch consumes, in feature order.
        consumers: how many microbatches each encoder unit feeds.
        encoder_sizes, llm_tokens: sizes of all units of the replica, from which message shapes follow.
        pixels: per encoder unit, on the first encoder stage.
        texts: per microbatch, on language-model stages.
        label_tokens: label tokens of the whole global batch, over all replicas.
        sample_ids: of the whole global batch, in the order drawn.
        num_tokens: packed tokens of the whole global batch.
        model_flops: operations that a pass over the whole global batch needs, forward and backward.
        deferred_samples: samples of this replica whose language-model part waits.
        encoder_imbalance, llm_imbalance: largest over mean microbatch seconds of this replica.
        assigner_seconds: time spent to assign, schedule and predict.
        predicted_seconds: of the iteration, from this replica's point of view: the slowest replica decides.
        agreement: hashes that tell whether ranks agree on samples, assignment and plan.
        action_seconds: predicted, of the replica's actions; only where they are waited for instead of computed.
        rows: of the global batch in the data set's table, in the order drawn.
        timeline: of this replica as simulated; only if the builder keeps it.
        decoded: which samples this rank could not decode; None if that is an error.
        num_left_out: samples that `leave_out` took out of the loss.
    """

    actions: tuple[Action, ...]
    sources: Mapping[int, tuple[UnitName, ...]]
    consumers: Mapping[UnitKey, int]
    encoder_sizes: Mapping[UnitKey, MediaUnit]
    llm_tokens: Mapping[int, int]
    pixels: Mapping[UnitKey, Tensor]
    texts: Mapping[int, PackedText]
    label_tokens: int
    sample_ids: tuple[str, ...]
    num_tokens: int
    model_flops: float
    deferred_samples: int
    encoder_imbalance: float
    llm_imbalance: float
    assigner_seconds: float
    predicted_seconds: float
    agreement: Agreement
    device: torch.device
    rows: NDArray[np.int64]
    timeline: Timeline | None = None
    action_seconds: ActionSeconds | None = None
    decoded: Decoded | None = None
    num_left_out: int = 0

    def num_consumers(self, encoder: int | None, unit: tuple[int, int, int]) -> int:
        """Microbatches that an encoder unit, named by its last stage, feeds."""
        assert encoder is not None
        return self.consumers[encoder, unit[1], unit[2]]

    def to(self, device: torch.device | str, **kwargs: Any) -> RankBatch:
        """The same batch with its tensors on a device."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, **kwargs)
            if isinstance(value, tuple):
                return tuple(move(item) for item in value)
            return value

        names = ("position_ids", "input_ids", "label_ids", "label_positions", "feature_positions", "feature_rows")
        return replace(
            self,
            pixels={key: move(value) for key, value in self.pixels.items()},
            texts={
                key: replace(text, **{name: move(getattr(text, name)) for name in names})
                for key, text in self.texts.items()
            },
            device=torch.device(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBatchBuilder:
    """Builds `RankBatch` records for one rank.

    Attributes:
        samples: the indexed dataset.
        reader: content of its rows; None loads nothing and notes predicted seconds instead (emulated compute).
        family: of the model; only needed with a reader.
        plan, cost_model: the same on every rank.
        replica, pipeline_rank: where this rank stands.
        keeps_timeline: whether batches carry what the simulator says of them, to be traced beside what is measured.
    """

    samples: SampleTable
    reader: SampleReader | None
    family: Family | None
    plan: Plan
    cost_model: CostSource
    replica: int
    pipeline_rank: int
    keeps_timeline: bool = False

    def build(self, rows: Sequence[int]) -> RankBatch:
        """Assign, schedule and load one global batch.

        Args:
            rows: of `samples`.

        Raises:
            WorkloadError: a file is broken or its content differs from the index.
            AssignmentError: a sample does not fit in memory.
        """
        batch_table = self.samples.take(np.asarray(rows, dtype=np.int64))
        planned = plan_rank(
            batch_table, self.cost_model, self.plan, replica=self.replica, pipeline_rank=self.pipeline_rank
        )
        # From here on, indices are those of this replica's samples.
        work, table = planned.work, batch_table.take(planned.samples)
        table_rows = np.asarray(rows, dtype=np.int64)[planned.samples]
        shape = self.plan.pipeline_shape
        stages = shape.stages_of_rank(self.pipeline_rank)
        holds_llm = self.reader is not None and any(stage in stages for stage in shape.stages_of_llm)
        first_encoder_stages = {shape.stages_of_encoder(e)[0]: e for e in range(shape.num_encoders)}
        mine = {first_encoder_stages[stage] for stage in stages if stage in first_encoder_stages}
        encodes = any(stage not in shape.stages_of_llm for stage in stages)
        units: dict[UnitKey, MediaUnit] = {}
        if self.reader is not None:
            units = {_key(unit): self._media_unit(table, table_rows, unit, encodes) for unit in work.encoder_units}
        return RankBatch(
            actions=planned.actions,
            sources={
                unit.microbatch: tuple(_name(work.encoder_units[source]) for source in unit.sources)
                for unit in work.llm_units
            },
            consumers={_key(unit): len(unit.consumers) for unit in work.encoder_units},
            encoder_sizes=units,
            llm_tokens={unit.microbatch: int(table.total_tokens[unit.samples].sum()) for unit in work.llm_units},
            pixels={
                _key(unit): self._pixels(table, table_rows, unit, units[_key(unit)])
                for unit in work.encoder_units
                if unit.encoder in mine and self.reader is not None
            },
            texts={u.microbatch: self._text(table, table_rows, u, work, stages) for u in work.llm_units}
            if holds_llm
            else {},
            label_tokens=int(batch_table.label_tokens.sum()),
            sample_ids=tuple(str(name) for name in batch_table.sample_ids),
            num_tokens=int(batch_table.total_tokens.sum()),
            model_flops=model_flops(self.cost_model.model, batch_table),
            deferred_samples=planned.num_deferred,
            encoder_imbalance=planned.encoder_imbalance,
            llm_imbalance=planned.llm_imbalance,
            assigner_seconds=planned.assigner_seconds,
            predicted_seconds=planned.predicted_seconds,
            agreement=planned.agreement,
            rows=np.asarray(rows, dtype=np.int64),
            timeline=planned.timeline if self.keeps_timeline else None,
            action_seconds=planned.seconds if self.reader is None else None,
            device=torch.device("cpu"),
        )

    @property
    def _content(self) -> SampleReader:
        assert self.reader is not None
        return self.reader

    @property
    def _layout(self) -> Family:
        assert self.family is not None
        return self.family

    def _media_unit(self, table: SampleTable, rows: np.ndarray, unit: EncoderUnit, encodes: bool) -> MediaUnit:
        """The items of a unit; their shapes only on ranks that encode."""
        samples = table.media_sample[unit.media]
        shapes: tuple[tuple[int, ...], ...] = ()
        if encodes and self._layout.needs_shapes:
            of_sample = {sample: self._content.shapes(int(rows[sample])) for sample in dict.fromkeys(samples.tolist())}
            shapes = tuple(
                tuple(of_sample[sample][media - table.media_offsets[sample]])
                for sample, media in zip(samples.tolist(), unit.media, strict=True)
            )
        return MediaUnit(
            module=self.plan.encoder_modules[unit.encoder],
            segments=tuple(table.media_segments[unit.media].tolist()),
            patches=tuple(table.media_patches[unit.media].tolist()),
            features=tuple(self._features(table, unit.media).tolist()),
            shapes=shapes,
        )

    def _features(self, table: SampleTable, media: np.ndarray) -> np.ndarray:
        """Rows that the projector makes of each media item."""
        columns = (table.media_patches, table.media_segments, table.media_tokens)
        sizes = zip(*(column[media].tolist() for column in columns), strict=True)
        return np.array([self._layout.features(*size) for size in sizes], dtype=np.int64)

    def _pixels(self, table: SampleTable, rows: np.ndarray, unit: EncoderUnit, items: MediaUnit) -> Tensor:
        tiles = []
        media_sample = table.media_sample
        for media, expected in zip(unit.media, self._layout.input_rows(items), strict=True):
            sample = media_sample[media]
            pixels = self._content.pixels(int(rows[sample]), int(media - table.media_offsets[sample]))
            if len(pixels) != expected:
                raise WorkloadError(
                    f"sample {table.sample_ids[sample]}: the processor made {len(pixels)} tiles or patches of media "
                    f"item {media - table.media_offsets[sample]}, the index says {expected}. "
                    "The dataset or the processor changed; run `entrain index` again."
                )
            tiles.append(pixels)
        return torch.cat(tiles)

    def _text(
        self, table: SampleTable, rows: np.ndarray, unit: LlmUnit, work: ReplicaWork, stages: tuple[int, ...]
    ) -> PackedText:
        shape = self.plan.pipeline_shape
        lengths = table.total_tokens[unit.samples]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        segment_offsets = [int(offset) for offset in offsets]
        is_first, is_last = shape.stages_of_llm[0] in stages, shape.stages_of_llm[-1] in stages
        if not (is_first or is_last or self._layout.reads_text_everywhere):
            plain = np.concatenate([self._layout.position_ids(int(length), ()) for length in lengths])
            return PackedText(segment_offsets=segment_offsets, position_ids=torch.from_numpy(plain))
        encoded = [self._content.text(int(rows[sample])) for sample in unit.samples]
        for sample, length, content in zip(unit.samples, lengths, encoded, strict=True):
            if len(content.input_ids) != length:
                raise WorkloadError(
                    f"sample {table.sample_ids[sample]}: has {len(content.input_ids)} tokens, the index says {length}. "
                    "The dataset, tokenizer or chat template changed; run `entrain index` again."
                )
        targets = self._feature_targets(table, unit.samples, offsets, encoded)
        text = PackedText(
            segment_offsets=segment_offsets,
            position_ids=self._position_ids(table, rows, unit.samples, offsets, targets),
            two_way_spans=tuple(
                (start + int(offset), end + int(offset))
                for offset, content in zip(offsets[:-1], encoded, strict=True)
                for start, end in self._layout.two_way_spans(content.feature_positions)
            ),
        )
        if is_last:
            labels = torch.from_numpy(np.concatenate([content.label_ids for content in encoded]))
            label_positions = torch.nonzero(labels != -100).squeeze(1)
            sample_rows = tuple(int(rows[sample]) for sample in unit.samples)
            text = replace(
                text, label_positions=label_positions, label_ids=labels[label_positions], sample_rows=sample_rows
            )
        if is_first:
            sources = [work.encoder_units[source] for source in unit.sources]
            text = replace(
                text,
                input_ids=torch.from_numpy(np.concatenate([content.input_ids for content in encoded])),
                feature_positions=tuple(
                    torch.from_numpy(np.concatenate([targets[m] for m in source.media if m in targets]))
                    for source in sources
                ),
                feature_rows=tuple(self._feature_rows(table, source, targets) for source in sources),
            )
        return text

    def _feature_targets(
        self, table: SampleTable, samples: np.ndarray, offsets: np.ndarray, encoded: Sequence[Any]
    ) -> dict[int, np.ndarray]:
        """{media item: rows of the packed sequence that its features fill}."""
        targets: dict[int, np.ndarray] = {}
        for sample, offset, content in zip(samples, offsets[:-1], encoded, strict=True):
            items = np.arange(table.media_offsets[sample], table.media_offsets[sample + 1])
            counts = self._features(table, items)
            if counts.sum() != len(content.feature_positions):
                raise WorkloadError(
                    f"sample {table.sample_ids[sample]}: has {len(content.feature_positions)} placeholders for "
                    f"{counts.sum()} features of its media. The dataset, tokenizer or chat template changed; run "
                    "`entrain index` again."
                )
            pieces = np.split(content.feature_positions + offset, np.cumsum(counts)[:-1]) if len(items) else []
            targets |= dict(zip(items.tolist(), pieces, strict=True))
        return targets

    def _position_ids(
        self,
        table: SampleTable,
        rows: np.ndarray,
        samples: np.ndarray,
        offsets: np.ndarray,
        targets: Mapping[int, np.ndarray],
    ) -> Tensor:
        """Positions that restart with each sample."""
        found = []
        for sample, start, end in zip(samples.tolist(), offsets[:-1], offsets[1:], strict=True):
            media: list[tuple[np.ndarray, tuple[int, ...]]] = []
            items = range(table.media_offsets[sample], table.media_offsets[sample + 1])
            if self._layout.reads_text_everywhere and self._layout.needs_shapes and len(items):
                shapes = self._content.shapes(int(rows[sample]))
                media = [(targets[item] - start, tuple(one)) for item, one in zip(items, shapes, strict=True)]
            found.append(self._layout.position_ids(int(end - start), media))
        return torch.from_numpy(np.concatenate(found, axis=-1))

    def _feature_rows(
        self, table: SampleTable, source: EncoderUnit, targets: Mapping[int, np.ndarray]
    ) -> Tensor | None:
        """Rows of a unit's features that belong to the given media; None if all do."""
        taken = np.array([media in targets for media in source.media])
        if taken.all():
            return None
        return torch.from_numpy(np.flatnonzero(np.repeat(taken, self._features(table, source.media))))


def _key(unit: EncoderUnit) -> UnitKey:
    return unit.encoder, unit.microbatch, unit.part


def _name(unit: EncoderUnit) -> UnitName:
    return UnitName(unit.encoder, unit.microbatch, unit.part)
