"""How fast the index reads image headers, and whole samples, on one core.

    python benchmarks/index_speed.py [DATASET.jsonl] [--model FOLDER] [--seconds 2]

Every image of the dataset is read from its file and from Parquet with the bytes inside (FineVision's columns, written
to a temporary folder). Files are read once before, so the numbers are those of a warm cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from entrain_opt.workload.bad_samples import BadSample
from entrain_opt.workload.dataset import ChatDataset
from entrain_opt.workload.images import read_image_size
from entrain_opt.workload.measure import RowRange, measure_rows

DEFAULT = Path(__file__).parents[1] / "recipes" / "data" / "physics" / "train.jsonl"
MODEL = Path(__file__).parents[1] / "models" / "tiny-llava"


def read_headers(dataset: ChatDataset) -> int:
    """Read the header of every image; returns how many."""
    count = 0
    for sample in dataset.read(0, len(dataset)):
        if isinstance(sample, BadSample):
            raise SystemExit(f"{sample.location}: {sample.reason}")
        for item in sample.media:
            read_image_size(item)
            count += 1
    return count


def as_parquet(dataset: ChatDataset, path: Path, rows_per_group: int = 100) -> None:
    """The dataset with the bytes of its images inside."""
    rows = [
        {
            "images": [{"bytes": item.path.read_bytes(), "path": item.path.name} for item in sample.media],
            "texts": [
                {
                    "user": "".join(part.get("text", "") for part in sample.messages[0]["content"]),
                    "assistant": "".join(part.get("text", "") for part in sample.messages[-1]["content"]),
                }
            ],
        }
        for sample in dataset
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=rows_per_group)


def rate(work: Callable[[], int], seconds: float) -> float:
    """Items per second: the best of the passes that fit into the time, after one to warm up."""
    work()
    best, started = 0.0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        begun = time.perf_counter()
        count = work()
        best = max(best, count / (time.perf_counter() - begun))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="?", type=Path, default=DEFAULT, help="JSONL file in chat form")
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each line")
    arguments = parser.parse_args()
    files = ChatDataset(arguments.dataset)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.parquet"
        as_parquet(files, path)
        parquet = ChatDataset(path)
        paths = [item.path for sample in files for item in sample.media]
        print(f"{arguments.dataset}: {len(files)} samples, {len(paths)} images, one core")
        print("| what | per second |\n|---|---|")

        def headers_of_files() -> int:
            for image in paths:
                read_image_size(image)
            return len(paths)

        lines: tuple[tuple[str, Callable[[], int]], ...] = (
            ("headers from files", headers_of_files),
            ("headers from files, JSON lines read and checked", lambda: read_headers(files)),
            ("headers from Parquet bytes, rows read and checked", lambda: read_headers(parquet)),
        )
        for name, work in lines:
            print(f"| {name} | {rate(work, arguments.seconds):,.0f} |")
        for name, dataset, source in (("JSON lines", files, arguments.dataset), ("Parquet", parquet, path)):
            task = RowRange(dataset=str(source), model=str(arguments.model), run=name, start=0, end=len(dataset))

            def samples(task: RowRange = task) -> int:
                measure_rows(task)
                return task.end

            print(f"| whole samples of {name}, tokens counted | {rate(samples, arguments.seconds):,.0f} |")


if __name__ == "__main__":
    main()
