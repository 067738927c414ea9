"""JSON files of a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from entrain_opt.errors import RuntimeConfigError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        RuntimeConfigError: the file is missing or not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RuntimeConfigError(
            f"model: expected {path.name} in {path.parent}, found none. Give the folder of a Hugging Face model."
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RuntimeConfigError(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise RuntimeConfigError(f"{path}: expected a JSON object, found {type(content).__name__}.")
    return content


def first_value(config: dict[str, Any], *names: str) -> Any:
    """The value of the first name that is present and not null, else None."""
    return next((config[name] for name in names if config.get(name) is not None), None)
