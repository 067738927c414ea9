"""SampleTable as one Parquet file: one row per sample, lists for its media.

Any Parquet reader understands the file. A table of up to `MAPPED_ROWS` rows is decoded into memory. A larger one is
decoded once into plain arrays beside the file (`<file>.columns/`), which every process of a machine then maps: their
pages are shared and only the rows that are touched are read.

Promise: a file appears whole or not at all, also when several processes write or decode it at once. Price: a million
samples with one image each write and read in about a second; the arrays take 8 bytes a value, ids 4 bytes a character.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.samples import SampleTable

if TYPE_CHECKING:
    import pyarrow

MAPPED_ROWS = 2_000_000
_FORMAT = "entrain_opt.samples.1"
_SCALARS = ("text_tokens", "label_tokens")
_MEDIA = ("media_kind", "media_patches", "media_segments", "media_tokens")


def write_sample_table(table: SampleTable, path: Path, *, notes: dict[str, Any] | None = None) -> None:
    """Write a table, whole or not at all.

    Args:
        table: is checked first.
        path: the Parquet file; its folder is made.
        notes: JSON values kept in the file's metadata.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table.check()
    offsets = pa.array(table.media_offsets)
    columns: dict[str, Any] = {"sample_id": pa.array(table.sample_ids, type=pa.string())}
    columns |= {name: pa.array(getattr(table, name)) for name in _SCALARS}
    for name in _MEDIA:
        columns[name] = pa.LargeListArray.from_arrays(offsets, pa.array(getattr(table, name)))
    metadata = {"entrain_format": _FORMAT, "entrain_notes": json.dumps(notes or {})}
    arrow = pa.table(columns).replace_schema_metadata(metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        pq.write_table(arrow, scratch, compression="zstd", write_page_checksum=True)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def read_sample_table(path: Path, *, mapped_rows: int = MAPPED_ROWS) -> SampleTable:
    """Read a table that `write_sample_table` made.

    Args:
        path: the Parquet file.
        mapped_rows: a table with more rows is memory-mapped from arrays beside the file.

    Raises:
        WorkloadError: the file is missing or not a sample table.
    """
    if _open(path).metadata.num_rows <= mapped_rows:
        return SampleTable(**_decode(path))
    folder = _decoded_folder(path)
    return SampleTable(**{field.name: np.load(folder / f"{field.name}.npy", mmap_mode="r") for field in _fields()})


def read_notes(path: Path) -> dict[str, Any]:
    """The notes that the table was written with.

    Raises:
        WorkloadError: the file is missing or not a sample table.
    """
    notes: dict[str, Any] = json.loads(_open(path).schema_arrow.metadata[b"entrain_notes"])
    return notes


def _fields() -> tuple[Any, ...]:
    return fields(SampleTable)


def _open(path: Path) -> pyarrow.parquet.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    except FileNotFoundError as error:
        raise WorkloadError(f"sample table: expected {path}, found none. Make it with `entrain index`.") from error
    except (pa.ArrowException, OSError) as error:
        raise WorkloadError(f"sample table: {path} is not a Parquet file: {error}") from error
    found = (file.schema_arrow.metadata or {}).get(b"entrain_format", b"").decode()
    if found != _FORMAT:
        raise WorkloadError(
            f"sample table: expected {path} in format {_FORMAT}, found {found or 'another Parquet file'}. Make it anew "
            "with `entrain index`; a bare trace is read by `read_trace`."
        )
    return file


def _decode(path: Path) -> dict[str, NDArray[Any]]:
    import pyarrow as pa

    try:
        arrow = _open(path).read()
    except (pa.ArrowException, OSError) as error:
        raise WorkloadError(f"sample table: {path} is damaged ({str(error).strip()}). Make it anew.") from error
    columns: dict[str, NDArray[Any]] = {"sample_ids": np.array(arrow["sample_id"].to_pylist(), dtype=np.str_)}
    for name in _SCALARS:
        columns[name] = arrow[name].to_numpy().astype(np.int64)
    for name in _MEDIA:
        lists = arrow[name].combine_chunks()
        columns[name] = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
        counts = lists.value_lengths().to_numpy(zero_copy_only=False)
        columns["media_offsets"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return columns


def _decoded_folder(path: Path) -> Path:
    """Arrays beside the file, made anew when the file changed."""
    status = path.stat()
    folder = path.with_name(f"{path.name}.columns") / f"{status.st_size}-{status.st_mtime_ns}"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="new-", suffix=".partial", dir=folder.parent))
        for name, values in _decode(path).items():
            np.save(scratch / f"{name}.npy", values)
        try:
            scratch.replace(folder)
        except OSError:
            shutil.rmtree(scratch)
            if not folder.exists():  # Otherwise another process was faster, with the same content.
                raise
    return folder
