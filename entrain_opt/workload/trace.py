"""Bare workload traces -> SampleTable: planning without the data itself.

A trace is a Parquet file with one row per sample: `sample_id`, `image_sizes` (lists of [width, height]), `text_words`,
and where there are any `audio_seconds`, `video_frames` with `video_size` ([width, height]), and `video_fps`. Words
become tokens by a factor, and a stated share of them is taken as labels; both are assumptions of the caller, not facts
of the data. A sample's images come before its audio, its audio before its video.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.bad_samples import BadSample
from entrain_opt.workload.media import MediaRule, MediaSize
from entrain_opt.workload.samples import MEDIA_KINDS, SampleTable

_COLUMNS = ("sample_id", "image_sizes", "text_words")
#: Columns that a trace may lack, null where a sample has no such item.
_OPTIONAL_COLUMNS = ("audio_seconds", "video_frames", "video_size", "video_fps")
_KIND_COLUMNS = (("image_sizes", "image"), ("audio_seconds", "audio"), ("video_frames", "video"))


def read_trace(
    path: str | Path,
    rule: MediaRule,
    *,
    tokens_per_word: float = 1.3,
    label_share: float = 0.5,
    video_fps: float | None = None,
    bad: list[BadSample] | None = None,
) -> SampleTable:
    """The samples of a trace as the model of `rule` would see them.

    Args:
        path: the Parquet file.
        rule: sizes of the model's media.
        tokens_per_word: 1.3 is usual for English text with common tokenizers.
        label_share: share of the text tokens that count in the loss.
        video_fps: frames per second of videos whose `video_fps` is null or missing; None leaves it unknown.
        bad: takes the samples whose sizes the processor refuses, which are then left out; without it they raise.

    Raises:
        WorkloadError: missing file or columns, media that the rule lacks, or a size that the processor refuses.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    if tokens_per_word <= 0 or not 0 < label_share <= 1:
        raise WorkloadError(
            f"expected tokens_per_word > 0 and label_share in (0, 1], found {tokens_per_word} and {label_share}."
        )
    try:
        arrow = pq.read_table(path)
    except FileNotFoundError as error:
        raise WorkloadError(f"trace: expected a Parquet file at {path}, found none.") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise WorkloadError(f"trace: {path} is not a Parquet file: {error}") from error
    missing = [name for name in _COLUMNS if name not in arrow.column_names]
    if missing:
        raise WorkloadError(f"trace: {path}: expected columns {list(_COLUMNS)}, missing {missing}.")
    rows: dict[str, list[Any]] = {"image_sizes": arrow["image_sizes"].to_pylist()}
    for name in _OPTIONAL_COLUMNS:
        rows[name] = arrow[name].to_pylist() if name in arrow.column_names else [None] * len(arrow)
    for column, kind in _KIND_COLUMNS:
        if kind not in rule.kinds and any(value not in (None, []) for value in rows[column]):
            raise WorkloadError(
                f"trace: {path} holds {kind}, the model takes {', '.join(rule.kinds)}. Use another model."
            )
    ids = np.array(arrow["sample_id"].to_pylist(), dtype=np.str_)
    kept: list[int] = []
    counts, flat = [], []
    for row, sample_id in enumerate(ids):
        try:
            media = _row_media(rule, {name: values[row] for name, values in rows.items()}, video_fps)
        except WorkloadError as error:
            if bad is None:
                raise WorkloadError(f"trace: {path}: sample {sample_id}: {error}") from error
            bad.append(BadSample.from_error(error, sample_id=str(sample_id), location=f"{path}:{row}"))
            continue
        kept.append(row)
        counts.append(len(media))
        flat += media
    words = arrow["text_words"].to_numpy().astype(np.float64)[kept]
    text_tokens = np.maximum(1, np.ceil(words * tokens_per_word)).astype(np.int64)

    table = SampleTable(
        sample_ids=ids[kept],
        text_tokens=text_tokens,
        label_tokens=np.maximum(1, np.round(text_tokens * label_share)).astype(np.int64),
        media_offsets=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64),
        media_kind=np.array([MEDIA_KINDS.index(kind) for kind, _ in flat], dtype=np.int64),
        media_patches=np.array([size.patches for _, size in flat], dtype=np.int64),
        media_segments=np.array([size.segments for _, size in flat], dtype=np.int64),
        media_tokens=np.array([size.tokens for _, size in flat], dtype=np.int64),
    )
    table.check()
    return table


def _row_media(rule: MediaRule, row: dict[str, Any], video_fps: float | None) -> list[tuple[str, MediaSize]]:
    """(kind, size) of each media item of one sample."""
    media = [("image", size) for size in rule.images([(width, height) for width, height in row["image_sizes"] or ()])]
    if row["audio_seconds"] is not None:
        media.append(("audio", rule.audio(row["audio_seconds"])))
    if row["video_frames"] is not None:
        if row["video_size"] is None:
            raise WorkloadError("video_size: expected [width, height] beside video_frames, found none.")
        width, height = row["video_size"]
        fps = video_fps if row["video_fps"] is None else row["video_fps"]
        media.append(("video", rule.video(row["video_frames"], width, height, fps)))
    return media
