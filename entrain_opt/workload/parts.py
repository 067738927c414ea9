"""Measured parts of a dataset on disk, so that an index that was stopped goes on where it was.

Each part is a range of rows. Its file is named by a hash of all that its numbers depend on: the rows' bytes (of Parquet
and Arrow the file's size and time), sizes and times of the media files, the model's configuration and tokenizer. A part
whose input has changed is therefore not found, and measured again. When the table of all parts is written, the parts
are removed.

Promise: a part appears whole or not at all; one that is damaged on disk (pages carry checksums) is measured again, with
a message. Price: one small Parquet file per part of 64 to 2,048 rows.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path

from entrain_opt.errors import WorkloadError
from entrain_opt.spec.folder import find_model_folder
from entrain_opt.workload.bad_samples import from_json, to_json
from entrain_opt.workload.measure import Measured
from entrain_opt.workload.parquet import read_notes, read_sample_table, write_sample_table

_log = logging.getLogger(__name__)
#: Part of every key; grows when the numbers of an unchanged dataset change.
_INDEX_VERSION = 2
_MODEL_FILES = (
    "config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


def model_key(model_folder: str | Path) -> bytes:
    """A hash of the files of a model folder that token counts and media sizes depend on."""
    digest = hashlib.sha256(f"{_INDEX_VERSION}".encode())
    folder = find_model_folder(model_folder)
    for name in _MODEL_FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.digest()


def part_key(model: bytes, state: bytes, start: int, end: int) -> str:
    """The name of a part: `state` is the hash of its rows, `model` that of the model."""
    return hashlib.sha256(b"|".join([model, state, f"{start}:{end}".encode()])).hexdigest()[:24]


def read_measured(path: Path) -> Measured | None:
    """What `write_measured` wrote; None if there is nothing, or nothing whole (which is said and removed)."""
    if not path.exists():
        return None
    try:
        table, notes = read_sample_table(path), read_notes(path)
    except WorkloadError as error:
        _log.warning("Measuring again what a damaged cache file held: %s", error)
        path.unlink(missing_ok=True)
        return None
    return Measured(table=table, bad=from_json(notes["bad"]))


def write_measured(measured: Measured, path: Path, *, dataset: str) -> None:
    """Keep measured rows, whole or not at all."""
    write_sample_table(measured.table, path, notes={"dataset": dataset, "bad": to_json(measured.bad)})


class PartFolder:
    """The parts of one dataset and model.

    Args:
        cache_dir: the folder of all caches.
        dataset, model: what is measured; names the folder.
    """

    def __init__(self, cache_dir: Path, dataset: str | Path, model: str | Path) -> None:
        name = hashlib.sha256(f"{Path(dataset).resolve()}|{Path(model).resolve()}".encode()).hexdigest()[:24]
        self.folder = cache_dir / f"samples-{name}.parts"

    def read(self, key: str) -> Measured | None:
        """A part, or None if it is not there."""
        return read_measured(self._path(key))

    def write(self, key: str, part: Measured, *, dataset: str) -> None:
        """Keep a part."""
        write_measured(part, self._path(key), dataset=dataset)

    def remove_others(self, keys: set[str]) -> int:
        """Remove parts whose input has changed; returns how many there were."""
        others = [path for path in self.folder.glob("*.parquet") if path.stem not in keys]
        for path in others:
            path.unlink(missing_ok=True)
        return len(others)

    def remove(self) -> None:
        """Remove all parts."""
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.parquet"
