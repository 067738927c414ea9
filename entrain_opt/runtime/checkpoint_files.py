"""The files of a checkpoint folder: complete or not, damaged or not, and replaced in one step.

`files.json` names every other file with its size and CRC-32. It is written last, and the folder gets its name after
that. So a folder under its final name is complete, and one that was copied in part or damaged later is noticed.

Price: every file is read once to be checked, on reading and on writing; the ranks share the files.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from entrain_opt.errors import CheckpointError

T = TypeVar("T")
_FILES = "files.json"
_BLOCK_BYTES = 1 << 22

FileRecord = tuple[str, int, int]
"""(name relative to the folder, bytes, CRC-32)"""


def scratch_of(path: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return path.with_name(path.name + ".partial")


def _displaced_of(path: Path) -> Path:
    """Where an older checkpoint of the same name waits while the new one takes the name."""
    return path.with_name(path.name + ".old")


def together(what: str, work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `work` on every rank of a group and return all results, or raise the first rank's error on all of them.

    Raises:
        CheckpointError: a rank could not; names the rank and its error.
    """
    result: list[T] = []
    error: str | None = None
    try:
        result = [work()]
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}" if not isinstance(raised, CheckpointError) else str(raised)
    outcomes: list[tuple[list[T], str | None]] = [(result, error)]
    if dist.is_initialized():
        outcomes = [(result, error)] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, (result, error), group=group)
    for rank, (_, failed) in enumerate(outcomes):
        if failed is not None:
            where = f" on rank {rank}" if len(outcomes) > 1 else ""
            raise CheckpointError(f"{what} failed{where}: {failed}")
    return [found[0] for found, _ in outcomes]


def record(folder: Path, names: Iterable[str]) -> list[FileRecord]:
    """Size and checksum of files of a folder."""
    return [(name, (folder / name).stat().st_size, _checksum(folder / name)) for name in names]


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value


def finish(scratch: Path, path: Path, records: Iterable[FileRecord]) -> None:
    """Write the list of files, force everything to the disk, and give the folder its name.

    At every moment `path` or the folder beside it that `find` knows is a complete checkpoint, if one was there before.
    """
    listed = {name: {"bytes": size, "crc32": checksum} for name, size, checksum in sorted(records)}
    (scratch / _FILES).write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    for item in [*scratch.rglob("*"), scratch]:
        _sync(item)
    displaced = _displaced_of(path)
    if path.exists() or path.is_symlink():
        remove_folder(displaced)
        path.replace(displaced)
    scratch.replace(path)
    _sync(path.parent)
    remove_folder(displaced)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Delete a checkpoint (or a link to one) if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()


def remove(path: Path) -> None:
    """Delete a checkpoint, and what a killed run may have left under its name."""
    for folder in (path, _displaced_of(path)):
        remove_folder(folder)


def find(path: Path) -> Path:
    """The folder of a checkpoint: `path`, or its older version if a run was killed while it replaced it."""
    displaced = _displaced_of(path)
    return displaced if not path.exists() and displaced.is_dir() else path


def verify(path: Path, group: dist.ProcessGroup | None = None) -> None:
    """Raise unless every file of a checkpoint is there and unchanged; ranks share the reading.

    Raises:
        CheckpointError: names the first file that is missing, cut or damaged, and the newest checkpoint that is not.
    """

    def check() -> str | None:
        first, step = 0, 1
        if dist.is_initialized():
            first, step = dist.get_rank(group), dist.get_world_size(group)
        return _fault(path, first, step)

    faults = [fault for fault in together(f"reading checkpoint {path}", check, group) if fault is not None]
    if faults:
        raise CheckpointError(f"{faults[0]} {_advice(path)}")


def _listed(path: Path) -> dict[str, dict[str, int]] | None:
    try:
        listed = json.loads((path / _FILES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # Missing or cut: the caller says so.
    return listed if isinstance(listed, dict) else None


def _fault(path: Path, first: int = 0, step: int = 1, *, sizes_only: bool = False) -> str | None:
    """What is wrong with a checkpoint; sizes of all files, checksums of every `step`-th from `first`."""
    if not path.is_dir():
        return (
            f"checkpoint: expected a folder at {path}, found none. Checkpoints of EntrainStrategy are folders; give "
            "the path that `entrain fit` printed."
        )
    listed = _listed(path)
    if listed is None:
        return (
            f"checkpoint {path}: has no readable {_FILES}, the list of its files, which is written last. It is "
            "incomplete: copied in part, or another kind of folder."
        )
    for position, (name, expected) in enumerate(listed.items()):
        file = path / name
        if not file.is_file():
            return f"checkpoint {path}: {name} is missing."
        if file.stat().st_size != expected["bytes"]:
            return (
                f"checkpoint {path}: {name} has {file.stat().st_size} bytes, expected {expected['bytes']}; it was cut."
            )
        if not sizes_only and position % step == first and _checksum(file) != expected["crc32"]:
            return f"checkpoint {path}: {name} is damaged: its content differs from what was written."
    return None


def _advice(path: Path) -> str:
    good = newest_complete(path.parent, besides=path)
    if good is None:
        return f"No other complete checkpoint lies in {path.parent}."
    return f"The newest complete one beside it is {good}."


def newest_complete(folder: Path, *, besides: Path | None = None) -> Path | None:
    """The checkpoint in a folder that was finished last; sizes are checked, content is not."""
    if not folder.is_dir():
        return None
    found = [item for item in folder.iterdir() if item != besides and (item / _FILES).is_file()]
    found = [item for item in found if not item.name.endswith(".partial") and _fault(item, sizes_only=True) is None]
    return max(found, key=lambda item: ((item / _FILES).stat().st_mtime_ns, item.name), default=None)
