"""Batches are independent, free of repeats and repeatable; bare traces become tables."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.media import media_rule
from entrain_opt.workload.statistics import global_batch_statistics, workload_table
from entrain_opt.workload.trace import read_trace

MODELS = Path(__file__).resolve().parents[2] / "models"


@given(num_samples=st.integers(1, 50), batch=st.integers(1, 120), seed=st.integers(0, 5))
def test_batches_draw_evenly_and_repeatably(num_samples, batch, seed):
    values = {"a": np.arange(num_samples), "b": np.ones(num_samples)}
    statistics = global_batch_statistics(values, batch, 4, seed=seed)
    again = global_batch_statistics(values, batch, 4, seed=seed)
    assert np.array_equal(statistics.rows, again.rows)
    assert statistics.rows.shape == (4, batch)
    for rows in statistics.rows:
        counts = np.bincount(rows, minlength=num_samples)
        assert counts.max() - counts.min() <= 1
    assert np.array_equal(statistics.sums[:, 0], statistics.rows.sum(axis=1))
    assert np.array_equal(statistics.sums[:, 1], np.full(4, batch))
    assert np.array_equal(statistics.maxima[:, 0], statistics.rows.max(axis=1))


def test_deviation_falls_with_the_batch():
    values = {"a": np.random.default_rng(0).lognormal(size=5000)}
    small, large = (global_batch_statistics(values, size, 60) for size in (8, 512))
    assert large.sums.std() / large.mean[0] < small.sums.std() / small.mean[0] / 4


def test_constant_zero_and_wrong_arguments():
    assert global_batch_statistics({"a": [0.0, 0.0]}, 2, 2).mean[0] == 0
    with pytest.raises(WorkloadError, match="one value per sample"):
        global_batch_statistics({"a": [1.0], "b": [1.0, 2.0]}, 1, 1)
    with pytest.raises(WorkloadError, match="one value per sample"):
        global_batch_statistics({}, 1, 1)
    with pytest.raises(WorkloadError, match="at least 1, found 0 and 1"):
        global_batch_statistics({"a": [1.0]}, 0, 1)


def write_trace(path: Path, **columns) -> Path:
    rows = {
        "sample_id": ["a", "b", "c"],
        "image_sizes": [[[300, 200]], [], [[112, 112], [5, 5]]],
        "text_words": [10, 0, 3],
        "audio_seconds": pa.array([None, None, None], type=pa.float32()),
        **columns,
    }
    pq.write_table(pa.table(rows), path)
    return path


def test_trace_becomes_a_table(tmp_path):
    rule = media_rule(MODELS / "tiny-llava")
    table = read_trace(write_trace(tmp_path / "t.parquet"), rule, tokens_per_word=1.3, label_share=0.5)
    assert table.text_tokens.tolist() == [13, 1, 4]
    assert table.label_tokens.tolist() == [6, 1, 2]
    assert table.media_counts.tolist() == [1, 0, 2]
    sizes = [(300, 200), (112, 112), (5, 5)]
    assert table.media_tokens.tolist() == [rule.image(*size).tokens for size in sizes]
    buffer = io.StringIO()
    Console(file=buffer, width=100).print(workload_table(table))
    assert "3 samples, 33% text-only; media: 3 image" in buffer.getvalue()


def test_wrong_traces_raise(tmp_path):
    rule = media_rule(MODELS / "qwen2_5-vit-llama3_2-1b")
    with pytest.raises(WorkloadError, match=r"none\.parquet, found none"):
        read_trace(tmp_path / "none.parquet", rule)
    with pytest.raises(WorkloadError, match="holds audio, the model takes image"):
        read_trace(write_trace(tmp_path / "a.parquet", audio_seconds=[1.0, None, None]), rule)
    with pytest.raises(WorkloadError, match=r"sample c: .*2280 x 10"):
        read_trace(write_trace(tmp_path / "b.parquet", image_sizes=[[], [], [[2280, 10]]]), rule)
    with pytest.raises(WorkloadError, match="label_share"):
        read_trace(write_trace(tmp_path / "c.parquet"), rule, label_share=0)
    pq.write_table(pa.table({"sample_id": ["a"]}), tmp_path / "d.parquet")
    with pytest.raises(WorkloadError, match="missing"):
        read_trace(tmp_path / "d.parquet", rule)
