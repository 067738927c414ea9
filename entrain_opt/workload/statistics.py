"""What global batches of a dataset cost: the numbers that a static plan is made from.

Single samples differ by orders of magnitude, sums over a global batch by a few percent; a plan is judged on the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.samples import MEDIA_KINDS, SampleTable

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStatistics:
    """Sums over independent global batches.

    Attributes:
        names: [K] what is summed.
        sums: [num_batches, K].
        maxima: [num_batches, K] of the largest sample of each batch.
        rows: [num_batches, global_batch_size] the samples drawn.
    """

    names: tuple[str, ...]
    sums: NDArray[np.float64]
    maxima: NDArray[np.float64]
    rows: NDArray[np.int64]

    @property
    def mean(self) -> NDArray[np.float64]:
        """[K] mean sum of a batch."""
        return self.sums.mean(axis=0)


def global_batch_statistics(
    values: Mapping[str, ArrayLike], global_batch_size: int, num_batches: int, *, seed: int = 0
) -> BatchStatistics:
    """Sums of per-sample values over independent random global batches.

    Within a batch no sample repeats, unless the batch is larger than the dataset: then every sample appears equally
    often, but for the remainder. Batches are independent of each other, as Algorithm 1 of the paper asks.

    Args:
        values: name -> [N] per-sample values.
        global_batch_size: samples per batch.
        num_batches: batches to draw.
        seed: the same seed draws the same batches.

    Raises:
        WorkloadError: no values, columns of different length, or a size below 1.
    """
    columns = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
    lengths = {name: column.shape for name, column in columns.items()}
    if not columns or len(set(lengths.values())) != 1 or any(len(s) != 1 or s[0] < 1 for s in lengths.values()):
        raise WorkloadError(f"values: expected columns of one value per sample, found shapes {lengths}.")
    if global_batch_size < 1 or num_batches < 1:
        raise WorkloadError(
            f"global_batch_size and num_batches: expected at least 1, found {global_batch_size} and {num_batches}."
        )
    num_samples = next(iter(lengths.values()))[0]
    repeats, rest = divmod(global_batch_size, num_samples)
    generator = np.random.default_rng(seed)
    whole = np.tile(np.arange(num_samples), repeats)
    rows = np.stack(
        [
            np.concatenate([whole, generator.choice(num_samples, size=rest, replace=False)]).astype(np.int64)
            for _ in range(num_batches)
        ]
    )
    stacked = np.stack([column[rows] for column in columns.values()], axis=2)
    return BatchStatistics(names=tuple(columns), sums=stacked.sum(axis=1), maxima=stacked.max(axis=1), rows=rows)


def workload_table(samples: SampleTable, *, title: str = "Workload") -> Table:
    """A table to print: how samples differ, and what they hold."""
    from rich.table import Table

    if not len(samples):
        raise WorkloadError("samples: expected at least one, found none.")
    table = Table(title=title)
    for column in ("per sample", "median", "p90", "p99", "max", "total"):
        table.add_column(column, justify="left" if column == "per sample" else "right")
    for name, values in (
        ("media items", samples.media_counts),
        ("encoder patches", samples.sum_media(samples.media_patches)),
        ("media tokens", samples.sum_media(samples.media_tokens)),
        ("text tokens", samples.text_tokens),
        ("total tokens", samples.total_tokens),
        ("label tokens", samples.label_tokens),
    ):
        quantiles = np.percentile(values, [50, 90, 99, 100])
        table.add_row(name, *(f"{value:,.0f}" for value in quantiles), f"{np.sum(values):,.0f}")
    text_only = float(np.mean(samples.media_counts == 0))
    counts = np.bincount(samples.media_kind, minlength=len(MEDIA_KINDS))
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in zip(MEDIA_KINDS, counts, strict=True) if count)
    table.caption = f"{len(samples):,} samples, {text_only:.0%} text-only; media: {kinds or 'none'}"
    return table
