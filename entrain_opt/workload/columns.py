"""Files of columns as samples: Parquet, and the Arrow files of a saved Hugging Face dataset.

A row needs `messages` (a list, or JSON text) or `texts` (a list of `user` and `assistant`, as in FineVision). Images
stand in a column `images` or `image`, audio in `audios` or `audio`, video in `videos` or `video`: lists of structs of
`bytes` and `path`, one such struct, plain bytes, or paths relative to the file's folder. A column `id` or `sample_id`
names the rows; without one they are called `<file>:<row>`, rows counted from 0.

Parquet is read one row group at a time, in batches, and only the columns above; a row group that cannot be read is one
bad record that counts its rows. A single row of Parquet costs its whole row group, so training reads rows from an Arrow
copy (`unpack.py`). Arrow files are mapped: a row costs its own bytes, and images only if they are looked at.

Promise: pixels are not decoded, media bytes are not copied, a damaged page is noticed where the file has checksums.
Price: Parquet about 1 GB/s and core; 60 microseconds per row beside that.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.bad_samples import BadSample
from entrain_opt.workload.conversation import (
    ChatSample,
    MediaItem,
    Place,
    media_item,
    sample_from_messages,
    sample_from_turns,
)
from entrain_opt.workload.samples import MEDIA_KINDS
from entrain_opt.workload.shards import Shard, file_state

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_BATCH_ROWS = 64
_ID_COLUMNS = ("id", "sample_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which columns hold what.

    Attributes:
        text: `messages` or `texts`.
        media: media kind -> column.
        id: column, or None.
    """

    text: str
    media: dict[str, str]
    id: str | None

    @property
    def columns(self) -> list[str]:
        return [self.text, *self.media.values(), *([self.id] if self.id else [])]

    @classmethod
    def find(cls, names: Sequence[str], path: Path) -> Layout:
        """The layout of a file.

        Raises:
            WorkloadError: there is no text column; says which columns were found.
        """
        text = next((name for name in ("messages", "texts") if name in names), None)
        if text is None:
            hint = " A trace of sizes serves to plan only." if "text_words" in names else ""
            raise WorkloadError(
                f"dataset: {path}: expected a column messages, or texts (with user and assistant), and images "
                f"beside it; found {list(names)}. Rename the column that holds the conversation.{hint}"
            )
        for kind in MEDIA_KINDS:
            if {kind, f"{kind}s"} <= set(names):
                raise WorkloadError(
                    f"dataset: {path}: expected one column of {kind}s, found {kind} and {kind}s. Drop one of them."
                )
        media = {kind: name for kind in MEDIA_KINDS for name in (kind, f"{kind}s") if name in names}
        return cls(text=text, media=media, id=next((name for name in _ID_COLUMNS if name in names), None))


class ColumnShard(Shard):
    """Rows of a file of columns; the formats differ in how batches are read."""

    layout: Layout

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name

    @abstractmethod
    def batches(
        self, start: int, end: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pyarrow.RecordBatch | BadSample]]:
        """Batches of the rows from `start` up to `end` with their first rows; unreadable rows come as a `BadSample`."""

    @property
    def has_ids(self) -> bool:
        return self.layout.id is not None

    def location(self, row: int) -> str:
        return f"{self.path}:{row}"

    def sample(self, row: int) -> ChatSample:
        _, batch = next(self.batches(row, row + 1, self.layout.columns))
        if isinstance(batch, BadSample):
            raise WorkloadError(f"{batch.location}: {batch.reason}")
        return self._parse(batch, 0, row)

    def read(self, start: int, end: int) -> Iterator[ChatSample | BadSample]:
        for first, batch in self.batches(start, end, self.layout.columns):
            if isinstance(batch, BadSample):
                yield batch
                continue
            for index in range(batch.num_rows):
                try:
                    yield self._parse(batch, index, first + index)
                except WorkloadError as error:
                    sample_id = self._own_id(batch, index, first + index)
                    yield BadSample.from_error(
                        error,
                        sample_id=str(sample_id) if isinstance(sample_id, str | int) else "?",
                        location=self.location(first + index),
                    )

    def find_ids(self) -> Iterator[str | None]:
        assert self.layout.id is not None  # Asked only of shards that have ids.
        for _, batch in self.batches(0, len(self), [self.layout.id]):
            if isinstance(batch, BadSample):
                yield from [None] * batch.num_samples
            else:
                for value in batch.column(0).to_pylist():
                    yield None if value is None else str(value)

    def state(self, start: int, end: int) -> bytes:
        """Covers the file by its size and time, and media files beside it."""
        digest = hashlib.sha256(f"{self.path.name} {start} {end} ".encode() + file_state(self.path))
        for path in self._named_files(start, end):
            digest.update(file_state(self.path.parent / path))
        return digest.digest()

    @abstractmethod
    def _named_files(self, start: int, end: int) -> Iterator[str]:
        """Paths in the media columns of the rows. Those of embedded bytes name no file: then the hash says so."""

    def _own_id(self, batch: pyarrow.RecordBatch, index: int, row: int) -> Any:
        return f"{self.name}:{row}" if self.layout.id is None else batch.column(self.layout.id)[index].as_py()

    def _parse(self, batch: pyarrow.RecordBatch, index: int, row: int) -> ChatSample:
        place = Place(location=self.location(row), folder=self.path.parent)
        conversation = _as_list(batch.column(self.layout.text)[index].as_py(), self.layout.text, place)
        beside = {
            kind: _media_items(batch.column(column)[index], kind, column, place)
            for kind, column in self.layout.media.items()
        }
        build = sample_from_messages if self.layout.text == "messages" else sample_from_turns
        return build(conversation, beside, sample_id=self._own_id(batch, index, row), place=place)


