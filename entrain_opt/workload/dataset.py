"""Chat samples from a JSONL file, read lazily.

One JSON object a line: `{"id": "a1", "messages": [{"role": "user", "content": [{"type": "image", "path": "x.jpg"},
{"type": "text", "text": "..."}]}, ...]}`. `content` may be a string. Media paths are relative to the
file's folder. Without an `id` a sample is called `<file>:<line>`.

A text may say where its images stand with `<image>` markers: then markers and images must be equal in number, and the
images move to the markers. A list of paths named `images` beside `messages` fills these markers, or the image parts
that have no path, in order.

Promise: text is UTF-8 or an error that names file and line; nothing is dropped; opening a file of N samples keeps 16 N
bytes of NumPy arrays and no text, so workers share it. Price: one pass over the bytes to find the lines (about 1 GB/s),
then one `open` and one `json.loads` per sample read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.samples import MEDIA_KINDS

IMAGE_MARKER = "<image>"
_SCAN_BYTES = 1 << 24
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPath:
    """One media item of a sample: its kind (one of `MEDIA_KINDS`) and its file."""

    kind: str
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSample:
    """One conversation.

    Attributes:
        id: unique within the dataset.
        messages: `{"role": str, "content": [part, ...]}`; a part is `{"type": "text", "text": str}` or
            `{"type": kind}`.
        media: the files of the media parts, in the order of the parts.
        location: `file:line`, for error messages.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    media: tuple[MediaPath, ...] = ()
    location: str = ""


