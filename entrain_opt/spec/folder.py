"""Model folders in Hugging Face format: where they lie, and their JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from entrain_opt.errors import RuntimeConfigError


def find_model_folder(model: str | Path) -> Path:
    """The folder of a model, given as a path or as the id of a model in the local Hugging Face cache.

    Raises:
        RuntimeConfigError: neither exists; nothing is downloaded.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(str(model), "config.json")
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    raise RuntimeConfigError(
        f"model: expected a folder in Hugging Face format or the id of a cached model, found {str(model)!r}. "
        "Check the path (it is relative to the working directory) or download the model first."
    )


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