class Parquet(ColumnShard):
    """A Parquet file."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        metadata = self.file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._groups = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self.layout = Layout.find(self.file.schema_arrow.names, path)

    def __reduce__(self) -> Any:
        return type(self), (self.path, self.name)

    @cached_property
    def file(self) -> pyarrow.parquet.ParquetFile:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self.path, memory_map=True, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise WorkloadError(
                f"dataset: {self.path} is not a whole Parquet file ({error}). Fetch it again."
            ) from error

    def __len__(self) -> int:
        return int(self._groups[-1])

    @property
    def groups(self) -> NDArray[np.int64]:
        return self._groups

    def batches(
        self, start: int, end: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pyarrow.RecordBatch | BadSample]]:
        import pyarrow as pa

        first_group = int(np.searchsorted(self._groups, start, side="right")) - 1
        for group in range(first_group, len(self._groups) - 1):
            position, group_end = int(self._groups[group]), int(self._groups[group + 1])
            if position >= end:
                return
            batches = self.file.iter_batches(
                batch_size=_BATCH_ROWS, row_groups=[group], columns=list(columns), use_threads=False
            )
            while position < min(group_end, end):
                try:
                    batch = next(batches)
                except (pa.ArrowException, OSError) as error:
                    yield (
                        max(position, start),
                        self._unreadable(max(position, start), min(group_end, end), group, error),
                    )
                    break
                first, last = max(start, position), min(end, position + batch.num_rows)
                if first < last:
                    yield first, batch.slice(first - position, last - first)
                position += batch.num_rows

    def _unreadable(self, first: int, end: int, group: int, error: Exception) -> BadSample:
        return BadSample(
            sample_id="?" if end - first > 1 or self.has_ids else f"{self.name}:{first}",
            location=self.location(first),
            reason=f"row group {group} cannot be read, rows {first} to {end - 1} are lost ({str(error).strip()}). "
            "Fetch the file again.",
            num_samples=end - first,
        )

    def _named_files(self, start: int, end: int) -> Iterator[str]:
        leaves = [self.file.schema.column(index).path for index in range(len(self.file.schema))]
        wanted = [leaf for leaf in leaves if leaf.split(".")[0] in self.layout.media.values() and _is_path(leaf)]
        if wanted:
            for _, batch in self.batches(start, end, wanted):
                if not isinstance(batch, BadSample):
                    yield from _strings(batch.to_pylist())


class Arrow(ColumnShard):
    """An Arrow file or stream, mapped; `shown_path` and `name` are those of the file that it was unpacked from."""

    def __init__(self, path: Path, name: str, shown_path: Path | None = None) -> None:
        super().__init__(shown_path or path, name)
        self._mapped_path = path
        self.layout = Layout.find(self.table.schema.names, self.path)

    def __reduce__(self) -> Any:
        return type(self), (self._mapped_path, self.name, self.path)

    @cached_property
    def table(self) -> pyarrow.Table:
        import pyarrow as pa

        try:
            source = pa.memory_map(str(self._mapped_path))
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            return (pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)).read_all()
        except (pa.ArrowException, OSError) as error:
            raise WorkloadError(
                f"dataset: {self._mapped_path} is not a whole Arrow file ({error}). Save the dataset again."
            ) from error

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def batches(
        self, start: int, end: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, pyarrow.RecordBatch | BadSample]]:
        position = start
        for batch in self.table.select(list(columns)).slice(start, end - start).to_batches():
            yield position, batch
            position += batch.num_rows

    def _named_files(self, start: int, end: int) -> Iterator[str]:
        import pyarrow as pa

        for column in self.layout.media.values():
            for chunk in self.table[column].slice(start, end - start).chunks:
                values = chunk
                while not (pa.types.is_struct(values.type) or _is_text(values.type)):
                    if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
                        break
                    values = values.flatten()
                if pa.types.is_struct(values.type) and values.type.get_field_index("path") >= 0:
                    values = values.field("path")
                if _is_text(values.type):
                    yield from _strings(values.to_pylist())


def _is_path(leaf: str) -> bool:
    return leaf.endswith(".path") or not leaf.endswith(".bytes")


def _is_text(kind: pyarrow.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _strings(value: Any) -> Iterator[str]:
    """All strings in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _as_list(value: Any, column: str, place: Place) -> Any:
    """A list of records from JSON text, or from the struct of lists that older `datasets` features make."""
    if isinstance(value, str) and column == "messages":
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise place.error(f"{column}: expected a list or JSON text ({error}).") from error
    if isinstance(value, Mapping) and value and all(isinstance(inner, list) for inner in value.values()):
        if len({len(inner) for inner in value.values()}) != 1:
            raise place.error(f"{column}: expected lists of equal length in {sorted(value)}.")
        value = [dict(zip(value, inner, strict=True)) for inner in zip(*value.values(), strict=True)]
    return value


def _media_items(cell: Any, kind: str, column: str, place: Place) -> list[MediaItem]:
    """The items of one cell: a list, one item, or null."""
    import pyarrow as pa

    if not cell.is_valid:
        return []
    if isinstance(cell, pa.ListScalar):
        return [
            media_item(_media_value(value), kind, f"{column}[{index}]", place)
            for index, value in enumerate(cell.values)
        ]
    return [media_item(_media_value(cell), kind, column, place)]


def _media_value(scalar: Any) -> Any:
    """A cell's value, bytes as a view of the file's own memory."""
    import pyarrow as pa

    if isinstance(scalar, pa.StructScalar) and scalar.is_valid:
        return {name: _media_value(scalar[name]) for name in ("bytes", "path") if name in scalar}
    if scalar.is_valid and isinstance(scalar, pa.BinaryScalar) and not isinstance(scalar, pa.StringScalar):
        return memoryview(scalar.as_buffer())
    return scalar.as_py()