class ChatDataset:
    """The samples of one JSONL file, by row.

    Args:
        path: the JSONL file.

    Raises:
        WorkloadError: the file is missing or empty; on access: a line is not valid (file, line and reason are named).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise WorkloadError(
                f"dataset: expected a JSONL file at {self.path}, found none. Check the path in the recipe."
            )
        self._bounds, self._line_numbers = _find_lines(self.path)
        if not len(self._line_numbers):
            raise WorkloadError(f"dataset: {self.path} holds no line with a sample.")

    def __len__(self) -> int:
        return len(self._line_numbers)

    def __iter__(self) -> Iterator[ChatSample]:
        return (self[row] for row in range(len(self)))

    def __getitem__(self, row: int) -> ChatSample:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a dataset of {len(self)} samples")
        row = row % len(self)
        return parse_sample(self.read_line(row), self.path, int(self._line_numbers[row]))

    def location(self, row: int) -> str:
        """`file:line` of a row."""
        return f"{self.path}:{self._line_numbers[row]}"

    def read_line(self, row: int) -> bytes:
        """The bytes of a row. The file is opened anew, so forked workers never share a file position."""
        start, end = (int(bound) for bound in self._bounds[row])
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(end - start)

    def find_id(self, row: int) -> str | None:
        """The id of a row without checking the rest of it; None if the row is not readable as JSON with an id."""
        try:
            record = json.loads(self.read_line(row).decode("utf-8"))
        except (ValueError, RecursionError):
            return None  # Reading the row in full says what is wrong with it.
        if not isinstance(record, dict):
            return None
        sample_id = record.get("id", f"{self.path.name}:{self._line_numbers[row]}")
        return str(sample_id) if isinstance(sample_id, str | int) else None

    @cached_property
    def _sorted_ids(self) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
        # A row without a readable id is reported by the index; nobody can ask for it by id.
        found = [(sample_id, row) for row in range(len(self)) if (sample_id := self.find_id(row)) is not None]
        ids = np.array([sample_id for sample_id, _ in found])
        order = np.argsort(ids, kind="stable")
        repeated = np.flatnonzero(ids[order][1:] == ids[order][:-1])
        if len(repeated):
            name = ids[order[repeated[0]]]
            first, second = (found[place][1] for place in order[repeated[0] : repeated[0] + 2])
            raise WorkloadError(
                f"id {str(name)!r} appears at {self.location(first)} and {self.location(second)}; make it unique."
            )
        return ids[order], np.array([row for _, row in found], dtype=np.int64)[order]

    def row_of(self, sample_id: str) -> int:
        """The row of a sample id. The first call reads the whole file.

        Raises:
            WorkloadError: no sample has this id, or two samples share one.
        """
        ids, order = self._sorted_ids
        position = int(np.searchsorted(ids, sample_id))
        if position == len(ids) or ids[position] != sample_id:
            raise WorkloadError(f"id {sample_id!r}: not in {self.path}. Index the dataset again if it changed.")
        return int(order[position])


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


def parse_sample(line: bytes, path: Path, line_number: int) -> ChatSample:
    """One sample from the bytes of its line.

    Raises:
        WorkloadError: naming file, line and what is wrong.
    """
    location = f"{path}:{line_number}"
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"{location}: byte 0x{line[error.start]:02x} at position {error.start} is not UTF-8. Convert the file."
        ) from error
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{location}: not a JSON object ({error.msg} at character {error.pos}).") from error
    except RecursionError as error:
        raise WorkloadError(f"{location}: JSON is nested too deeply.") from error
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list) or not record["messages"]:
        raise WorkloadError(f'{location}: expected an object with a non-empty list "messages".')
    sample_id = record.get("id", f"{path.name}:{line_number}")
    if not isinstance(sample_id, str | int):
        raise WorkloadError(f"{location}: id: expected a string, found {sample_id!r}.")
    sample_id = _valid_text(str(sample_id), "id", location)
    beside = record.get("images")
    messages = [
        _parse_message(message, index, location, has_images_beside=beside is not None)
        for index, message in enumerate(record["messages"])
    ]
    if beside is not None:
        _place_images_beside(messages, beside, location)
    media = []
    for message in messages:
        _move_images_to_markers(message, location)
        for index, part in enumerate(message["content"]):
            if part["type"] != "text":
                media.append(MediaPath(kind=part["type"], path=path.parent / part["path"]))
                message["content"][index] = {"type": part["type"]}
    return ChatSample(id=sample_id, messages=tuple(messages), media=tuple(media), location=location)


def _valid_text(text: Any, field: str, location: str) -> str:
    if not isinstance(text, str):
        raise WorkloadError(f"{location}: {field}: expected a string, found {type(text).__name__}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        raise WorkloadError(
            f"{location}: {field}: lone surrogate {surrogate} is not text. Remove or replace it."
        ) from error
    return text


def _parse_message(message: Any, index: int, location: str, *, has_images_beside: bool) -> dict[str, Any]:
    field = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise WorkloadError(f"{location}: {field}: expected an object, found {type(message).__name__}.")
    role = _valid_text(message.get("role"), f"{field}.role", location)
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise WorkloadError(f"{location}: {field}.content: expected text or a list of parts.")
    parts: list[dict[str, str]] = []
    for number, part in enumerate(content):
        name = f"{field}.content[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            parts.append({"type": "text", "text": _valid_text(part.get("text"), f"{name}.text", location)})
        elif kind in MEDIA_KINDS:
            file = part.get("path", part.get(kind))
            if not (file is None and kind == "image" and has_images_beside):
                file = _valid_text(file, f"{name}.path", location)
                if not file:
                    raise WorkloadError(f"{location}: {name}.path: expected a path, found an empty string.")
            parts.append({"type": kind, "path": file or ""})
        else:
            raise WorkloadError(f"{location}: {name}.type: expected one of {['text', *MEDIA_KINDS]}, found {kind!r}.")
    return {"role": role, "content": parts}


def _count_markers(message: dict[str, Any]) -> int:
    return sum(part["text"].count(IMAGE_MARKER) for part in message["content"] if part["type"] == "text")


def _place_images_beside(messages: list[dict[str, Any]], images: Any, location: str) -> None:
    """Give the sample's images to its image parts without path, or to its markers where there are none."""
    if not isinstance(images, list):
        raise WorkloadError(f"{location}: images: expected a list of paths, found {type(images).__name__}.")
    paths = [_valid_text(image, f"images[{index}]", location) for index, image in enumerate(images)]
    places = [part for message in messages for part in message["content"] if part.get("path") == ""]
    if not places:
        for message in messages:
            added = [{"type": "image", "path": ""} for _ in range(_count_markers(message))]
            message["content"] += added
            places += added
    if len(places) != len(paths):
        raise WorkloadError(
            f"{location}: {len(places)} places for images in the messages, {len(paths)} paths in images. Give one path "
            f"per {IMAGE_MARKER} marker or image part."
        )
    for place, path in zip(places, paths, strict=True):
        place["path"] = path


def _move_images_to_markers(message: dict[str, Any], location: str) -> None:
    num_markers = _count_markers(message)
    if not num_markers:
        return
    images = [part for part in message["content"] if part["type"] == "image"]
    if len(images) != num_markers:
        raise WorkloadError(
            f"{location}: a {message['role']} message has {num_markers} {IMAGE_MARKER} markers in its text and "
            f"{len(images)} images. Give one image per marker, or no marker at all."
        )
    remaining = iter(images)
    content: list[dict[str, str]] = []
    for part in message["content"]:
        if part["type"] == "text":
            for index, piece in enumerate(part["text"].split(IMAGE_MARKER)):
                if index:
                    content.append(next(remaining))
                if piece:
                    content.append({"type": "text", "text": piece})
        elif part["type"] != "image":
            content.append(part)
    message["content"] = content
