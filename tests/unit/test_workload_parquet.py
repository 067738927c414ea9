"""A table survives the file unchanged, in memory and mapped; foreign files are refused."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.parquet import read_notes, read_sample_table, write_sample_table
from entrain_opt.workload.samples import SampleTable


def make_table(counts: list[int], seed: int = 0) -> SampleTable:
    rng = np.random.default_rng(seed)
    num_media = sum(counts)
    return SampleTable(
        sample_ids=np.array([f"größe-{index}" for index in range(len(counts))], dtype=np.str_),
        text_tokens=rng.integers(0, 1 << 40, len(counts)),
        label_tokens=rng.integers(0, 9, len(counts)),
        media_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        media_kind=rng.integers(0, 3, num_media),
        media_patches=rng.integers(1, 1 << 40, num_media),
        media_segments=rng.integers(1, 9, num_media),
        media_tokens=rng.integers(1, 9, num_media),
    )


def assert_equal(first: SampleTable, second: SampleTable) -> None:
    for name in SampleTable.__slots__:
        assert np.array_equal(getattr(first, name), getattr(second, name)), name
        assert getattr(first, name).dtype.kind == getattr(second, name).dtype.kind


@settings(max_examples=20)
@given(counts=st.lists(st.integers(0, 4), max_size=30), seed=st.integers(0, 99))
def test_round_trip(tmp_path_factory, counts, seed):
    table = make_table(counts, seed)
    path = tmp_path_factory.mktemp("tables") / "deep" / "t.parquet"
    table.write(path)
    assert_equal(table, SampleTable.read(path))
    if counts:
        assert_equal(table, read_sample_table(path, mapped_rows=0))


def test_large_tables_are_mapped_and_follow_the_file(tmp_path):
    path = tmp_path / "t.parquet"
    first, second = make_table([1, 0, 2]), make_table([3, 1])
    first.write(path)
    mapped = read_sample_table(path, mapped_rows=1)
    assert isinstance(mapped.media_tokens, np.memmap)
    assert_equal(first.take([2, 0]), mapped.take([2, 0]))
    second.write(path)
    assert_equal(second, read_sample_table(path, mapped_rows=1))
    assert not list(tmp_path.rglob("*.partial"))


def test_notes_and_plain_readers(tmp_path):
    path = tmp_path / "t.parquet"
    table = make_table([2, 0])
    write_sample_table(table, path, notes={"skipped": 3})
    assert read_notes(path) == {"skipped": 3}
    rows = pq.read_table(path).to_pylist()
    assert rows[0]["media_tokens"] == table.media_tokens.tolist()
    assert rows[1]["media_tokens"] == []


def test_bad_tables_are_not_written(tmp_path):
    table = make_table([1, 1])
    repeated = SampleTable(
        **{name: getattr(table, name) for name in SampleTable.__slots__ if name != "sample_ids"},
        sample_ids=np.array(["a", "a"]),
    )
    with pytest.raises(WorkloadError, match="unique"):
        repeated.write(tmp_path / "t.parquet")
    assert not list(tmp_path.iterdir())


def test_missing_and_foreign_files_raise(tmp_path):
    with pytest.raises(WorkloadError, match=r"none\.parquet, found none"):
        SampleTable.read(tmp_path / "none.parquet")
    Path(tmp_path / "text.parquet").write_text("text")
    with pytest.raises(WorkloadError, match="is not a Parquet file"):
        SampleTable.read(tmp_path / "text.parquet")
    pq.write_table(pa.table({"sample_id": ["a"]}), tmp_path / "trace.parquet")
    with pytest.raises(WorkloadError, match="read_trace"):
        SampleTable.read(tmp_path / "trace.parquet")


def test_take_by_number_from_the_end_and_by_mask():
    table = make_table([1, 0, 3, 2])
    assert_equal(table.take([-1, 0]), table.take([3, 0]))
    assert_equal(table.take(np.array([True, False, True, False])), table.take([0, 2]))
    assert_equal(table.take([0, 1, 2, 3]), table)
    assert len(table.take([])) == 0
