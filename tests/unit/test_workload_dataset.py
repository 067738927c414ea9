"""Lines become samples, and what is wrong with a line is said with file and line number."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.dataset import ChatDataset


def line(content="hi", **fields) -> str:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}, ensure_ascii=False)


def write(path: Path, *lines: str | bytes) -> ChatDataset:
    path.write_bytes(b"\n".join(text if isinstance(text, bytes) else text.encode() for text in lines))
    return ChatDataset(path)


def image(path: str) -> dict:
    return {"type": "image", "path": path}


def text(value: str) -> dict:
    return {"type": "text", "text": value}


def test_rows_skip_blank_lines_and_keep_line_numbers(tmp_path):
    dataset = write(tmp_path / "d.jsonl", "", line(id="a"), "   ", line(id="b"), line(), "\t")
    assert [sample.id for sample in dataset] == ["a", "b", "d.jsonl:5"]
    assert [sample.location.rpartition(":")[2] for sample in dataset] == ["2", "4", "5"]
    assert dataset[-1] == dataset[2]
    assert dataset.row_of("b") == 1
    with pytest.raises(IndexError):
        dataset[3]
    with pytest.raises(WorkloadError, match=r"'x': not in .*d\.jsonl"):
        dataset.row_of("x")


def test_windows_line_ends_byte_order_mark_and_no_final_newline(tmp_path):
    dataset = write(tmp_path / "d.jsonl", b"\xef\xbb\xbf" + line(id="a").encode() + b"\r", line(id="b"))
    assert [sample.id for sample in dataset] == ["a", "b"]


@pytest.mark.parametrize("value", ["🙂 emoji", "שלום עולם", "日本語\u2028x", "a\u0000b"])
def test_text_round_trips(value, tmp_path):
    sample = write(tmp_path / "d.jsonl", line(value), line([text(value)]))[1]
    assert sample.messages == ({"role": "user", "content": [text(value)]},)


def test_paths_are_relative_to_the_file(tmp_path):
    sample = write(tmp_path / "d.jsonl", line([text("q"), image("i/x.jpg"), {"type": "image", "image": "y.jpg"}]))[0]
    assert [item.path for item in sample.media] == [tmp_path / "i" / "x.jpg", tmp_path / "y.jpg"]
    assert [part["type"] for part in sample.messages[0]["content"]] == ["text", "image", "image"]


def test_images_move_to_their_markers(tmp_path):
    content = [image("a.jpg"), text("first <image> then <image>"), image("b.jpg"), text("end")]
    sample = write(tmp_path / "d.jsonl", line(content))[0]
    assert sample.messages[0]["content"] == [
        text("first "), {"type": "image"}, text(" then "), {"type": "image"}, text("end"),
    ]  # fmt: skip
    assert [item.path.name for item in sample.media] == ["a.jpg", "b.jpg"]


def test_images_beside_the_messages(tmp_path):
    record = {"messages": [{"role": "user", "content": f"{n} <image>"} for n in range(2)], "images": ["a.jpg", "b.jpg"]}
    sample = write(tmp_path / "d.jsonl", json.dumps(record))[0]
    assert [item.path.name for item in sample.media] == ["a.jpg", "b.jpg"]
    assert [len(message["content"]) for message in sample.messages] == [2, 2]


def test_image_parts_without_path_take_the_images_beside(tmp_path):
    content = [{"type": "image"}, text("and"), image("c.jpg"), {"type": "image"}]
    sample = write(tmp_path / "d.jsonl", line(content, images=["a.jpg", "b.jpg"]))[0]
    assert [item.path.name for item in sample.media] == ["a.jpg", "c.jpg", "b.jpg"]


BAD_LINES = {
    "latin-1": (line("caf").encode("latin-1").replace(b"caf", b"caf\xe9"), "byte 0xe9 .* not UTF-8"),
    "surrogate": ('{"messages": [{"role": "user", "content": "\\udcb2"}]}', r"lone surrogate \\udcb2"),
    "surrogate path": (r'{"messages": [{"role": "u", "content": [{"type": "image", "path": "\udcb2"}]}]}', "surrogate"),
    "half": ('{"messages": [', "not a JSON object"),
    "list": ("[1]", "non-empty list"),
    "no messages": ('{"messages": []}', "non-empty list"),
    "role": ('{"messages": [{"content": "a"}]}', r"messages\[0\].role: expected a string"),
    "content": ('{"messages": [{"role": "user", "content": 3}]}', "content: expected text or a list"),
    "part": (line([{"type": "pdf"}]), r"content\[0\].type: .* found 'pdf'"),
    "path": (line([{"type": "image"}]), r"content\[0\].path: expected a string, found NoneType"),
    "two markers, one image": (line([text("<image><image>"), image("a.jpg")]), "2 <image> markers .* and 1 images"),
    "one marker, two images": (line([text("<image>"), image("a"), image("b")]), "1 <image> markers .* and 2 images"),
    "marker, no image": (line("see <image>"), "1 <image> markers .* and 0 images"),
    "lost images column": (line("see", images=["a.jpg"]), "0 places for images .*, 1 paths in images"),
    "places and images": (line([{"type": "image"}], images=[]), "1 places for images .*, 0 paths in images"),
    "id": (line(id=[1]), "id: expected a string"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines_are_named(name, tmp_path):
    bad, reason = BAD_LINES[name]
    dataset = write(tmp_path / "d.jsonl", line(), line(), bad)
    assert dataset[1].messages
    with pytest.raises(WorkloadError, match=rf"d\.jsonl:3: .*{reason}"):
        dataset[2]


def test_reading_does_not_depend_on_the_platform_encoding(tmp_path):
    write(tmp_path / "d.jsonl", line("naïve 🙂"))
    code = (
        "from entrain_opt.workload.dataset import ChatDataset\n"
        f"text = ChatDataset({str(tmp_path / 'd.jsonl')!r})[0].messages[0]['content'][0]['text']\n"
        "assert text == 'na\\u00efve \\U0001f642', ascii(text)\n"
    )
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_missing_and_empty_files_raise(tmp_path):
    with pytest.raises(WorkloadError, match=r"expected a JSONL or Parquet file.*none\.jsonl"):
        ChatDataset(tmp_path / "none.jsonl")
    with pytest.raises(WorkloadError, match="holds no sample"):
        write(tmp_path / "empty.jsonl", "", "  ")


def test_repeated_ids_are_named(tmp_path):
    dataset = write(tmp_path / "d.jsonl", line(id="a"), line(id="b"), line(id="a"))
    with pytest.raises(WorkloadError, match=r"'a' appears at .*:1 and .*:3"):
        dataset.row_of("a")


def test_pickles_for_loader_workers(tmp_path):
    dataset = write(tmp_path / "d.jsonl", line(id="a"), line(id="b"))
    assert [sample.id for sample in pickle.loads(pickle.dumps(dataset))] == ["a", "b"]
