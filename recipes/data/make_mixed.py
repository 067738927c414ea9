"""Write `recipes/data/mixed/train.jsonl`: samples with pictures, clips, both or neither, of the shipped data.

Samples of `physics` and `digits` are taken as they are, their media by path; samples with both kinds join one of each:
first the clips are asked for, then the picture. The order is that of a hash of the ids, so the result depends on the
shipped data alone.

    python recipes/data/make_mixed.py [--output recipes/data/mixed]
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NUM_PICTURES, NUM_CLIPS, NUM_BOTH, NUM_TEXT = 12, 8, 12, 8
MAX_TEXT_CHARACTERS = 600

Sample = dict[str, Any]


def read(name: str) -> list[Sample]:
    """Short samples of a shipped data set, with media paths that hold from the new folder."""
    samples = []
    for line in (HERE / name / "train.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        parts = [part for message in sample["messages"] for part in message["content"]]
        for part in parts:
            if "path" in part:
                part["path"] = f"../{name}/{part['path']}"
        if sum(len(part.get("text", "")) for part in parts) <= MAX_TEXT_CHARACTERS:
            samples.append(sample)
    return sorted(samples, key=order)


def order(sample: Sample) -> str:
    """A fixed pseudo-random sort key."""
    return hashlib.sha256(sample["id"].encode()).hexdigest()


def kinds(sample: Sample) -> set[str]:
    return {part["type"] for message in sample["messages"] for part in message["content"]} - {"text"}


def joined(clips: Sample, picture: Sample) -> Sample:
    """One conversation of two turns."""
    return {"id": f"{clips['id']}+{picture['id']}", "messages": [*clips["messages"], *picture["messages"]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "mixed")
    arguments = parser.parse_args()
    physics, clips = read("physics"), read("digits")
    pictures = [sample for sample in physics if kinds(sample) == {"image"}]
    texts = [sample for sample in physics if not kinds(sample)]
    both = zip(clips[NUM_CLIPS:], pictures[NUM_PICTURES:], strict=False)
    taken = pictures[:NUM_PICTURES] + clips[:NUM_CLIPS] + texts[:NUM_TEXT]
    taken += [joined(*pair) for pair in list(both)[:NUM_BOTH]]
    taken.sort(key=order)
    arguments.output.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in taken)
    (arguments.output / "train.jsonl").write_text(lines, encoding="utf-8")
    print(f"{len(taken)} samples in {arguments.output}")


if __name__ == "__main__":
    main()
