"""How many tokens the text that a processor writes by itself becomes.

With the folder's `tokenizer.json` the count is exact. A folder to plan with has none: then tags in angle brackets or
capitals in square ones, words, single digits, runs of punctuation and runs of line breaks count as one token each,
which is what the tokenizers of the supported families make of these texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from entrain_opt.errors import RuntimeConfigError

_PIECES = re.compile(r"</?\|?[A-Za-z][\w-]*\|?>|\[/?[A-Z_]+\]|\s*\n+| ?[^\W\d_]+|\d| ?[^\w\s<]+| ?<|_|\s+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCounter:
    """Counts the tokens of short texts.

    Attributes:
        tokenizer_file: a tokenizer.json; None counts by the rule above.
        modified_ns: when it was changed, so that a replaced file is read anew.
    """

    tokenizer_file: Path | None = None
    modified_ns: int = 0

    @classmethod
    def of_folder(cls, folder: Path) -> TextCounter:
        """The counter of a model folder."""
        path = folder / "tokenizer.json"
        return cls(tokenizer_file=path, modified_ns=path.stat().st_mtime_ns) if path.exists() else cls()

    def count(self, text: str) -> int:
        """Tokens of `text`, without the tokenizer's own start and end tokens.

        Raises:
            RuntimeConfigError: the tokenizer file is unreadable.
        """
        return _count(self, text)


@lru_cache(maxsize=1 << 16)
def _count(counter: TextCounter, text: str) -> int:
    if counter.tokenizer_file is None:
        return len(_PIECES.findall(text))
    return len(_tokenizer(counter).encode(text, add_special_tokens=False).ids)


@cache
def _tokenizer(counter: TextCounter) -> Any:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(counter.tokenizer_file))
    # The Rust side raises bare exceptions for every kind of malformed file.
    except Exception as error:
        raise RuntimeConfigError(f"{counter.tokenizer_file}: expected a tokenizer: {error}") from error
