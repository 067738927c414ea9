"""`entrain export`: a checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from entrain_opt.spec.families import COMPOSED_TYPE
from entrain_opt.spec.folder import read_json


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the `export` command to the subparsers of the main parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "export",
        help="write a checkpoint as a plain Hugging Face folder",
        description="Write the weights of a checkpoint with the model's config, tokenizer and processor, so that "
        "Transformers loads the folder as it is.",
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint folder that `entrain fit` wrote")
    parser.add_argument("output", metavar="OUT", help="new folder")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Export and say how to load; 0 on success.

    Raises:
        EntrainError: see `entrain_opt.runtime.checkpoint.export`.
    """
    from entrain_opt.runtime.checkpoint import export

    export(Path(arguments.checkpoint), Path(arguments.output))
    is_composed = read_json(Path(arguments.output) / "config.json")["model_type"] == COMPOSED_TYPE
    loader = "entrain_opt.ComposedModel" if is_composed else "AutoModelForImageTextToText"
    print(f"Written to {arguments.output}. Load it with")
    print(f"  {loader}.from_pretrained({arguments.output!r})")
    if is_composed:
        print("or its parts, each a folder of its own, with Transformers.")
    return 0
