"""What the report shows, as frozen records: every number is computed before any figure or page is made."""

from __future__ import annotations

from dataclasses import dataclass

#: What a bar of the timeline stands for, in the order of the legend.
BAR_KINDS = (
    "encoder forward",
    "encoder backward",
    "deferred forward",
    "deferred backward",
    "LLM forward",
    "LLM backward",
    "weight gradients",
    "gradient reduction",
    "optimizer step",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableView:
    """A table of formatted cells.

    Attributes:
        caption: what it shows; its accessible name.
        columns: headings.
        rows: cells.
        text_columns: indices of the columns that hold words; the others are numbers.
        marked: index of the row to stand out; None for none.
        faint: indices of rows that are there for completeness only.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: tuple[int, ...] = (0,)
    marked: int | None = None
    faint: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One number of the headline."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One thing that a rank did.

    Attributes:
        rank: pipeline rank.
        kind: one of `BAR_KINDS`.
        label: short text on the bar.
        what: the unit in words.
        start, seconds: when and how long.
        contents: samples and patches or tokens in words; empty for reductions and steps.
    """

    rank: int
    kind: str
    label: str
    what: str
    start: float
    seconds: float
    contents: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """From the end of an encoder's forward to the start of the later language-model forward that needs it."""

    from_rank: int
    from_seconds: float
    to_rank: int
    to_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineView:
    """One replica's iteration.

    Attributes:
        ranks: name of each pipeline rank.
        bars, arrows: what ran, and what was deferred.
        end_seconds: end of the iteration.
        limit_seconds: end of the axis.
        summary: the picture in words.
    """

    ranks: tuple[str, ...]
    bars: tuple[Bar, ...]
    arrows: tuple[Arrow, ...]
    end_seconds: float
    limit_seconds: float
    summary: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadsView:
    """Seconds of forward and backward per stage that each microbatch of a replica asks for.

    Attributes:
        encoder, llm: per microbatch.
        encoder_deferred: the part of `encoder` whose samples run in a later microbatch.
        llm_deferred: the part of `llm` whose media were encoded earlier.
        limit_seconds: highest bar of the report.
        summary: the picture in words.
    """

    encoder: tuple[float, ...]
    encoder_deferred: tuple[float, ...]
    llm: tuple[float, ...]
    llm_deferred: tuple[float, ...]
    limit_seconds: float
    summary: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BubblesView:
    """Idle seconds of each pipeline rank by cause, means over replicas.

    Attributes:
        ranks: name of each.
        causes: (name, meaning, seconds per rank).
        limit_seconds: longest bar of the report.
        summary: the picture in words.
    """

    ranks: tuple[str, ...]
    causes: tuple[tuple[str, str, tuple[float, ...]], ...]
    limit_seconds: float
    summary: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeakView:
    """Bytes of each pipeline rank at its peak.

    Attributes:
        ranks: name of each.
        parts: (name, bytes per rank).
        limit_bytes: what a rank may use.
        summary: the picture in words.
    """

    ranks: tuple[str, ...]
    parts: tuple[tuple[str, tuple[float, ...]], ...]
    limit_bytes: float
    summary: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurveView:
    """Bytes of each pipeline rank of one replica over time: steps, (seconds, bytes from then on)."""

    ranks: tuple[str, ...]
    seconds: tuple[tuple[float, ...], ...]
    num_bytes: tuple[tuple[float, ...], ...]
    end_seconds: float
    limit_bytes: float
    summary: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioView:
    """Encoder over language-model work of random batches, by batch size.

    Attributes:
        sizes: batch sizes.
        lowest, low, median, high, highest: of the ratios at each size; low and high hold nine tenths between them.
        all_data: ratio of the whole data set.
        global_batch_size: of the recipe.
        trials: batches of each size.
        sentence: the certificate in words.
        summary: the picture in words.
    """

    sizes: tuple[int, ...]
    lowest: tuple[float, ...]
    low: tuple[float, ...]
    median: tuple[float, ...]
    high: tuple[float, ...]
    highest: tuple[float, ...]
    all_data: float
    global_batch_size: int
    trials: int
    sentence: str
    summary: str
