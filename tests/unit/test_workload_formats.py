"""A path means one list of files, and what it does not mean is said."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from column_cases import ROOT, TINY, fine_vision, save_to_disk, write

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.dataset import ChatDataset
from entrain_opt.workload.formats import find_files, is_trace
from entrain_opt.workload.index import index_dataset, load_index, measure_dataset

TRACE = ROOT / "recipes" / "data" / "traces" / "math_vision.parquet"


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def names(found: list[Path], folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in found]


def test_shards_of_one_split_in_order(tmp_path):
    shards = [f"data/train-{index:05}-of-00012.parquet" for index in range(12)]
    touch(tmp_path, *reversed(shards), "README.md", ".cache/x.parquet")
    assert names(find_files(tmp_path), tmp_path) == shards
    assert names(find_files(tmp_path / "data" / "train-0000[0-2]-*.parquet"), tmp_path) == shards[:3]


def test_files_of_a_folder_come_before_those_below(tmp_path):
    touch(tmp_path, "other/x.parquet", "runs/cache/samples-1.parquet")
    assert names(find_files(tmp_path / "other"), tmp_path) == ["other/x.parquet"]
    touch(tmp_path, "data/config/train-0.parquet")
    assert names(find_files(tmp_path), tmp_path) == ["data/config/train-0.parquet"]
    touch(tmp_path, "train.parquet", "train.index.parquet")
    assert names(find_files(tmp_path), tmp_path) == ["train.parquet"]


def test_several_splits_are_named(tmp_path):
    touch(
        tmp_path,
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/test-00000-of-1.parquet",
    )
    with pytest.raises(
        WorkloadError, match=r"found 2\. Give one of: .*/data/test\*\.parquet, .*/data/train\*\.parquet"
    ):
        find_files(tmp_path)
    assert len(find_files(tmp_path / "data/train*.parquet")) == 2


def test_hub_cache_means_the_snapshot_of_main(tmp_path):
    folder = tmp_path / "datasets--org--name"
    touch(folder, "snapshots/aaa/data/train-0.parquet", "snapshots/bbb/data/train-0.parquet")
    with pytest.raises(WorkloadError, match="expected one snapshot"):
        find_files(folder)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("bbb\n", encoding="utf-8")
    assert names(find_files(folder), folder) == ["snapshots/bbb/data/train-0.parquet"]


def test_saved_dataset_lists_its_files(tmp_path):
    save_to_disk([fine_vision(3), fine_vision(2)], tmp_path / "all" / "train")
    touch(tmp_path / "all" / "train", "data-left-over.arrow")
    assert len(ChatDataset(tmp_path / "all" / "train")) == 5
    (tmp_path / "all" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}), encoding="utf-8")
    assert len(ChatDataset(tmp_path / "all")) == 5
    (tmp_path / "all" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}), encoding="utf-8")
    with pytest.raises(WorkloadError, match=r"expected one split, found 2\. Give one of: .*/train, .*/test"):
        ChatDataset(tmp_path / "all")
    next((tmp_path / "all" / "train").glob("data-00001*")).unlink()
    with pytest.raises(WorkloadError, match=r"state\.json lists \['data-00001"):
        ChatDataset(tmp_path / "all" / "train")


def test_patterns_folders_and_states_without_files_raise(tmp_path):
    with pytest.raises(WorkloadError, match=r"no file matches .*x-\*\.parquet"):
        find_files(tmp_path / "x-*.parquet")
    touch(tmp_path / "notes", "a.txt")
    with pytest.raises(WorkloadError, match=r"found \['a\.txt'\]"):
        find_files(tmp_path / "notes")
    for content in ("{", "[]"):
        (tmp_path / "notes" / "state.json").write_text(content, encoding="utf-8")
        with pytest.raises(WorkloadError, match=r"state\.json: expected a JSON object"):
            find_files(tmp_path / "notes")
    (tmp_path / "notes" / "state.json").write_text("{}", encoding="utf-8")
    with pytest.raises(WorkloadError, match="expected _data_files"):
        find_files(tmp_path / "notes")


def test_content_decides_where_the_name_does_not_say(tmp_path):
    write(fine_vision(3), tmp_path / "no_suffix")
    assert len(ChatDataset(tmp_path / "no_suffix")) == 3
    table = fine_vision(2)
    with pa.OSFile(str(tmp_path / "file"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert len(ChatDataset(tmp_path / "file")) == 2


def test_shards_of_json_lines_keep_their_names(tmp_path):
    line = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})
    for name in ("a/1.jsonl", "b/1.jsonl"):
        touch(tmp_path, name)
        (tmp_path / name).write_text(line + "\n" + line, encoding="utf-8")
    dataset = ChatDataset(tmp_path / "*" / "1.jsonl")
    assert [sample.id for sample in dataset] == ["a/1.jsonl:1", "a/1.jsonl:2", "b/1.jsonl:1", "b/1.jsonl:2"]
    assert dataset.row_of("b/1.jsonl:2") == 3
    assert len(index_dataset(tmp_path / "*" / "1.jsonl", TINY)) == 4


def test_traces_are_told_from_data(tmp_path):
    assert is_trace(TRACE)
    assert not is_trace(write(fine_vision(3), tmp_path / "d.parquet"))
    assert not is_trace(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("text", encoding="utf-8")
    assert not is_trace(tmp_path / "text.parquet")
    with pytest.raises(WorkloadError, match=r"text\.parquet is not a whole Parquet file"):
        ChatDataset(tmp_path / "text.parquet")
    with pytest.raises(WorkloadError, match="serves to plan only"):
        ChatDataset(TRACE)
    assert len(index_dataset(TRACE, TINY)) == pq.ParquetFile(TRACE).metadata.num_rows


def test_sizes_that_a_processor_refuses_are_bad_samples_of_a_trace(tmp_path):
    """1:500 in a trace of two samples; the tower of Qwen2.5-VL takes up to 1:200."""
    folder = ROOT / "models" / "qwen2_5-vit-llama3_2-1b"
    rows = {"sample_id": ["thin", "good"], "image_sizes": [[[5000, 10]], [[640, 480]]], "text_words": [10, 10]}
    path = write(pa.table(rows), tmp_path / "t.parquet")
    table, bad = measure_dataset(path, folder)
    assert table.sample_ids.tolist() == ["good"]
    assert [(b.sample_id, b.location) for b in bad] == [("thin", f"{path}:0")]
    assert "aspect ratio of at most 200, found 5000 x 10" in bad[0].reason
    assert len(load_index(path, folder, policy="skip", cache_dir=tmp_path / "cache")) == 1
    with pytest.raises(WorkloadError, match="1 of 2 samples cannot be used"):
        load_index(path, folder, cache_dir=tmp_path / "cache")
    write(pa.table({name: values[:1] for name, values in rows.items()}), path)
    with pytest.raises(WorkloadError, match="No sample is left"):
        load_index(path, folder, policy="skip", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_media_beside_the_messages_of_a_line_have_their_places_or_are_named(kind, tmp_path):
    answer = {"role": "assistant", "content": "yes"}

    def read(content):
        record = {"messages": [{"role": "user", "content": content}, answer], f"{kind}s": ["x.bin"]}
        (tmp_path / "d.jsonl").write_text(json.dumps(record), encoding="utf-8")
        return ChatDataset(tmp_path / "d.jsonl")[0]

    (item,) = read([{"type": kind}, {"type": "text", "text": "?"}]).media
    assert (item.kind, item.path) == (kind, tmp_path / "x.bin")
    with pytest.raises(WorkloadError, match=f"{kind}s"):
        read("a text without a place")
