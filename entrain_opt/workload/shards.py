"""One file of samples, by row: what every format offers, and JSON lines.

JSON lines hold one JSON object a line: `{"id": "a1", "messages": [{"role": "user", "content": [{"type": "image",
"path": "x.jpg"}, {"type": "text", "text": "..."}]}, ...]}`, optionally with a list of paths named `images` beside.
Media paths are relative to the file's folder. Without an `id` a sample is called `<file>:<line>`.

Promise: text is UTF-8 or an error that names file and line; opening a file of N samples keeps 16 N bytes of NumPy
arrays and no text, so workers share it. Price: one pass over the bytes to find the lines (about 1 GB/s), then one
`open` and one `json.loads` per sample read.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.bad_samples import BadSample
from entrain_opt.workload.conversation import ChatSample, Place, media_item, sample_from_messages
from entrain_opt.workload.samples import MEDIA_KINDS

_SCAN_BYTES = 1 << 24
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Shard(ABC):
    """One file of samples.

    Attributes:
        path: the file.
        name: what ids are made from where a row has none; unique within the dataset.
    """

    path: Path
    name: str

    @abstractmethod
    def __len__(self) -> int:
        """Rows of the file."""

    @property
    def groups(self) -> NDArray[np.int64]:
        """First row of each group of rows that is read as a whole, and the number of rows."""
        return np.arange(len(self) + 1, dtype=np.int64)

    @property
    def has_ids(self) -> bool:
        """Whether ids must be read; False if row r is called `<name>:<r>`."""
        return True

    @abstractmethod
    def location(self, row: int) -> str:
        """Where a row stands, for messages."""

    @abstractmethod
    def sample(self, row: int) -> ChatSample:
        """One row.

        Raises:
            WorkloadError: the row is not valid (file, row and reason are named).
        """

    @abstractmethod
    def read(self, start: int, end: int) -> Iterator[ChatSample | BadSample]:
        """Rows from `start` up to `end`, in order; a row that is not valid comes as a `BadSample`."""

    @abstractmethod
    def find_ids(self) -> Iterator[str | None]:
        """The id of every row without checking the rest of it; None where it cannot be read."""

    @abstractmethod
    def state(self, start: int, end: int) -> bytes:
        """A hash of the rows' content and of the sizes and times of the media files that they name."""


def file_state(path: Path) -> bytes:
    """Size and time of a file, or that it is missing."""
    try:
        status = path.stat()
    except OSError:
        return b"missing"
    return f"{status.st_size} {status.st_mtime_ns}".encode()


class JsonLines(Shard):
    """A JSONL file."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self._bounds, self._line_numbers = _find_lines(path)

    def __len__(self) -> int:
        return len(self._line_numbers)

    def location(self, row: int) -> str:
        return f"{self.path}:{self._line_numbers[row]}"

    def sample(self, row: int) -> ChatSample:
        return self._parse(self.read_line(row), row)

    def read(self, start: int, end: int) -> Iterator[ChatSample | BadSample]:
        for row, line in zip(range(start, end), self._lines(start, end), strict=True):
            try:
                yield self._parse(line, row)
            except WorkloadError as error:
                sample_id = self._find_id(line, row) or "?"
                yield BadSample.from_error(error, sample_id=sample_id, location=self.location(row))

    def read_line(self, row: int) -> bytes:
        """The bytes of a row. The file is opened anew, so forked workers never share a file position."""
        return next(self._lines(row, row + 1))

    def _lines(self, start: int, end: int) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            for first, last in self._bounds[start:end].tolist():
                file.seek(first)
                yield file.read(last - first)

    def find_ids(self) -> Iterator[str | None]:
        return (self._find_id(line, row) for row, line in enumerate(self._lines(0, len(self))))

    def state(self, start: int, end: int) -> bytes:
        digest = hashlib.sha256()
        for row, line in zip(range(start, end), self._lines(start, end), strict=True):
            digest.update(line)
            try:
                media = self._parse(line, row).media
            except WorkloadError:  # Reported when it is measured; its bytes are in the hash.
                continue
            for item in media:
                digest.update(file_state(item.path))
        return digest.digest()

    def _parse(self, line: bytes, row: int) -> ChatSample:
        place = Place(location=self.location(row), folder=self.path.parent)
        record = _parse_object(line, place)
        beside = {}
        for kind in MEDIA_KINDS:
            name = f"{kind}s"
            if (values := record.get(name)) is not None:
                if not isinstance(values, list):
                    raise place.error(f"{name}: expected a list of paths, found {type(values).__name__}.")
                beside[kind] = [media_item(value, kind, f"{name}[{i}]", place) for i, value in enumerate(values)]
        return sample_from_messages(
            record.get("messages"), beside, sample_id=record.get("id", self._own_id(row)), place=place
        )

    def _own_id(self, row: int) -> str:
        return f"{self.name}:{self._line_numbers[row]}"

    def _find_id(self, line: bytes, row: int) -> str | None:
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            return None  # Reading the row in full says what is wrong with it.
        if not isinstance(record, dict):
            return None
        sample_id = record.get("id", self._own_id(row))
        return str(sample_id) if isinstance(sample_id, str | int) else None


def _parse_object(line: bytes, place: Place) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise place.error(
            f"byte 0x{line[error.start]:02x} at position {error.start} is not UTF-8. Convert the file."
        ) from error
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise place.error(f"not a JSON object ({error.msg} at character {error.pos}).") from error
    except RecursionError as error:
        raise place.error("JSON is nested too deeply.") from error
    if not isinstance(record, dict):
        raise place.error('expected an object with a non-empty list "messages".')
    return record


def _find_lines(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[N, 2] first byte and one past the last of every line that is not blank, and its [N] number from 1 on."""
    ends = []
    with path.open("rb") as file:
        first_byte = len(_BYTE_ORDER_MARK) if file.read(3) == _BYTE_ORDER_MARK else 0
        file.seek(0)
        size = 0
        while block := file.read(_SCAN_BYTES):
            ends.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + size)
            size += len(block)
    end = np.concatenate([*ends, [size]]).astype(np.int64)
    start = np.concatenate([[first_byte], end[:-1] + 1]).astype(np.int64)
    keep = end - start > 1
    with path.open("rb") as file:  # A short line may hold white space only.
        for line in np.flatnonzero(keep & (end - start < 64)):
            file.seek(int(start[line]))
            keep[line] = bool(file.read(int(end[line] - start[line])).strip())
    return np.stack([start, end], axis=1)[keep], np.flatnonzero(keep).astype(np.int64) + 1
