"""The index counts what training sees, names every bad sample, and its cache is never stale."""

import argparse
import json
import logging
import os
import re
import shutil
import sys
import types
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from column_cases import damage_group, fine_vision, write
from PIL import Image

from entrain_opt.cli.index import add_parser
from entrain_opt.errors import RuntimeConfigError, WorkloadError
from entrain_opt.workload import index
from entrain_opt.workload.chat import ChatEncoder
from entrain_opt.workload.dataset import ChatDataset
from entrain_opt.workload.index import index_dataset, index_key, load_index, measure_dataset, media_sizes
from entrain_opt.workload.media import media_rule
from entrain_opt.workload.samples import SampleTable

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny-llava"
VALIDATION = ROOT / "recipes" / "data" / "physics" / "validation.jsonl"


def record(sample_id: str, *images: str, question: str = "what?", answer: str | None = "this") -> str:
    content = [{"type": "image", "path": image} for image in images] + [{"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return json.dumps({"id": sample_id, "messages": messages})


@pytest.fixture
def mixed(tmp_path) -> Path:
    """Four good samples among bad ones of every kind."""
    Image.new("RGB", (300, 200)).save(tmp_path / "good.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)).save(tmp_path / "whole.jpg")
    (tmp_path / "half.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:900])
    (tmp_path / "empty.jpg").write_bytes(b"")
    lines = [
        record("text"),
        record("missing", "nowhere.png"),
        record("half", "half.jpg"),
        record("one", "good.png"),
        record("zero", "empty.jpg"),
        '{"broken": ',
        record("no_label", "good.png", answer=None),
        record("long", question="word " * 5000),
        record("literal", "good.png", question="<image> <image>"),
        record("three", "good.png", "whole.jpg", "good.png"),
        record("control", question="<|im_end|>"),
        record("last", "whole.jpg"),
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


REASONS = {
    "missing": r"nowhere\.png: file not found",
    "half": r"half\.jpg.*truncated",
    "zero": r"empty\.jpg: not a usable image",
    "?": "not a JSON object",
    "no_label": "no label token",
    "long": "needs .* tokens",
    "literal": "2 <image> markers",
    "control": "control token",
}


def test_index_counts_what_the_trainer_sees():
    dataset, encoder, rule = ChatDataset(VALIDATION), ChatEncoder.from_pretrained(TINY), media_rule(TINY)
    table = index_dataset(VALIDATION, TINY)
    assert len(table) == len(dataset)
    for row, sample in enumerate(dataset):
        assert table.sample_ids[row] == sample.id
        tokens = [size.tokens for size in media_sizes(sample, rule)]
        encoded = encoder.encode(sample, tokens)
        one = table.take([row])
        assert one.total_tokens[0] == encoded.num_tokens
        assert one.label_tokens[0] == encoded.num_label_tokens
        assert one.media_tokens.tolist() == tokens
        assert one.media_tokens.sum() == len(encoded.media_positions)


def test_every_bad_sample_is_reported_at_once(mixed):
    with pytest.raises(WorkloadError) as caught:
        index_dataset(mixed, TINY)
    message = str(caught.value)
    assert message.startswith("8 of 12 samples cannot be used")
    lines = message.splitlines()
    for sample_id, reason in REASONS.items():
        shown = next(line for line in lines if line.startswith(f"  {sample_id}  ") or reason in line)
        assert re.search(rf"mixed\.jsonl:\d+  .*{reason}", shown), shown


def test_skip_leaves_out_and_says_so(mixed, caplog):
    with caplog.at_level(logging.WARNING):
        table = index_dataset(mixed, TINY, policy="skip")
    assert table.sample_ids.tolist() == ["text", "one", "three", "last"]
    assert table.media_counts.tolist() == [0, 1, 3, 1]
    assert "Skipping 8 of 12" in caplog.text
    dataset = ChatDataset(mixed)
    # Broken rows do not keep the good ones from being read.
    assert all(dataset[dataset.row_of(name)].id == name for name in table.sample_ids.tolist())


def test_workers_give_the_same_table(mixed):
    alone, bad_alone = measure_dataset(mixed, TINY)
    pooled, bad_pooled = measure_dataset(mixed, TINY, num_workers=1)
    assert bad_alone == bad_pooled
    assert all(np.array_equal(getattr(alone, name), getattr(pooled, name)) for name in SampleTable.__slots__)


def test_repeated_ids_raise_whatever_the_policy(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join([record("a"), record("b"), record("a")]), encoding="utf-8")
    with pytest.raises(WorkloadError, match=r"'a' appears at .*:1 and .*:3"):
        index_dataset(path, TINY, policy="skip")


def test_aspect_ratio_guard_names_the_file(tmp_path):
    """The tiny model's tiles take any shape; the Qwen processor's guard refuses 1:228."""
    tokenizer = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "qwen2_5-vit-llama3_2-1b", folder)
    for name in tokenizer:
        shutil.copy(TINY / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_token_id": 3, "video_token_id": 2}))
    Image.new("RGB", (2280, 10)).save(tmp_path / "thin.png")
    (tmp_path / "d.jsonl").write_text(record("thin", "thin.png"), encoding="utf-8")
    with pytest.raises(WorkloadError, match=r"thin\.png: .*aspect ratio of at most 200, found 2280 x 10"):
        index_dataset(tmp_path / "d.jsonl", folder)
    assert index_dataset(tmp_path / "d.jsonl", TINY).media_counts.tolist() == [1]


def test_nothing_left_raises_even_when_skipping(tmp_path):
    (tmp_path / "d.jsonl").write_text(record("a", answer=None), encoding="utf-8")
    with pytest.raises(WorkloadError, match="No sample is left"):
        index_dataset(tmp_path / "d.jsonl", TINY, policy="skip")


def test_wrong_policy_engine_and_dataset_raise(mixed, tmp_path):
    with pytest.raises(RuntimeConfigError, match="policy: expected error or skip"):
        index_dataset(mixed, TINY, policy="ignore")
    with pytest.raises(RuntimeConfigError, match="engine: expected local or ray"):
        index_dataset(mixed, TINY, engine="spark")
    with pytest.raises(WorkloadError, match=r"none\.jsonl"):
        index_dataset(tmp_path / "none.jsonl", TINY)


def test_ray_is_optional(mixed, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.util.multiprocessing", None)
    with pytest.raises(RuntimeConfigError, match=r"pip install entrain-opt\[ray\]"):
        index_dataset(mixed, TINY, engine="ray")


def test_ray_pool_gives_the_same_table(mixed, monkeypatch):
    """Ray's pool has the interface of multiprocessing's; a thread pool stands in for it."""
    for name in ("ray", "ray.util", "ray.util.multiprocessing"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["ray.util.multiprocessing"].Pool = ThreadPool
    table = index_dataset(mixed, TINY, policy="skip", engine="ray", num_workers=2)
    assert table.sample_ids.tolist() == ["text", "one", "three", "last"]


def test_real_ray_gives_the_same_table_and_errors(mixed, tmp_path, monkeypatch):
    """Runs where the extra `ray` is installed; starts a cluster of one machine."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    repeated = tmp_path / "repeated.jsonl"
    repeated.write_text("\n".join([record("a"), record("b"), record("a")]), encoding="utf-8")
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        found = [measure_dataset(mixed, TINY, num_workers=0), measure_dataset(mixed, TINY, num_workers=2, engine="ray")]
        with pytest.raises(WorkloadError, match=r"^id 'a' appears at .*:1 and .*:3; make it unique\.$"):
            measure_dataset(repeated, TINY, num_workers=2, engine="ray")
    finally:
        ray.shutdown()
    assert found[0][1] == found[1][1]
    assert all(np.array_equal(getattr(found[0][0], n), getattr(found[1][0], n)) for n in SampleTable.__slots__)


def test_cache_returns_the_same_table_and_still_warns(mixed, tmp_path, caplog):
    first = load_index(mixed, TINY, policy="skip", cache_dir=tmp_path / "cache")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        second = load_index(mixed, TINY, policy="skip", cache_dir=tmp_path / "cache")
    assert all(np.array_equal(getattr(first, name), getattr(second, name)) for name in SampleTable.__slots__)
    assert "Skipping 8 of 12" in caplog.text
    with pytest.raises(WorkloadError, match="8 of 12"):
        load_index(mixed, TINY, cache_dir=tmp_path / "cache")


def test_cache_key_follows_everything_the_numbers_depend_on(mixed, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    keys = [index_key(mixed, folder)]

    def changed() -> None:
        keys.append(index_key(mixed, folder))

    assert index_key(mixed, folder) == keys[0]
    os.utime(mixed.parent / "good.png", ns=(1, 1))
    changed()
    (mixed.parent / "nowhere.png").write_bytes(b"now it exists")
    changed()
    mixed.write_text(mixed.read_text() + "\n" + record("new"), encoding="utf-8")
    changed()
    for name in ("chat_template.jinja", "preprocessor_config.json"):
        (folder / name).write_text((folder / name).read_text() + "\n")
        changed()
    assert len(set(keys)) == len(keys)


def test_racing_loaders_agree(tmp_path):
    """The lock is one of files, so threads meet it as processes do."""
    with ThreadPool(4) as pool:
        tables = pool.map(lambda _: load_index(VALIDATION, TINY, cache_dir=tmp_path), range(4), chunksize=1)
    assert len({tuple(table.total_tokens.tolist()) for table in tables}) == 1
    assert len(list(tmp_path.glob("*.parquet"))) == 1
    assert not list(tmp_path.glob("*.partial"))


def command(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    options = parser.parse_args(["index", *map(str, arguments)])
    return options.run(options)


def test_command_line(tmp_path, capsys):
    output, cache = tmp_path / "out.parquet", tmp_path / "cache"
    assert command(VALIDATION, "--model", TINY, "--output", output, "--cache-dir", cache) == 0
    assert len(SampleTable.read(output)) == 24
    printed = capsys.readouterr().out
    assert "encoder patches" in printed
    assert str(output) in printed
    assert len(load_index(VALIDATION, TINY, cache_dir=cache)) == 24
    assert len(list(cache.glob("samples-*.parquet"))) == 1  # Training finds the same table.


def test_command_line_reports_every_bad_sample_as_a_table_and_as_json(mixed, tmp_path, capsys):
    arguments = (mixed, "--model", TINY, "--cache-dir", tmp_path / "cache")
    with pytest.raises(WorkloadError, match="8 of 12 samples cannot be used"):
        command(*arguments)
    printed = capsys.readouterr().out
    assert "8 samples cannot be used" in printed
    assert "Written" not in printed
    assert not (tmp_path / "mixed.index.parquet").exists()
    with pytest.raises(WorkloadError, match="8 of 12"):
        command(*arguments, "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["usable"], found["bad"], found["output"]) == (12, 4, 8, None)
    assert command(*arguments, "--json", "--policy", "skip") == 0
    skipped = json.loads(capsys.readouterr().out)
    assert skipped["bad_samples"] == found["bad_samples"]
    assert len(SampleTable.read(skipped["output"])) == 4
    for bad in skipped["bad_samples"]:
        assert re.search(REASONS[bad["sample_id"]], bad["reason"])
        assert re.search(r"mixed\.jsonl:\d+$", bad["location"])


def test_one_report_over_all_files(tmp_path, capsys):
    """A damaged row group in one file, bad rows in another."""
    first = write(fine_vision(8), tmp_path / "train-0.parquet")
    rows = fine_vision(4).to_pylist()
    rows[1]["images"][0]["bytes"] = b""
    rows[2]["texts"][0]["user"] = "<image>"
    write(pa.Table.from_pylist(rows), tmp_path / "train-1.parquet")
    damage_group(first, 1, "texts")
    arguments = (
        tmp_path,
        "--model",
        TINY,
        "--cache-dir",
        tmp_path / "cache",
        "--output",
        tmp_path / "out" / "o.parquet",
    )
    assert command(*arguments, "--policy", "skip", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["usable"], found["bad"]) == (12, 6, 6)
    assert [(bad["sample_id"], bad["num_samples"]) for bad in found["bad_samples"]] == [
        ("?", 4), ("train-1.parquet:1", 1), ("train-1.parquet:2", 1),
    ]  # fmt: skip
    assert command(*arguments, "--policy", "skip") == 0
    assert "6 samples cannot be used" in capsys.readouterr().out


def test_a_bar_is_shown_only_when_it_takes_long(monkeypatch, capsys):
    measure_dataset(VALIDATION, TINY, num_workers=0, progress=True)
    assert "Indexing" not in capsys.readouterr().err
    monkeypatch.setattr(index, "_BAR_AFTER_SECONDS", -1.0)
    measure_dataset(VALIDATION, TINY, num_workers=0, progress=True)
    assert "24/24" in capsys.readouterr().err
