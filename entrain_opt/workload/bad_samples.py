"""Samples that training could not use: one record, one policy, one table, whatever the format of the data.

A sample is bad when its file is truncated or empty, the model's processor refuses its size, placeholders and media
differ in number, nothing is left to learn from, or it is longer than the model's context. Where a whole block of rows
cannot be read (a broken row group of a Parquet file), one record stands for all of them and counts them.

Promise: every bad sample of all files is in the report, with its id, place and reason; `error` stops with it, `skip`
leaves the samples out and says how many.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from entrain_opt.errors import RuntimeConfigError, WorkloadError

if TYPE_CHECKING:
    from rich.table import Table

Policy = Literal["error", "skip"]
POLICIES = ("error", "skip")

_log = logging.getLogger(__name__)
_SHOWN_SAMPLES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSample:
    """A sample that training could not use.

    Attributes:
        sample_id: its id, or "?" where it could not be read.
        location: `file:line` or `file:row`.
        reason: why, and what to do.
        num_samples: how many samples the record stands for; more than one only for rows that could not be read at all.
    """

    sample_id: str
    location: str
    reason: str
    num_samples: int = 1

    @classmethod
    def from_error(cls, error: WorkloadError, *, sample_id: str, location: str) -> BadSample:
        """The record of an error; what the record's own fields say is not repeated in its reason."""
        reason = str(error).removeprefix(f"{location}: ").removeprefix(f"sample {sample_id}: ")
        return cls(sample_id=sample_id, location=location, reason=reason)


def count_bad(bad: Sequence[BadSample]) -> int:
    """Samples that the records stand for."""
    return sum(sample.num_samples for sample in bad)


def check_policy(policy: str) -> None:
    """Raise RuntimeConfigError unless the policy is known."""
    if policy not in POLICIES:
        raise RuntimeConfigError(f"policy: expected error or skip, found {policy!r}.")


def apply_policy(bad: Sequence[BadSample], num_good: int, policy: Policy) -> None:
    """Stop at bad samples, or say that they are left out.

    Args:
        bad: the bad samples of the whole dataset.
        num_good: the other samples.
        policy: `error` or `skip`.

    Raises:
        WorkloadError: there are bad samples (policy `error`), or no good one (both).
        RuntimeConfigError: the policy is unknown.
    """
    check_policy(policy)
    if not bad:
        return
    shown = "\n".join(f"  {sample.sample_id}  {sample.location}  {sample.reason}" for sample in bad[:_SHOWN_SAMPLES])
    rest = count_bad(bad[_SHOWN_SAMPLES:])
    more = f"\n  ... and {rest} more" if rest else ""
    head = f"{count_bad(bad)} of {count_bad(bad) + num_good} samples cannot be used:\n{shown}{more}"
    if policy == "error":
        raise WorkloadError(f"{head}\nCorrect them, or leave them out with policy skip.")
    if not num_good:
        raise WorkloadError(f"{head}\nNo sample is left.")
    _log.warning("Skipping %s", head)


def bad_sample_table(bad: Sequence[BadSample], *, max_rows: int = 50) -> Table:
    """A table to print: id, place and reason."""
    from rich.table import Table

    table = Table(title=f"{count_bad(bad):,} samples cannot be used", title_justify="left")
    for column in ("id", "where", "reason"):
        table.add_column(column, overflow="fold")
    for sample in bad[:max_rows]:
        several = f" ({sample.num_samples:,} samples)" if sample.num_samples > 1 else ""
        table.add_row(sample.sample_id, sample.location + several, sample.reason)
    if rest := count_bad(bad[max_rows:]):
        table.caption = f"... and {rest:,} more; --json lists all"
    return table


def to_json(bad: Sequence[BadSample]) -> list[dict[str, Any]]:
    """The records as JSON values."""
    return [asdict(sample) for sample in bad]


def from_json(values: Sequence[dict[str, Any]]) -> tuple[BadSample, ...]:
    """The records that `to_json` wrote."""
    return tuple(BadSample(**value) for value in values)
