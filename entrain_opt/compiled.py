"""Numba's `njit` with a cache on disk that notices every change of this package's compiled code.

Numba looks at the file of a function only. A compiled function that calls one of another file would go on running the
old code after that file changed. So all compiled code is kept under a hash of the source files that hold any, or
constants of it.

Compiled code runs without the interpreter's lock, so that a search in a background thread never stops training.

Price: reading those files once, a millisecond; compiling takes half a minute, once per installation.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent


def compiled(function: Function) -> Function:
    """Compile on first call; the result is kept on disk."""
    return _kept(function)


def borrowing(function: Function) -> Function:
    """`compiled` for a function that makes no arrays, only works on those it is given.

    Numba counts references to arrays with atomic operations wherever one is bound to another name, as `inlined`
    functions do with each of their arguments. Here there is nothing to count, which halves the time of small steps.
    """
    return _kept(function, _nrt=False)


def inlined(function: Function) -> Function:
    """Compile into every caller: for a function with one caller, whose many arrays would cost more than its work."""
    return njit(inline="always")(function)


def _kept(function: Function, **options: bool) -> Function:
    before = config.CACHE_DIR
    config.CACHE_DIR = str(cache_folder())
    try:
        return njit(cache=True, nogil=True, **options)(function)
    finally:
        config.CACHE_DIR = before


@cache
def cache_folder() -> Path:
    """A folder that can be written to, named after the sources: beside them, or else in the temporary folder."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        source = path.read_bytes()
        # Compiled code holds the values of the columns' names.
        if b"entrain_opt.compiled" in source or path.stem.endswith("columns"):
            digest.update(source)
    name = f"compiled-{digest.hexdigest()[:16]}"
    if config.CACHE_DIR:
        return Path(config.CACHE_DIR) / name
    beside = _PACKAGE / "__pycache__"
    if os.access(_PACKAGE, os.W_OK):
        beside.mkdir(exist_ok=True)
    if os.access(beside, os.W_OK):
        return beside / name
    return Path(tempfile.gettempdir()) / f"entrain_opt-{os.getuid()}" / name
