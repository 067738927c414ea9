"""Small datasets in the formats people have, from the shipped pictures."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny-llava"
PICTURES = sorted((ROOT / "recipes" / "data" / "physics" / "images").iterdir())


def picture(index: int) -> bytes:
    """The bytes of a shipped JPEG."""
    return PICTURES[index % len(PICTURES)].read_bytes()


def noise(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG that does not compress."""
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def embedded(*contents: bytes) -> list[dict]:
    """Images as Hugging Face stores them: bytes, and the name that the file had."""
    return [{"bytes": content, "path": f"{index}.jpg"} for index, content in enumerate(contents)]


def turn(user: str, assistant: str) -> dict:
    return {"user": user, "assistant": assistant}


def fine_vision(num_rows: int = 12) -> pa.Table:
    """FineVision's columns: rows with 0, 1 and 2 images, 1 and 2 turns, and columns that nobody needs."""
    return pa.table(
        {
            "images": [embedded(*(picture(row + k) for k in range(row % 3))) for row in range(num_rows)],
            "texts": [[turn(f"question {row}?", f"answer {row}")] * (1 + row % 2) for row in range(num_rows)],
            "source": ["test"] * num_rows,
            "relevance_ratings": [[5]] * num_rows,
        }
    )


def write(table: pa.Table, path: Path, *, rows_per_group: int = 4, checksums: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows_per_group, write_page_checksum=checksums)
    return path


def save_to_disk(tables: list[pa.Table], folder: Path) -> Path:
    """The files that `datasets.Dataset.save_to_disk` makes: Arrow streams, state.json and dataset_info.json."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{index:05}-of-{len(tables):05}.arrow" for index in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}), encoding="utf-8")
    return folder


def damage_group(path: Path, group: int, column: str) -> None:
    """Flip a byte near the end of one column of one row group."""
    metadata = pq.ParquetFile(path).metadata.row_group(group)
    chunk = next(
        found
        for index in range(metadata.num_columns)
        if (found := metadata.column(index)).path_in_schema.startswith(column)
    )
    content = bytearray(path.read_bytes())
    start = chunk.data_page_offset if chunk.dictionary_page_offset is None else chunk.dictionary_page_offset
    content[start + chunk.total_compressed_size - 8] ^= 0xFF
    path.write_bytes(bytes(content))
