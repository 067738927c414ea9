"""`entrain index`: measure a dataset for a model and keep the result."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `index` command to the subparsers of the main parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "index",
        help="measure every sample of a dataset for a model",
        description="Read image headers and count tokens of every sample, report bad samples, write a Parquet table.",
    )
    parser.add_argument("dataset", metavar="DATASET", help="JSONL file in chat form")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="model folder in Hugging Face format")
    parser.add_argument("--output", metavar="FILE", help="Parquet file to write (default: DATASET with .index.parquet)")
    parser.add_argument("--policy", choices=("error", "skip"), default="error", help="what to do with bad samples")
    parser.add_argument("--num-workers", type=int, default=0, metavar="N", help="processes; 0 works in this one")
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help="local processes or a Ray cluster")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Index a dataset, print the summary and say where the table lies; 0 on success.

    Raises:
        WorkloadError: the dataset or its samples are unusable.
        RuntimeConfigError: the model folder is.
    """
    from rich.console import Console

    from entrain_opt.workload.index import index_dataset
    from entrain_opt.workload.statistics import workload_table

    samples = index_dataset(
        arguments.dataset,
        arguments.model,
        policy=arguments.policy,
        num_workers=arguments.num_workers,
        engine=arguments.engine,
        progress=True,
    )
    output = Path(arguments.output) if arguments.output else Path(arguments.dataset).with_suffix(".index.parquet")
    samples.write(output)
    console = Console()
    console.print(workload_table(samples, title=f"{arguments.dataset} for {Path(arguments.model).name}"))
    console.print(f"Written to {output}", soft_wrap=True, highlight=False)
    return 0
