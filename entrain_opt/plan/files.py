"""Records as YAML: written whole or not at all, and read with every wrong field named."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from entrain_opt.errors import PlanError

Record = TypeVar("Record")


def write_yaml(record: Any, path: str | Path) -> None:
    """Write a record's plain values, whole or not at all."""
    import yaml

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".partial")
    scratch.write_text(yaml.safe_dump(to_plain(record), sort_keys=False, width=120), encoding="utf-8")
    scratch.replace(path)


def to_plain(record: Any) -> Any:
    """Dataclasses, tuples and NumPy numbers as plain YAML values."""
    if hasattr(record, "__dataclass_fields__"):
        return to_plain(asdict(record))
    if isinstance(record, Mapping):
        return {key: to_plain(value) for key, value in record.items()}
    if isinstance(record, (tuple, list)):
        return [to_plain(value) for value in record]
    return record.item() if hasattr(record, "item") else record


def read_yaml_record(path: str | Path, record: type[Record], where: str) -> Record:
    """A record from its file.

    Args:
        path: of the file.
        record: a dataclass whose fields are plain values, tuples, mappings or other such dataclasses.
        where: how errors name the top of the file.

    Raises:
        PlanError: the file is missing, is not YAML, or a field is missing, unknown or of the wrong type.
    """
    import yaml

    path = Path(path)
    if not path.is_file():
        raise PlanError(f"{where}: no file {path}. Make one with `entrain plan --config RECIPE`.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise PlanError(f"{where} {path}: not valid YAML: {error}") from error
    try:
        return typing.cast(Record, _build(record, content, where))
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _build(record: Any, content: Any, where: str) -> Any:
    """A record from YAML values, naming any key that is missing, unknown or of the wrong type."""
    if not isinstance(content, Mapping):
        raise PlanError(f"{where}: expected a mapping of fields, found {type(content).__name__}.")
    known = {item.name for item in fields(record)}
    if unknown := sorted(str(key) for key in set(content) - known):
        raise PlanError(f"{where}: unknown field {unknown[0]!r}; expected one of {sorted(known)}.")
    hints = typing.get_type_hints(record)
    values = {name: _value(value, hints[name], f"{where}.{name}") for name, value in content.items()}
    try:
        return record(**values)
    except TypeError as error:
        raise PlanError(f"{where}: {error}") from error


def _value(value: Any, hint: Any, where: str) -> Any:
    """A YAML value as its field's type."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if is_dataclass(option) and isinstance(value, Mapping):
            return _build(option, value, where)
        if typing.get_origin(option) is tuple and isinstance(value, list):
            inner = typing.get_args(option)
            if inner[-1] is Ellipsis:
                return tuple(_value(item, inner[0], f"{where}[{index}]") for index, item in enumerate(value))
            if len(inner) == len(value):
                pairs = enumerate(zip(value, inner, strict=True))
                return tuple(_value(item, kind, f"{where}[{index}]") for index, (item, kind) in pairs)
        if typing.get_origin(option) is dict and isinstance(value, Mapping):
            return dict(value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if option is Any or (option is bool and isinstance(value, bool)) or (option is str and isinstance(value, str)):
            return value
        if option is int and is_number and isinstance(value, int):
            return value
        if option is float and is_number:
            return float(value)
    raise PlanError(f"{where}: expected {_say(options)}, found {value!r}.")


def _say(options: tuple[Any, ...]) -> str:
    """The types of a field in words."""
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "nothing"}

    def one(option: Any) -> str:
        if option in words:
            return words[option]
        if typing.get_origin(option) is tuple:
            inner = typing.get_args(option)
            return f"a list of {len(inner)} values" if inner[-1] is not Ellipsis else "a list"
        return "a mapping of fields"

    return " or ".join(one(option) for option in options)
