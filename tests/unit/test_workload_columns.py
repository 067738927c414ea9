"""Rows of Parquet and Arrow are the conversations that the same data has as JSON lines."""

import json
import pickle
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from column_cases import (
    PICTURES,
    TINY,
    damage_group,
    embedded,
    fine_vision,
    noise,
    picture,
    save_to_disk,
    turn,
    write,
)

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.dataset import ChatDataset
from entrain_opt.workload.index import index_dataset, index_key, measure_dataset
from entrain_opt.workload.samples import SampleTable


def contents(sample):
    return [item.open().read() for item in sample.media]


def plain(sample):
    return sample.id.rpartition(":")[2], sample.messages, contents(sample)


def equal(first: SampleTable, second: SampleTable) -> bool:
    names = (name for name in SampleTable.__slots__ if name != "sample_ids")
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in names)


def test_fine_vision_images_stand_before_the_first_question(tmp_path):
    dataset = ChatDataset(write(fine_vision(), tmp_path / "train.parquet"))
    assert [sample.id for sample in dataset] == [f"train.parquet:{row}" for row in range(12)]
    sample = dataset[5]
    kinds = [[part["type"] for part in message["content"]] for message in sample.messages]
    assert kinds == [["image", "image", "text"], ["text"], ["text"], ["text"]]
    assert [message["role"] for message in sample.messages] == ["user", "assistant"] * 2
    assert contents(sample) == [picture(5), picture(6)]
    assert sample.messages[1]["content"][0]["text"] == "answer 5"


def test_markers_place_images_in_texts_and_messages(tmp_path):
    texts = pa.table({"images": [embedded(picture(0), picture(1))], "texts": [[turn("a <image> b <image>", "c")]]})
    messages = pa.table(
        {
            "images": [embedded(picture(0), picture(1))],
            "messages": [[{"role": "user", "content": "a <image> b <image>"}, {"role": "assistant", "content": "c"}]],
        }
    )
    as_json = pa.table({"image": texts["images"], "messages": [json.dumps(messages["messages"][0].as_py())]})
    samples = [
        ChatDataset(write(table, tmp_path / f"{name}.parquet"))[0]
        for name, table in (("t", texts), ("m", messages), ("j", as_json))
    ]
    assert [part["type"] for part in samples[0].messages[0]["content"]] == ["text", "image", "text", "image"]
    assert plain(samples[0]) == plain(samples[1]) == plain(samples[2])


def test_parts_of_messages_take_the_images_beside(tmp_path):
    """Structs of several part types hold nulls for the fields of the others."""
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "what?"}, {"type": "image", "text": None}]
    table = pa.table(
        {
            "messages": [[{"role": "user", "content": parts}]],
            "images": [embedded(picture(0), picture(1))],
            "id": pa.array([7]),
        }
    )
    sample = ChatDataset(write(table, tmp_path / "d.parquet"))[0]
    assert sample.id == "7"
    assert contents(sample) == [picture(0), picture(1)]
    assert [part["type"] for part in sample.messages[0]["content"]] == ["image", "text", "image"]


@pytest.mark.parametrize("images", ["struct", "bytes", "paths", "one", "null"])
def test_images_in_every_shape(images, tmp_path):
    (tmp_path / "0.jpg").write_bytes(picture(0))
    column = {
        "struct": pa.array([[{"bytes": picture(0), "path": None}]]),
        "bytes": pa.array([[picture(0)]]),
        "paths": pa.array([["0.jpg"]]),
        "one": pa.array([{"bytes": None, "path": "0.jpg"}]),
        "null": pa.array([None], type=pa.list_(pa.binary())),
    }[images]
    path = write(pa.table({"images": column, "texts": [[turn("q", "a")]]}), tmp_path / "d.parquet")
    assert contents(ChatDataset(path)[0]) == ([] if images == "null" else [picture(0)])


def test_old_features_store_lists_of_fields(tmp_path):
    """`Sequence({...})` of older `datasets` makes one struct of lists of a list of structs."""
    table = pa.table({"texts": [{"user": ["q", "r"], "assistant": ["a", "b"]}]})
    sample = ChatDataset(write(table, tmp_path / "d.parquet"))[0]
    assert [message["content"][0]["text"] for message in sample.messages] == ["q", "a", "r", "b"]


