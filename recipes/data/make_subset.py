"""Select the shipped physics samples from a larger folder of the same format.

Samples that share a picture are kept together (a connected component), so no picture is in both splits. Taken are, in
this order and while the files stay below the cap: every component with a several-image sample, components of small
pictures, and a share of text-only samples. The order inside each kind is that of a hash of the ids, so the result
depends on the source alone.

    python recipes/data/make_subset.py SOURCE_FOLDER [--output recipes/data/physics]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

CAP_BYTES = 8 * 1024 * 1024 - 128 * 1024
SMALL_PICTURE_BYTES = 72 * 1024
NUM_TEXT_ONLY = 56
# About 1500 tokens of the tiny models' tokenizer.
MAX_TEXT_CHARACTERS = 5900
NUM_VALIDATION = 24
NUM_VALIDATION_TEXT_ONLY = 7

Sample = dict[str, Any]


def pictures(sample: Sample) -> list[str]:
    return [part["path"] for message in sample["messages"] for part in message["content"] if part["type"] == "image"]


def text_characters(sample: Sample) -> int:
    parts = [part for message in sample["messages"] for part in message["content"]]
    return sum(len(part["text"]) for part in parts if part["type"] == "text")


def order(samples: list[Sample]) -> str:
    """A fixed pseudo-random sort key."""
    return hashlib.sha256("|".join(sorted(sample["id"] for sample in samples)).encode()).hexdigest()


def components(samples: list[Sample]) -> list[list[Sample]]:
    """Samples grouped so that no picture is in two groups; a text-only sample is a group of its own."""
    group_of_picture: dict[str, list[Sample]] = {}
    groups: list[list[Sample]] = []
    for sample in samples:
        merged = [sample]
        for other in {id(g): g for g in (group_of_picture.get(p) for p in pictures(sample)) if g is not None}.values():
            groups.remove(other)
            merged += other
        groups.append(merged)
        group_of_picture.update({picture: merged for member in merged for picture in pictures(member)})
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "physics")
    arguments = parser.parse_args()
    lines = (arguments.source / "train.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [sample for sample in map(json.loads, lines) if text_characters(sample) <= MAX_TEXT_CHARACTERS]
    groups = sorted(components(samples), key=order)
    several = [group for group in groups if any(len(pictures(sample)) > 1 for sample in group)]
    single = [group for group in groups if group not in several and pictures(group[0])]
    text_only = [group[0] for group in groups if not pictures(group[0])]

    def picture_bytes(group: list[Sample]) -> int:
        names = {picture for sample in group for picture in pictures(sample)}
        return sum((arguments.source / name).stat().st_size for name in names)

    small = [group for group in single if picture_bytes(group) <= SMALL_PICTURE_BYTES]
    taken: list[list[Sample]] = []
    used_bytes = 0
    for group in several + small:
        text_bytes = sum(len(json.dumps(sample, ensure_ascii=False).encode()) + 1 for sample in group)
        if used_bytes + picture_bytes(group) + text_bytes <= CAP_BYTES:
            taken.append(group)
            used_bytes += picture_bytes(group) + text_bytes

    # The smallest several-image group and single-picture groups make the validation split.
    validation = list(min((group for group in taken if group in several), key=picture_bytes))
    for group in taken:
        if group in small and len(validation) + len(group) <= NUM_VALIDATION - NUM_VALIDATION_TEXT_ONLY:
            validation += group
    validation += text_only[:NUM_VALIDATION_TEXT_ONLY]
    held_out = {sample["id"] for sample in validation}
    train = [sample for group in taken for sample in group if sample["id"] not in held_out]
    train += text_only[NUM_VALIDATION_TEXT_ONLY : NUM_VALIDATION_TEXT_ONLY + NUM_TEXT_ONLY]

    shutil.rmtree(arguments.output / "images", ignore_errors=True)
    (arguments.output / "images").mkdir(parents=True)
    for name, split in (("train", train), ("validation", validation)):
        split.sort(key=lambda sample: order([sample]))
        text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in split)
        (arguments.output / f"{name}.jsonl").write_text(text, encoding="utf-8")
        for picture in {picture for sample in split for picture in pictures(sample)}:
            shutil.copyfile(arguments.source / picture, arguments.output / picture)
        counts = [len(pictures(sample)) for sample in split]
        print(
            f"{name}: {len(split)} samples, {counts.count(0)} text-only, {counts.count(1)} with one image, "
            f"{sum(count > 1 for count in counts)} with several"
        )
    total_bytes = sum(path.stat().st_size for path in arguments.output.rglob("*") if path.is_file())
    print(f"{total_bytes / 2**20:.2f} MiB in {arguments.output}")


if __name__ == "__main__":
    main()
