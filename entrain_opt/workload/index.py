"""Dataset -> SampleTable: every sample measured once, bad ones told apart before training.

1. Rows are cut into parts, which are measured here, by processes of this machine or on a Ray cluster (`measure.py`,
   `workers.py`): image headers are read, the chat is tokenised, the media rule gives patches and tokens.
2. A sample that training could not use (broken file, wrong number of images, no label, longer than the context) is
   collected with its reason; policy `error` reports all of them at once, `skip` leaves them out and says how many.
3. `load_index` keeps finished parts, so that a run that was stopped goes on (`parts.py`), and the whole table in a
   cache whose key covers everything the numbers depend on.

Promise: the same table whatever the number of workers and however often it was stopped; a cached table is never stale.
Price: 2 to 3 ms per sample of 250 text tokens and core, nearly all of it the tokenizer; image headers alone go at about
5,000 per second and core.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.bad_samples import BadSample, Policy, apply_policy, check_policy
from entrain_opt.workload.formats import is_trace
from entrain_opt.workload.measure import (
    Measured,
    RowRange,
    join,
    measure_rows,
    media_sizes,
    open_dataset,
    rows_state,
)
from entrain_opt.workload.media import media_rule
from entrain_opt.workload.parts import PartFolder, model_key, part_key, read_measured, write_measured
from entrain_opt.workload.samples import SampleTable
from entrain_opt.workload.trace import read_trace
from entrain_opt.workload.workers import Engine, Mapper, num_cores, open_workers

__all__ = ["BadSample", "Policy", "index_dataset", "index_key", "load_index", "measure_dataset", "media_sizes"]

_log = logging.getLogger(__name__)
_MIN_PART_ROWS, _MAX_PART_ROWS, _PARTS = 64, 2048, 256
#: Fewer rows than this are measured sooner here than in processes that must start first.
_ROWS_PER_WORKER = 2000
#: From this many rows on, hashing the input is shared out too.
_ROWS_TO_HASH_APART = 100_000
_BAR_AFTER_SECONDS = 2.0


def index_dataset(
    dataset_path: str | Path,
    model_folder: str | Path,
    *,
    policy: Policy = "error",
    num_workers: int | None = None,
    engine: Engine = "local",
    progress: bool = False,
) -> SampleTable:
    """Measure every sample of a dataset for a model.

    Args:
        dataset_path: a file, folder or pattern as in `formats.py`, or a trace.
        model_folder: Hugging Face folder with config, processor and tokenizer.
        policy: what to do with samples that training could not use.
        num_workers: processes; 0 works in this one, None takes all cores if there is enough to do.
        engine: `local` processes, or `ray` for the machines of a Ray cluster that all see the files.
        progress: show a progress bar on stderr if it takes longer than two seconds.

    Returns:
        One row per usable sample, in the order of the files; `ChatDataset.row_of` maps an id back to its row.

    Raises:
        WorkloadError: the dataset is missing, ids repeat, or (policy `error`) samples are bad.
        RuntimeConfigError: the model folder is incomplete, or Ray is asked for and not installed.
    """
    check_policy(policy)
    table, bad = measure_dataset(dataset_path, model_folder, num_workers=num_workers, engine=engine, progress=progress)
    apply_policy(bad, len(table), policy)
    return table


def measure_dataset(
    dataset_path: str | Path,
    model_folder: str | Path,
    *,
    num_workers: int | None = None,
    engine: Engine = "local",
    progress: bool = False,
) -> tuple[SampleTable, tuple[BadSample, ...]]:
    """As `index_dataset`; the bad samples are returned beside the table of the good ones."""
    if is_trace(dataset_path):
        bad: list[BadSample] = []
        return read_trace(dataset_path, media_rule(model_folder), bad=bad), tuple(bad)
    job = _Job(dataset_path, model_folder, num_workers=num_workers, engine=engine, progress=progress)
    with job.workers() as mapped:
        measured = job.measure(mapped, None, [])
    return measured.table, measured.bad


def load_index(
    dataset_path: str | Path,
    model_folder: str | Path,
    *,
    policy: Policy = "error",
    cache_dir: str | Path = "runs/cache",
    num_workers: int | None = None,
    engine: Engine = "local",
    progress: bool = False,
) -> SampleTable:
    """The table of `index_dataset`, from the cache where nothing has changed.

    Several processes may call this at once: one measures, the others wait for it. A call that is killed leaves what it
    has measured; the next one goes on from there.

    Args:
        cache_dir: folder of cached tables; the other arguments are those of `index_dataset`.
    """
    check_policy(policy)
    table, bad = load_measured(
        dataset_path, model_folder, cache_dir=cache_dir, num_workers=num_workers, engine=engine, progress=progress
    )
    apply_policy(bad, len(table), policy)
    return table


def load_measured(
    dataset_path: str | Path,
    model_folder: str | Path,
    *,
    cache_dir: str | Path = "runs/cache",
    num_workers: int | None = None,
    engine: Engine = "local",
    progress: bool = False,
) -> tuple[SampleTable, tuple[BadSample, ...]]:
    """As `load_index`; the bad samples are returned beside the table of the good ones."""
    from filelock import FileLock

    if is_trace(dataset_path):
        return measure_dataset(dataset_path, model_folder)
    job = _Job(dataset_path, model_folder, num_workers=num_workers, engine=engine, progress=progress)
    cache = Path(cache_dir)
    cache.mkdir(parents=True, exist_ok=True)
    with job.workers() as mapped:
        keys = job.part_keys(mapped)
        path = cache / f"samples-{_table_key(keys)}.parquet"
        found = read_measured(path)
        if found is None:
            with FileLock(path.with_suffix(".lock")):
                found = read_measured(path)
                if found is None:
                    parts = PartFolder(cache, dataset_path, model_folder)
                    found = job.measure(mapped, parts, keys)
                    write_measured(found, path, dataset=str(dataset_path))
                    parts.remove()
    return found.table, found.bad


def index_key(dataset_path: str | Path, model_folder: str | Path) -> str:
    """Hash of all that the table depends on: the dataset, sizes and times of the media files, the model's files.

    Raises:
        WorkloadError: the dataset is missing.
    """
    job = _Job(dataset_path, model_folder, num_workers=0)
    with job.workers() as mapped:
        return _table_key(job.part_keys(mapped))


def _table_key(keys: Sequence[str]) -> str:
    return hashlib.sha256("|".join(keys).encode()).hexdigest()[:24]


class _Job:
    """One pass over a dataset."""

    def __init__(
        self,
        dataset: str | Path,
        model: str | Path,
        *,
        num_workers: int | None,
        engine: Engine = "local",
        progress: bool = False,
    ) -> None:
        if engine == "ray":  # Its processes have another working directory.
            dataset, model = Path(dataset).absolute(), Path(model).absolute() if Path(model).is_dir() else model
        self.dataset, self.model = str(dataset), str(model)
        self.engine, self.progress = engine, progress
        run = secrets.token_hex(8)
        opened = open_dataset(self.dataset, run)
        self.num_rows = len(opened)
        rows = min(max(self.num_rows // _PARTS, _MIN_PART_ROWS), _MAX_PART_ROWS)
        self.ranges = [
            RowRange(dataset=self.dataset, model=self.model, run=run, start=start, end=end)
            for start, end in opened.ranges(rows)
        ]
        if num_workers is None:
            enough = self.num_rows // _ROWS_PER_WORKER if engine == "local" else 0
            num_workers = min(num_cores(), enough) if enough > 1 else 0
        self.num_workers = min(num_workers, len(self.ranges))
        self._open = opened

    @contextmanager
    def workers(self) -> Iterator[Mapper]:
        """Workers, which start when they are first given something."""
        with ExitStack() as stack:
            opened: list[Mapper] = []

            def mapped(function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
                if tasks and not opened:
                    opened.append(stack.enter_context(open_workers(self.num_workers, self.engine)))
                return opened[0](function, tasks) if tasks else iter(())

            yield mapped

    def part_keys(self, mapped: Mapper) -> list[str]:
        """The key of each part."""
        model = model_key(self.model)
        if (self.num_workers or self.engine == "ray") and self.num_rows >= _ROWS_TO_HASH_APART:
            states = dict(self._shown("Looking for changes", mapped(rows_state, self.ranges), self.ranges))
        else:
            states = {index: rows_state(task) for index, task in enumerate(self.ranges)}
        return [part_key(model, states[index], task.start, task.end) for index, task in enumerate(self.ranges)]

    def measure(self, mapped: Mapper, parts: PartFolder | None, keys: Sequence[str]) -> Measured:
        """Measure all rows, with what is kept of an earlier run; every part is kept as soon as it is measured."""
        found: dict[int, Measured] = {}
        if parts is not None:
            changed = parts.remove_others(set(keys))
            kept = {index: part for index, key in enumerate(keys) if (part := parts.read(key)) is not None}
            found |= kept
            if kept or changed:
                dropped = f", {changed} are dropped because their input changed" if changed else ""
                _log.warning(
                    f"{self.dataset}: going on with an index that was stopped: {len(kept)} of {len(keys)} parts are "
                    f"kept{dropped}."
                )
        missing = [index for index in range(len(self.ranges)) if index not in found]
        tasks = [self.ranges[index] for index in missing]
        for number, part in self._shown("Indexing", mapped(measure_rows, tasks), tasks):
            if parts is not None:
                parts.write(keys[missing[number]], part, dataset=self.dataset)
            found[missing[number]] = part
        whole = join([found[index] for index in range(len(self.ranges))])
        self._check_ids(whole)
        whole.table.check()
        return whole

    def _check_ids(self, measured: Measured) -> None:
        named = np.array([sample.sample_id for sample in measured.bad if sample.sample_id != "?"], dtype=np.str_)
        ids = np.concatenate([measured.table.sample_ids, named])
        if len(np.unique(ids)) < len(ids):
            self._open.check_ids()
            raise WorkloadError(f"{self.dataset}: an id is also the number of another row; make ids unique.")

    def _shown(self, title: str, results: Iterator[Any], tasks: Sequence[RowRange]) -> Iterator[Any]:
        """The results as they come, with a bar once it has taken two seconds."""
        if not self.progress:
            yield from results
            return
        with _bar(title, sum(task.end - task.start for task in tasks)) as advance:
            for index, result in results:
                yield index, result
                advance(tasks[index].end - tasks[index].start)


@contextmanager
def _bar(title: str, total_rows: int) -> Iterator[Callable[[int], None]]:
    """A function that moves a progress bar; the bar is shown once two seconds have passed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(title, total=total_rows)
    started = time.monotonic()

    def advance(rows: int) -> None:
        bar.advance(task, rows)
        if not bar.live.is_started and time.monotonic() - started > _BAR_AFTER_SECONDS:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