def test_every_format_gives_the_same_samples_and_sizes(tmp_path):
    table = fine_vision(13)
    lines = []
    for row in table.to_pylist():
        messages = [
            {"role": role, "content": [{"type": "text", "text": text[role]}]}
            for text in row["texts"]
            for role in ("user", "assistant")
        ]
        number = len(lines)
        parts = [{"type": "image", "path": str(PICTURES[(number + k) % len(PICTURES)])} for k in range(number % 3)]
        messages[0]["content"] = parts + messages[0]["content"]
        lines.append(json.dumps({"id": f"x:{number}", "messages": messages}))
    (tmp_path / "d.jsonl").write_text("\n".join(lines), encoding="utf-8")
    write(table.slice(0, 9), tmp_path / "hub" / "data" / "train-00000-of-00002.parquet")
    write(table.slice(9), tmp_path / "hub" / "data" / "train-00001-of-00002.parquet")
    paths = [
        tmp_path / "d.jsonl",
        write(table, tmp_path / "d.parquet"),
        tmp_path / "hub",
        tmp_path / "hub" / "data" / "train-*.parquet",
        save_to_disk([table.slice(0, 5), table.slice(5)], tmp_path / "saved"),
    ]
    samples = [[plain(sample)[1:] for sample in ChatDataset(path)] for path in paths]
    assert all(found == samples[0] for found in samples)
    unpacked = ChatDataset(paths[1], cache_dir=tmp_path / "cache")
    assert [plain(unpacked[row])[1:] for row in range(13)] == samples[0]
    tables = [index_dataset(path, TINY) for path in paths]
    assert all(equal(tables[0], found) for found in tables)
    for path, found in zip(paths, tables, strict=True):
        dataset = ChatDataset(path)
        assert [dataset.row_of(name) for name in found.sample_ids.tolist()] == list(range(13))


def test_ranges_cover_all_rows_once_and_read_the_same(tmp_path):
    table = pa.table({"texts": [[turn(f"{row}", "a")] for row in range(1500)]})
    write(table.slice(0, 700), tmp_path / "a.parquet", rows_per_group=700)
    write(table.slice(700), tmp_path / "b.parquet", rows_per_group=30)
    dataset = ChatDataset(tmp_path / "*.parquet")
    for num_rows in (1, 64, 100, 5000):
        ranges = dataset.ranges(num_rows)
        assert [row for start, end in ranges for row in range(start, end)] == list(range(1500))
        if num_rows == 64:
            assert max(end - start for start, end in ranges) == 256  # A large row group is not read for 64 rows.
            assert all(end - start <= 64 for start, end in ranges if start >= 700)
    found = [sample.messages[0]["content"][0]["text"] for start, end in ranges for sample in dataset.read(start, end)]
    assert found == [str(row) for row in range(1500)]
    assert [s.id for s in dataset.read(298, 301)] == ["a.parquet:298", "a.parquet:299", "a.parquet:300"]


def test_missing_columns_name_those_found(tmp_path):
    path = write(pa.table({"conversations": ["x"], "img": ["y"]}), tmp_path / "d.parquet")
    with pytest.raises(WorkloadError, match=r"expected a column messages, or texts .*'conversations', 'img'"):
        ChatDataset(path)


