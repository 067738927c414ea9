"""A run reads Parquet (here in a loader process) as it reads JSON lines: same samples, same losses."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small import entrain, losses, write_run


def to_fine_vision(folder, path):
    """The run's JSON lines as rows with FineVision's columns, ids kept."""
    rows = []
    for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        question, answer = sample["messages"]
        images = [part["path"] for part in question["content"] if part["type"] == "image"]
        text = "".join(part["text"] for part in question["content"] if part["type"] == "text")
        answers = answer["content"]
        if not isinstance(answers, str):
            answers = "".join(part["text"] for part in answers)
        rows.append(
            {
                "id": sample["id"],
                "images": [{"bytes": (folder / name).read_bytes(), "path": name} for name in images],
                "texts": [{"user": text, "assistant": answers}],
                "source": "physics",
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)


@pytest.fixture
def run_of_both(tmp_path):
    recipe = write_run(tmp_path, devices=1, max_steps=2)
    process = entrain(tmp_path, recipe)
    assert process.returncode == 0, process.stderr
    expected = losses(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    to_fine_vision(tmp_path, tmp_path / "train.parquet")
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "images").unlink()
    recipe["data"]["init_args"] |= {"dataset": "train.parquet", "num_workers": 1}
    return tmp_path, recipe, expected


def test_fine_vision_parquet_trains_to_the_same_losses(run_of_both):
    folder, recipe, expected = run_of_both
    process = entrain(folder, recipe)
    assert process.returncode == 0, process.stderr
    found = losses(folder)
    assert found.keys() == expected.keys()
    assert len(found) == 2
    assert all(abs(found[step] - expected[step]) < 1e-5 for step in expected)
    assert list((folder / "runs" / "cache" / "rows").glob("*.arrow"))
