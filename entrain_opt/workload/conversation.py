"""A record of any format becomes one conversation, checked: the only place.

A record holds `messages` (`{"role", "content"}`, the content a string or typed parts) or `texts` (pairs of `user` and
`assistant`, as in FineVision), and its media in the parts or in lists beside the text. A text may say where its images
stand with `<image>` markers: then markers and images must be equal in number, and the images move to the markers.
Images beside `messages` fill the image parts that have no file, or the markers, in order. Media beside `texts` without
markers stand before the first question.

Promise: nothing is dropped; what does not fit together raises with the place and what was found. Price: about 20
microseconds per sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.samples import MEDIA_KINDS

IMAGE_MARKER = "<image>"


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaItem:
    """One media item of a sample.

    Attributes:
        kind: one of `MEDIA_KINDS`.
        path: its file; where the bytes are stored in the dataset itself, only a name for messages.
        content: those bytes, or None.
    """

    kind: str
    path: Path
    content: bytes | memoryview | None = None

    def open(self) -> BinaryIO:
        """The bytes as an open file.

        Raises:
            WorkloadError: there is no such file.
        """
        if self.content is not None:
            return BytesIO(self.content)
        try:
            return self.path.open("rb")
        except FileNotFoundError as error:
            raise WorkloadError(
                f"{self.path}: file not found. Media paths are relative to the dataset's folder."
            ) from error
        except OSError as error:
            raise WorkloadError(f"{self.path}: cannot be read ({error.strerror}).") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSample:
    """One conversation.

    Attributes:
        id: unique within the dataset.
        messages: `{"role": str, "content": [part, ...]}`; a part is `{"type": "text", "text": str}` or
            `{"type": kind}`.
        media: the media parts' items, in the order of the parts.
        location: `file:line` or `file:row`, for error messages.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    media: tuple[MediaItem, ...] = ()
    location: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a record stands: its `location` for messages and the `folder` that its media paths are relative to."""

    location: str
    folder: Path

    def error(self, message: str) -> WorkloadError:
        return WorkloadError(f"{self.location}: {message}")


def sample_from_messages(
    messages: Any, beside: Mapping[str, Sequence[MediaItem]], *, sample_id: Any, place: Place
) -> ChatSample:
    """A sample from a list of messages.

    Args:
        messages: as read from the file.
        beside: per media kind, the items that stand beside the messages; a kind without such a list is absent.
        sample_id: a string or number.
        place: of the record.

    Raises:
        WorkloadError: naming the field and what is wrong with it.
    """
    if not isinstance(messages, list) or not messages:
        raise place.error('expected an object with a non-empty list "messages".')
    parsed = [_parse_message(message, index, place, beside) for index, message in enumerate(messages)]
    for kind, items in beside.items():
        _fill_places(parsed, kind, items, place)
    return _finish(parsed, sample_id, place)


def sample_from_turns(
    turns: Any, beside: Mapping[str, Sequence[MediaItem]], *, sample_id: Any, place: Place
) -> ChatSample:
    """A sample from pairs of `user` and `assistant`; arguments and errors as `sample_from_messages`."""
    if not isinstance(turns, list) or not turns:
        raise place.error('expected a non-empty list "texts".')
    parsed: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or not {"user", "assistant"} <= turn.keys():
            raise place.error(f"texts[{index}]: expected user and assistant, found {_describe(turn)}.")
        for role in ("user", "assistant"):
            text = valid_text(turn[role], f"texts[{index}].{role}", place)
            parsed.append({"role": role, "content": [{"type": "text", "text": text}]})
    num_markers = sum(_count_markers(message) for message in parsed)
    before: list[dict[str, Any]] = []
    for kind, items in beside.items():
        if kind == "image" and num_markers:
            _fill_places(parsed, kind, items, place)
        else:
            before += [{"type": kind, "item": item} for item in items]
    parsed[0]["content"] = before + parsed[0]["content"]
    return _finish(parsed, sample_id, place)


def media_item(value: Any, kind: str, name: str, place: Place) -> MediaItem:
    """A media item from a path, from bytes, or from `{"bytes": ..., "path": ...}`.

    Args:
        value: as read from the file.
        kind: of the item.
        name: of the field.
        place: of the record.
    """
    if isinstance(value, Mapping):
        content, path = value.get("bytes"), value.get("path")
        value = path if content is None else content
        if value is None:
            raise place.error(f"{name}: expected bytes or a path, found {_describe(value)}.")
    if isinstance(value, bytes | memoryview):
        return MediaItem(kind=kind, path=Path(f"{place.location} {name}"), content=value)
    path = valid_text(value, f"{name}.path", place)
    if not path:
        raise place.error(f"{name}.path: expected a path, found an empty string.")
    return MediaItem(kind=kind, path=place.folder / path)


def valid_text(text: Any, field: str, place: Place) -> str:
    """The text itself.

    Raises:
        WorkloadError: it is no string, or not valid Unicode.
    """
    if not isinstance(text, str):
        raise place.error(f"{field}: expected a string, found {type(text).__name__}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        raise place.error(f"{field}: lone surrogate {surrogate} is not text. Remove or replace it.") from error
    return text


def valid_id(sample_id: Any, place: Place) -> str:
    """The id as text.

    Raises:
        WorkloadError: it is neither a string nor a number.
    """
    if not isinstance(sample_id, str | int):
        raise place.error(f"id: expected a string, found {sample_id!r}.")
    return valid_text(str(sample_id), "id", place)


def _describe(value: Any) -> str:
    return f"{sorted(value)}" if isinstance(value, Mapping) else type(value).__name__


def _parse_message(message: Any, index: int, place: Place, beside: Mapping[str, Any]) -> dict[str, Any]:
    field = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise place.error(f"{field}: expected an object, found {type(message).__name__}.")
    role = valid_text(message.get("role"), f"{field}.role", place)
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise place.error(f"{field}.content: expected text or a list of parts.")
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        name = f"{field}.content[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            parts.append({"type": "text", "text": valid_text(part.get("text"), f"{name}.text", place)})
        elif kind in MEDIA_KINDS:
            file = part.get("path") if part.get("path") is not None else part.get(kind)
            item = None if file is None and kind in beside else media_item(file, kind, name, place)
            parts.append({"type": kind, "item": item})
        else:
            raise place.error(f"{name}.type: expected one of {['text', *MEDIA_KINDS]}, found {kind!r}.")
    return {"role": role, "content": parts}


def _count_markers(message: dict[str, Any]) -> int:
    return sum(part["text"].count(IMAGE_MARKER) for part in message["content"] if part["type"] == "text")


def _fill_places(messages: list[dict[str, Any]], kind: str, items: Sequence[MediaItem], place: Place) -> None:
    """Give the items to the parts without one, or (images) to the markers where there are no such parts."""
    empty = [p for message in messages for p in message["content"] if p["type"] == kind and p["item"] is None]
    if not empty and kind == "image":
        for message in messages:
            added = [{"type": kind, "item": None} for _ in range(_count_markers(message))]
            message["content"] += added
            empty += added
    if len(empty) != len(items):
        where = f"{IMAGE_MARKER} marker or image part" if kind == "image" else f"{kind} part"
        raise place.error(
            f"{len(empty)} places for {kind}s in the messages, {len(items)} paths in {kind}s. Give one path per "
            f"{where}."
        )
    for part, item in zip(empty, items, strict=True):
        part["item"] = item


def _finish(messages: list[dict[str, Any]], sample_id: Any, place: Place) -> ChatSample:
    media = []
    for message in messages:
        _move_images_to_markers(message, place)
        for index, part in enumerate(message["content"]):
            if part["type"] != "text":
                media.append(part["item"])
                message["content"][index] = {"type": part["type"]}
    return ChatSample(
        id=valid_id(sample_id, place), messages=tuple(messages), media=tuple(media), location=place.location
    )


def _move_images_to_markers(message: dict[str, Any], place: Place) -> None:
    num_markers = _count_markers(message)
    if not num_markers:
        return
    images = [part for part in message["content"] if part["type"] == "image"]
    if len(images) != num_markers:
        raise place.error(
            f"a {message['role']} message has {num_markers} {IMAGE_MARKER} markers in its text and "
            f"{len(images)} images. Give one image per marker, or no marker at all."
        )
    remaining = iter(images)
    content: list[dict[str, Any]] = []
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
