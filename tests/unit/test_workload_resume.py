"""An index that was killed goes on, notices changed input, and does not trust damaged files."""

import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from column_cases import TINY, fine_vision, write

from entrain_opt.errors import WorkloadError
from entrain_opt.workload import index
from entrain_opt.workload.index import load_index, measure_dataset
from entrain_opt.workload.measure import RowRange, measure_rows
from entrain_opt.workload.samples import SampleTable
from entrain_opt.workload.workers import open_workers

#: Indexes a dataset, and is killed by the operating system after three parts.
KILLED = """
import os, signal, sys
from entrain_opt.workload import index, parts
write, written = parts.PartFolder.write, []
def write_and_die(self, *arguments, **keywords):
    write(self, *arguments, **keywords)
    written.append(1)
    if len(written) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
parts.PartFolder.write = write_and_die
index.load_index(sys.argv[1], sys.argv[2], cache_dir=sys.argv[3], num_workers=int(sys.argv[4]))
"""


def lines(count: int) -> list[str]:
    turns = [("user", "{}"), ("assistant", "a {}")]
    return [
        json.dumps({"messages": [{"role": role, "content": text.format("b " * (row % 7))} for role, text in turns]})
        for row in range(count)
    ]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[Path, Path]:
    """A dataset of five parts, and the cache of an index that was killed after three."""
    folder = tmp_path_factory.mktemp("stopped")
    path = folder / "d.jsonl"
    path.write_text("\n".join(lines(64 * 5)), encoding="utf-8")
    command = [sys.executable, "-c", KILLED, str(path), str(TINY), str(folder / "cache"), "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # Returns when nobody holds its stderr any more: when its worker has ended as well.
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert len(list(folder.glob("cache/*.parts/*.parquet"))) == 3
    return path, folder / "cache"


@pytest.fixture
def dataset(stopped) -> Path:
    stopped[0].write_text("\n".join(lines(64 * 5)), encoding="utf-8")
    return stopped[0]


@pytest.fixture
def cache(stopped, tmp_path) -> Path:
    return Path(shutil.copytree(stopped[1], tmp_path / "cache"))


def equal(first: SampleTable, second: SampleTable) -> bool:
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in SampleTable.__slots__)


@pytest.fixture
def measured(monkeypatch) -> list[int]:
    """First rows of the parts that are measured in this process."""
    starts = []

    def note(task):
        starts.append(task.start)
        return measure_rows(task)

    monkeypatch.setattr(index, "measure_rows", note)
    return starts


def test_a_killed_index_goes_on_where_it_was(dataset, cache, measured, caplog):
    with caplog.at_level(logging.WARNING):
        table = load_index(dataset, TINY, cache_dir=cache)
    assert measured == [192, 256]
    assert "3 of 5 parts are kept" in caplog.text
    assert equal(table, measure_dataset(dataset, TINY)[0])
    assert not list(cache.glob("*.parts"))
    assert not list(cache.rglob("*.partial"))


def test_changed_input_is_measured_again(dataset, cache, measured, caplog):
    changed = lines(64 * 5)
    changed[70] = changed[71]
    dataset.write_text("\n".join(changed), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        table = load_index(dataset, TINY, cache_dir=cache)
    assert measured == [64, 192, 256]
    assert "2 of 5 parts are kept, 1 are dropped because their input changed" in caplog.text
    assert equal(table, measure_dataset(dataset, TINY)[0])


def test_damaged_parts_and_tables_are_made_anew(dataset, cache, measured, caplog):
    parts = sorted(cache.glob("*.parts/*.parquet"))
    content = bytearray(parts[0].read_bytes())
    content[20] ^= 0xFF
    parts[0].write_bytes(bytes(content))
    parts[1].write_bytes(parts[1].read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        table = load_index(dataset, TINY, cache_dir=cache)
    assert caplog.text.count("Measuring again what a damaged cache file held") == 2
    assert len(measured) == 4
    (kept,) = cache.glob("samples-*.parquet")
    content = bytearray(kept.read_bytes())
    content[100] ^= 0xFF
    for damaged in (bytes(content), b""):
        kept.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert equal(load_index(dataset, TINY, cache_dir=cache), table)
        assert f"damaged cache file held: sample table: {kept}" in caplog.text


def test_an_unchanged_dataset_is_not_measured_again(tmp_path, measured):
    path = write(fine_vision(), tmp_path / "d.parquet")
    first = load_index(path, TINY, cache_dir=tmp_path / "cache")
    assert measured
    measured.clear()
    assert equal(load_index(path, TINY, cache_dir=tmp_path / "cache"), first)
    assert not measured
    write(fine_vision(9), path)
    assert len(load_index(path, TINY, cache_dir=tmp_path / "cache")) == 9
    assert measured


def test_a_worker_that_dies_is_an_error_and_not_a_hang():
    with open_workers(2, "local") as mapped, pytest.raises(WorkloadError, match="ended with code -9 while"):
        list(mapped(_die, [1, 2, 3]))


def test_errors_of_workers_are_raised_here():
    with open_workers(1, "local") as mapped:
        with pytest.raises(WorkloadError, match="ours: 1"):
            list(mapped(_fail, [1]))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            list(mapped(_fail, [0]))
        assert sorted(mapped(_fail, [2, 3])) == [(0, 2), (1, 3)]


def _die(value: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(value: int) -> int:
    print("between the answers")  # Goes to stderr in a worker.
    if value == 1:
        raise WorkloadError("ours: 1")
    return value if 1 / value else 0


def test_tasks_are_small(dataset):
    task = RowRange(dataset=str(dataset), model=str(TINY), run="x", start=0, end=2048)
    assert len(pickle.dumps((measure_rows, task))) < 1000
