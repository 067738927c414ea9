"""Packages that only some media need."""

from __future__ import annotations

import importlib
from typing import Any

from entrain_opt.errors import RuntimeConfigError


def media_package(name: str, need: str) -> Any:
    """Import a package of the extra `media`.

    Args:
        name: of the package.
        need: what needs it, as the beginning of the sentence.

    Raises:
        RuntimeConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RuntimeConfigError(
            f"{need} needs the package {name}: `pip install {name}` (or `entrain-opt[media]`)."
        ) from error
