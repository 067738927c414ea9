"""Which files a dataset consists of, and what each holds.

| given | read as |
|---|---|
| a `.jsonl` file | JSON lines in chat form |
| a `.parquet` file | Parquet with `messages` or `texts` |
| a pattern such as `data/train-*.parquet` | all files that match, in the order of their names |
| a folder of Parquet (or Arrow, JSON lines) shards | those in it, else in its `data`, else below: of its one split |
| a folder of the hub's cache (`datasets--...` with `snapshots/`) | the snapshot of its main branch |
| a folder that `save_to_disk` made | the Arrow files that its `state.json` lists |

Promise: one split, never several by accident: a folder with more raises and names them.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.columns import Arrow, Parquet
from entrain_opt.workload.shards import JsonLines, Shard
from entrain_opt.workload.unpack import unpack_parquet

_SHARD_NUMBER = re.compile(r"[-_.]?\d+(-of-\d+)?$")
_FOLDER_SUFFIXES = (".parquet", ".arrow", ".jsonl")
#: Tables that `entrain index` writes beside the data.
_INDEX_SUFFIX = ".index.parquet"
_TRACE_COLUMNS = {"image_sizes", "text_words"}


def find_files(dataset: str | Path) -> list[Path]:
    """The files of a dataset, in order.

    Args:
        dataset: a file, a folder or a pattern, as in the table above.

    Raises:
        WorkloadError: nothing is there, or several splits are.
    """
    path = Path(dataset)
    if path.is_dir():
        return _files_in(path)
    if path.is_file():
        return [path]
    if glob.has_magic(str(path)):
        if found := sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)):
            return found
        raise WorkloadError(f"dataset: no file matches {path}. Check the pattern in the recipe.")
    raise WorkloadError(
        f"dataset: expected a JSONL or Parquet file, a folder or a pattern at {path}, found none. Check the path in "
        "the recipe."
    )


def open_shards(dataset: str | Path, *, cache_dir: Path | None = None) -> list[Shard]:
    """Every file of a dataset, opened.

    Args:
        dataset: as for `find_files`.
        cache_dir: if given, Parquet files are unpacked there, so that single rows are cheap to read.

    Raises:
        WorkloadError: a file is missing, damaged or lacks the columns.
    """
    files = find_files(dataset)
    root = Path(os.path.commonpath([file.parent for file in files]))
    shards: list[Shard] = []
    for file in files:
        name = file.relative_to(root).as_posix()
        with file.open("rb") as opened:
            start = opened.read(6)
        if start[:4] == b"PAR1" or file.suffix == ".parquet":
            parquet = Parquet(file, name)
            shards.append(parquet if cache_dir is None else unpack_parquet(parquet, cache_dir))
        elif start == b"ARROW1" or file.suffix == ".arrow":
            shards.append(Arrow(file, name))
        else:
            shards.append(JsonLines(file, name))
    return shards


def is_trace(dataset: str | Path) -> bool:
    """Whether a dataset is a bare trace of sizes (`workload/trace.py`): it serves to plan, not to train."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(dataset)
    if not path.is_file() or path.suffix != ".parquet":
        return False
    try:
        names = set(pq.read_schema(path).names)
    except (pa.ArrowException, OSError):
        return False  # Opening it as a dataset says what is wrong with it.
    return names >= _TRACE_COLUMNS and not names & {"messages", "texts"}


def _files_in(folder: Path) -> list[Path]:
    if (folder / "state.json").is_file():
        listed = _read_json(folder / "state.json").get("_data_files") or []
        files = [folder / str(entry["filename"]) for entry in listed]
        if missing := [file.name for file in files if not file.is_file()]:
            raise WorkloadError(f"dataset: {folder}: state.json lists {missing}, found none. Save the dataset again.")
        if not files:
            raise WorkloadError(f"dataset: {folder}/state.json: expected _data_files, found none.")
        return files
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits") or []
        return _files_in(folder / _only_split(folder, [str(split) for split in splits]))
    if (folder / "snapshots").is_dir():
        return _files_in(_snapshot(folder))
    for suffix in _FOLDER_SUFFIXES:
        if files := _below(folder, suffix):
            splits = {_split_of(file, folder) for file in files}
            if len(splits) > 1:
                _only_split(folder, [f"{split}*{suffix}" for split in sorted(splits)])
            return files
    raise WorkloadError(
        f"dataset: {folder}: expected state.json of a saved dataset, or files {', '.join(_FOLDER_SUFFIXES)}; found "
        f"{sorted(entry.name for entry in folder.iterdir())[:10]}."
    )


def _below(folder: Path, suffix: str) -> list[Path]:
    """Files of a suffix: in the folder itself, else in its `data`, else anywhere below; not ours, not hidden ones."""
    for pattern in (f"*{suffix}", f"data/**/*{suffix}", f"**/*{suffix}"):
        if files := sorted(
            file
            for file in folder.glob(pattern)
            if not file.name.endswith(_INDEX_SUFFIX)
            and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        ):
            return files
    return []


def _split_of(file: Path, folder: Path) -> str:
    relative = file.relative_to(folder)
    return (relative.parent / _SHARD_NUMBER.sub("", relative.stem)).as_posix().removeprefix("./").removesuffix("/.")


def _only_split(folder: Path, splits: Sequence[str]) -> str:
    if len(splits) == 1:
        return splits[0]
    shown = ", ".join(f"{folder}/{split}" for split in splits)
    raise WorkloadError(f"dataset: {folder}: expected one split, found {len(splits)}. Give one of: {shown}")


def _snapshot(folder: Path) -> Path:
    """The commit of a hub cache that its main branch names, or the only one."""
    main = folder / "refs" / "main"
    if main.is_file():
        return folder / "snapshots" / main.read_text(encoding="utf-8").strip()
    found = sorted(entry for entry in (folder / "snapshots").iterdir() if entry.is_dir())
    if len(found) != 1:
        raise WorkloadError(f"dataset: {folder}/snapshots: expected one snapshot, found {[s.name for s in found]}.")
    return found[0]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise WorkloadError(f"dataset: {path}: expected a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise WorkloadError(f"dataset: {path}: expected a JSON object, found {type(content).__name__}.")
    return content
