"""Bare workload traces -> SampleTable: planning without the data itself.

A trace is a Parquet file with one row per sample: `sample_id`, `image_sizes` (lists of [width, height]), `text_words`,
and where there are any `audio_seconds` and `video_frames`. Words become tokens by a factor, and a stated share of them
is taken as labels; both are assumptions of the caller, not facts of the data.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.media import MediaRule
from entrain_opt.workload.samples import MEDIA_KINDS, SampleTable

_COLUMNS = ("sample_id", "image_sizes", "text_words")


def read_trace(
    path: str | Path, rule: MediaRule, *, tokens_per_word: float = 1.3, label_share: float = 0.5
) -> SampleTable:
    """The samples of a trace as the model of `rule` would see them.

    Args:
        path: the Parquet file.
        rule: sizes of the model's media.
        tokens_per_word: 1.3 is usual for English text with common tokenizers.
        label_share: share of the text tokens that count in the loss.

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
    for column, kind in (("audio_seconds", "audio"), ("video_frames", "video")):
        if column in arrow.column_names and arrow[column].null_count < len(arrow) and kind not in rule.kinds:
            raise WorkloadError(
                f"trace: {path} holds {kind}, the model takes {', '.join(rule.kinds)}. Use another model."
            )
    ids = np.array(arrow["sample_id"].to_pylist(), dtype=np.str_)
    image_sizes = arrow["image_sizes"].to_pylist()
    sizes = []
    for sample_id, images in zip(ids, image_sizes, strict=True):
        try:
            sizes.append([rule.image(width, height) for width, height in images or ()])
        except WorkloadError as error:
            raise WorkloadError(f"trace: {path}: sample {sample_id}: {error}") from error
    flat = [size for item in sizes for size in item]
    words = arrow["text_words"].to_numpy().astype(np.float64)
    text_tokens = np.maximum(1, np.ceil(words * tokens_per_word)).astype(np.int64)
    table = SampleTable(
        sample_ids=ids,
        text_tokens=text_tokens,
        label_tokens=np.maximum(1, np.round(text_tokens * label_share)).astype(np.int64),
        media_offsets=np.concatenate([[0], np.cumsum([len(item) for item in sizes])]).astype(np.int64),
        media_kind=np.full(len(flat), MEDIA_KINDS.index("image"), dtype=np.int64),
        media_patches=np.array([size.patches for size in flat], dtype=np.int64),
        media_segments=np.array([size.segments for size in flat], dtype=np.int64),
        media_tokens=np.array([size.tokens for size in flat], dtype=np.int64),
    )
    table.check()
    return table
