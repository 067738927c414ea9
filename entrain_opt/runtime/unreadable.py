"""Samples whose media cannot be decoded, left out of a step without a change to who sends what.

The index reads headers, so a file that breaks further in, or breaks later, shows itself in a loader. By then every rank
has planned the step with that sample. So it stays in its microbatch with zeros in place of its pixels, its labels are
taken out on the rank that has them, and its label tokens leave the denominator of the loss on every rank. The gradient
is that of the global batch without the sample.

Limit: where a family needs shapes or text around its media, a header that no longer reads ends the run, as under
`error`.
Price: one small reduction per step, only under the policy `skip`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from entrain_opt.errors import WorkloadError
from entrain_opt.runtime.stages import PackedText
from entrain_opt.runtime.waiting import WaitLog
from entrain_opt.workload.samples import SampleTable

if TYPE_CHECKING:
    from entrain_opt.runtime.batches import RankBatch, SampleReader

#: How many other items are read to learn the shape of an unreadable one.
_TRIES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """Which samples of a global batch this rank could not decode.

    Attributes:
        rows: [samples] of the table.
        label_tokens: [samples] of each.
        failed: [samples] 1 where this rank could not, else 0.
    """

    rows: np.ndarray
    label_tokens: np.ndarray
    failed: np.ndarray


class SkippingReader:
    """Reads like another reader, and goes on where media are unreadable.

    Args:
        reader: of the content.
        samples: its table.
    """

    def __init__(self, reader: SampleReader, samples: SampleTable) -> None:
        self._reader = reader
        self._samples = samples
        self._failed: set[int] = set()

    def pixels(self, row: int, item: int) -> Tensor:
        """As the other reader; zeros of the right shape if the item is unreadable.

        Raises:
            WorkloadError: no other item is readable that would tell the shape.
        """
        try:
            return self._reader.pixels(row, item)
        except WorkloadError as error:
            unreadable = error
        for other_row, other_item in self._others(row, item):
            try:
                pixels = self._reader.pixels(other_row, other_item)
            except WorkloadError:
                continue  # Reported when its own sample is drawn.
            rows = self._num_rows((row, item), (other_row, other_item), len(pixels))
            if rows is not None:
                print(f"entrain: left out of this step: {unreadable}", file=sys.stderr, flush=True)
                self._failed.add(row)
                return pixels.new_zeros((rows, *pixels.shape[1:]))
        raise unreadable

    def shapes(self, row: int) -> Sequence[tuple[int, ...]]:
        return self._reader.shapes(row)

    def text(self, row: int) -> Any:
        return self._reader.text(row)

    def _others(self, row: int, item: int) -> Iterator[tuple[int, int]]:
        """Items of the same kind, the nearest in size first."""
        table = self._samples
        media = table.media_offsets[row] + item
        same = np.flatnonzero(table.media_kind == table.media_kind[media])
        same = same[same != media]
        nearest = np.argsort(np.abs(table.media_patches[same] - table.media_patches[media]), kind="stable")
        for other in same[nearest[:_TRIES]]:
            other_row = int(np.searchsorted(table.media_offsets, other, side="right")) - 1
            yield other_row, int(other - table.media_offsets[other_row])

    def _num_rows(self, wanted: tuple[int, int], other: tuple[int, int], other_rows: int) -> int | None:
        """Rows of the wanted item's pixels: a tensor has one per tile, or one per patch; None if neither."""
        table = self._samples
        media, known = (int(table.media_offsets[row] + item) for row, item in (wanted, other))
        for column in (table.media_segments, table.media_patches):
            if column[known] == other_rows:
                return int(column[media])
        return None

    def take(self, rows: Sequence[int]) -> Decoded:
        """What happened since the last call, for the global batch that was read."""
        indices = np.asarray(rows, dtype=np.int64)
        failed = np.isin(indices, np.array(sorted(self._failed), dtype=np.int64)).astype(np.int64)
        self._failed.clear()
        return Decoded(rows=indices, label_tokens=np.asarray(self._samples.label_tokens[indices]), failed=failed)


def leave_out(batch: RankBatch, waits: WaitLog) -> RankBatch:
    """The batch without the samples that some rank could not decode; every rank must call this.

    Raises:
        WorkloadError: no sample is left.
        PeerLost: another rank is gone.
    """
    decoded = batch.decoded
    if decoded is None:
        return batch
    failed = torch.from_numpy(decoded.failed).to(batch.device)
    if dist.is_initialized():
        with waits.on("every rank to say which samples it could not decode"):
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    out = failed.cpu().numpy().astype(bool)
    if not out.any():
        return batch
    label_tokens = int(decoded.label_tokens[~out].sum())
    if label_tokens == 0:
        raise WorkloadError("no sample of this global batch could be decoded; see the messages above.")
    gone = set(decoded.rows[out].tolist())
    texts = {microbatch: _without(text, gone) for microbatch, text in batch.texts.items()}
    return replace(batch, texts=texts, label_tokens=label_tokens, num_left_out=int(out.sum()))


def _without(text: PackedText, gone: set[int]) -> PackedText:
    """The same packed row without the labels of some samples."""
    if text.label_positions is None or text.label_ids is None or not gone.intersection(text.sample_rows):
        return text
    device = text.label_positions.device
    ends = torch.tensor(text.segment_offsets[1:], device=device)
    stays = torch.tensor([row not in gone for row in text.sample_rows], device=device)
    keep = stays[torch.searchsorted(ends, text.label_positions, right=True)]
    return replace(text, label_positions=text.label_positions[keep], label_ids=text.label_ids[keep])