def test_half_files_are_named(tmp_path):
    path = write(fine_vision(), tmp_path / "d.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WorkloadError, match=r"d\.parquet is not a whole Parquet file"):
        ChatDataset(path)
    folder = save_to_disk([fine_vision()], tmp_path / "saved")
    file = next(folder.glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(WorkloadError, match=r"data-.*\.arrow is not a whole Arrow file"):
        ChatDataset(folder)


def test_a_damaged_row_group_costs_its_rows_only(tmp_path):
    path = write(fine_vision(), tmp_path / "d.parquet")
    whole, _ = measure_dataset(path, TINY)
    damage_group(path, 1, "images")
    table, bad = measure_dataset(path, TINY)
    assert [(b.num_samples, b.location) for b in bad] == [(4, f"{path}:4")]
    assert "row group 1 cannot be read, rows 4 to 7 are lost" in bad[0].reason
    assert table.sample_ids.tolist() == [f"d.parquet:{row}" for row in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert equal(table, whole.take([0, 1, 2, 3, 8, 9, 10, 11]))
    with pytest.raises(WorkloadError, match="4 of 12 samples cannot be used"):
        index_dataset(path, TINY)
    unpacked = ChatDataset(path, cache_dir=tmp_path / "cache")
    dataset = ChatDataset(path)
    for row in (0, 3, 8, 11):
        assert plain(unpacked[row]) == plain(dataset[row])
    for broken in (dataset, unpacked):
        with pytest.raises(WorkloadError, match=r"d\.parquet:5"):
            broken[5]


BAD_ROWS = {
    "truncated": (embedded(noise(60, 60)[:3000]), [turn("q", "a")], r"images\[0\]: not a usable image .*truncated"),
    "zero bytes": (embedded(b""), [turn("q", "a")], r"images\[0\]: not a usable image \(0 bytes"),
    "no content": ([{"bytes": None, "path": None}], [turn("q", "a")], r"images\[0\]: expected bytes or a path"),
    "more markers": (embedded(picture(0)), [turn("<image> <image>", "a")], "2 places for images .*, 1 paths"),
    "marker, no image": ([], [turn("<image>", "a")], "1 places for images .*, 0 paths"),
    "null answer": ([], [turn("q", None)], r"texts\[0\].assistant: expected a string, found NoneType"),
    "no turn": ([], [], 'non-empty list "texts"'),
    "too long": ([], [turn("word " * 5000, "a")], "needs .* tokens"),
}


def test_bad_rows_are_reported_by_id_and_reason(tmp_path):
    table = pa.table(
        {
            "images": [row[0] for row in BAD_ROWS.values()] + [embedded(picture(0))],
            "texts": [row[1] for row in BAD_ROWS.values()] + [[turn("q", "a")]],
            "id": [*BAD_ROWS, "good"],
        }
    )
    for path in (write(table, tmp_path / "d.parquet"), save_to_disk([table], tmp_path / "saved")):
        good, bad = measure_dataset(path, TINY)
        assert good.sample_ids.tolist() == ["good"]
        assert [sample.sample_id for sample in bad] == list(BAD_ROWS)
        for sample in bad:
            assert re.search(BAD_ROWS[sample.sample_id][2], sample.reason), sample


def test_messages_without_an_answer_are_bad(tmp_path):
    table = pa.table({"messages": [[{"role": "user", "content": "q"}]], "id": ["silent"]})
    _, bad = measure_dataset(write(table, tmp_path / "d.parquet"), TINY)
    assert [(sample.sample_id, sample.reason.split(":")[0]) for sample in bad] == [("silent", "no label token")]


def test_key_follows_the_file_and_the_files_it_names(tmp_path):
    (tmp_path / "0.jpg").write_bytes(picture(0))
    table = pa.table({"images": [["0.jpg"]], "texts": [[turn("q", "a")]]})
    for path in (write(table, tmp_path / "d.parquet"), save_to_disk([table], tmp_path)):
        (tmp_path / "0.jpg").write_bytes(picture(0))
        first = index_key(path, TINY)
        assert index_key(path, TINY) == first
        (tmp_path / "0.jpg").write_bytes(picture(1))
        second = index_key(path, TINY)
        assert first != second
    write(table.append_column("more", pa.array([1])), tmp_path / "d.parquet")
    assert index_key(tmp_path / "d.parquet", TINY) not in (first, second)


def test_pickles_for_loader_workers_without_their_content(tmp_path):
    table = fine_vision()
    for path in (write(table, tmp_path / "d.parquet"), save_to_disk([table], tmp_path / "saved")):
        dataset = ChatDataset(path)
        expected = [plain(sample) for sample in dataset]
        pickled = pickle.dumps(dataset)
        assert len(pickled) < 10_000
        assert [plain(sample) for sample in pickle.loads(pickled)] == expected


def test_unpacked_copies_are_made_once_and_follow_the_file(tmp_path):
    path = write(fine_vision(6), tmp_path / "d.parquet")
    cache = tmp_path / "cache"
    ChatDataset(path, cache_dir=cache)
    (copy,) = (cache / "rows").glob("*.arrow")
    made = copy.stat().st_mtime_ns
    ChatDataset(path, cache_dir=cache)
    assert copy.stat().st_mtime_ns == made
    write(fine_vision(7), path)
    assert len(ChatDataset(path, cache_dir=cache)) == 7
    assert "source" not in pa.ipc.open_file(copy).schema.names
    assert not list(cache.rglob("*.partial"))


def test_empty_parquet_raises(tmp_path):
    pq.write_table(fine_vision(3).slice(0, 0), tmp_path / "d.parquet")
    with pytest.raises(WorkloadError, match="holds no sample"):
        ChatDataset(tmp_path / "d.parquet")
