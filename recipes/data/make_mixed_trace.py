"""Write `recipes/data/traces/see_and_hear.parquet`: sizes of samples with a picture, a clip, both or neither.

Rows of a trace with pictures and of one with clips are drawn by a seed and joined: a third has a picture, a third a
clip, a sixth both (words added up) and a sixth the words of a picture's sample without the picture.

    python recipes/data/make_mixed_trace.py PICTURES.parquet CLIPS.parquet [--output FILE]
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

NUM_ROWS = 1500

Row = dict[str, Any]


def joined(picture: Row | None, clip: Row | None, words: Row | None) -> Row:
    """One sample made of others."""
    parts = [part for part in (picture, clip, words) if part is not None]
    return {
        "sample_id": "+".join(part["sample_id"] for part in parts),
        "image_sizes": picture["image_sizes"] if picture else [],
        "audio_seconds": clip["audio_seconds"] if clip else None,
        "video_frames": None,
        "video_size": None,
        "text_chars": sum(part["text_chars"] for part in parts),
        "text_words": sum(part["text_words"] for part in parts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("clips", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "traces" / "see_and_hear.parquet")
    arguments = parser.parse_args()
    table, generator = pq.read_table(arguments.pictures), random.Random(0)
    pictures, clips = table.to_pylist(), pq.read_table(arguments.clips).to_pylist()
    for rows in (pictures, clips):
        generator.shuffle(rows)
    sixth = NUM_ROWS // 6
    with_picture, alone = pictures[: 3 * sixth], pictures[3 * sixth : 4 * sixth]
    found = [joined(picture, None, None) for picture in with_picture[: 2 * sixth]]
    found += [joined(picture, clip, None) for picture, clip in zip(with_picture[2 * sixth :], clips, strict=False)]
    found += [joined(None, clip, None) for clip in clips[sixth : 3 * sixth]]
    found += [joined(None, None, words) for words in alone]
    generator.shuffle(found)
    pq.write_table(pa.Table.from_pylist(found, schema=table.schema), arguments.output, compression="zstd")
    print(f"{len(found)} samples in {arguments.output}")


if __name__ == "__main__":
    main()
