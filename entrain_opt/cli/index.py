"""`entrain index`: measure a dataset for a model and keep the result."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `index` command to the subparsers of the main parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "index",
        help="measure every sample of a dataset for a model",
        description="Read media headers and count tokens of every sample, report bad samples, write a Parquet table. A "
        "run that was stopped goes on where it was.",
    )
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        help="JSONL or Parquet file, a pattern of such files, a folder of Parquet, or a saved Hugging Face dataset",
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="model folder in Hugging Face format")
    parser.add_argument("--output", metavar="FILE", help="Parquet file to write (default: DATASET with .index.parquet)")
    parser.add_argument("--policy", choices=("error", "skip"), default="error", help="what to do with bad samples")
    parser.add_argument(
        "--num-workers", type=int, metavar="N", help="processes; 0 works in this one (default: all cores if it pays)"
    )
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="local processes or a Ray cluster")
    parser.add_argument("--cache-dir", default="runs/cache", metavar="FOLDER", help="where training looks for it")
    parser.add_argument("--json", action="store_true", help="print counts and all bad samples as JSON")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Index a dataset, print the summary and say where the table lies; 0 on success.

    Raises:
        WorkloadError: the dataset or its samples are unusable.
        RuntimeConfigError: the model folder is.
    """
    from rich.console import Console

    from entrain_opt.workload.bad_samples import apply_policy, bad_sample_table, count_bad, to_json
    from entrain_opt.workload.index import load_measured
    from entrain_opt.workload.statistics import workload_table

    samples, bad = load_measured(
        arguments.dataset,
        arguments.model,
        cache_dir=arguments.cache_dir,
        num_workers=arguments.num_workers,
        engine=arguments.engine,
        progress=True,
    )
    output = _output(arguments.dataset) if arguments.output is None else Path(arguments.output)
    is_written = len(samples) > 0 and (not bad or arguments.policy == "skip")
    if is_written:
        samples.write(output)
    if arguments.json:
        report = {
            "dataset": arguments.dataset,
            "model": arguments.model,
            "policy": arguments.policy,
            "samples": len(samples) + count_bad(bad),
            "usable": len(samples),
            "bad": count_bad(bad),
            "bad_samples": to_json(bad),
            "total_tokens": int(np.sum(samples.total_tokens)),
            "encoder_patches": int(np.sum(samples.media_patches)),
            "output": str(output) if is_written else None,
        }
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        console = Console()
        if bad:
            console.print(bad_sample_table(bad))
        if is_written:
            console.print(workload_table(samples, title=f"{arguments.dataset} for {Path(arguments.model).name}"))
            console.print(f"Written to {output}", soft_wrap=True, highlight=False)
    apply_policy(bad, len(samples), arguments.policy)
    return 0


def _output(dataset: str) -> Path:
    """Beside the dataset; in the working directory for a pattern."""
    path = Path(dataset)
    if path.is_dir():
        return path.parent / f"{path.name}.index.parquet"
    return path.with_suffix(".index.parquet") if path.is_file() else Path("dataset.index.parquet")
