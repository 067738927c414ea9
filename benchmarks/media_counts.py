"""Real pixels and clips through every shipped model's own processor, against the planner's counts.

The test suite asks the processors' functions of sizes (tests/unit/test_media_counts.py); here every image is made and
processed. Prints one line per folder, and exits with 1 if any count differs. About 40 images per second.

    python benchmarks/media_counts.py [--count 2000] [--longest 2000] [FOLDER ...]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from entrain_opt.errors import WorkloadError
from entrain_opt.runtime.families import read_family
from entrain_opt.workload.media import CombinedRule, MediaRule, PatchRowRule, SmartResizeRule, media_rule

MODELS = Path(__file__).parents[1] / "models"


def image_differences(folder: Path, count: int, longest: int) -> tuple[int, list[str]]:
    """(images that the processor refuses, differences in words)."""
    from transformers import AutoImageProcessor

    rule: MediaRule = media_rule(folder)
    image_rule = rule.image_rule if isinstance(rule, CombinedRule) else rule
    processor = AutoImageProcessor.from_pretrained(folder)
    fixed = read_family(folder).image_settings()
    rng = np.random.default_rng(0)
    sides = np.exp(rng.uniform(0, math.log(longest + 1), size=(count, 2))).astype(int).clip(1)
    refused, differences = 0, []
    for width, height in sides.tolist():
        try:
            size = rule.image(width, height)
        except WorkloadError:
            refused += 1
            continue
        made = processor(images=[Image.new("RGB", (width, height))], return_tensors="np", **fixed)["pixel_values"]
        if isinstance(image_rule, PatchRowRule):
            rows, expected = made.shape[2] * made.shape[3] // image_rule.patch_side**2, size.patches
        else:
            rows = made.shape[0] * made.shape[1] if made.ndim == 5 else made.shape[0]
            expected = size.patches if isinstance(image_rule, SmartResizeRule) else size.segments
        if rows != expected:
            differences.append(f"{width} x {height}: the processor makes {rows}, the rule says {expected}")
    return refused, differences


def audio_differences(folder: Path, count: int) -> tuple[int, list[str]]:
    """As `image_differences`, for clips of 0.1 to 60 seconds."""
    from transformers import AutoFeatureExtractor

    rule, extractor = media_rule(folder), AutoFeatureExtractor.from_pretrained(folder)
    rate = extractor.sampling_rate
    refused, differences = 0, []
    for seconds in np.exp(np.random.default_rng(0).uniform(math.log(0.1), math.log(60), count)).tolist():
        clip = np.zeros(int(seconds * rate), dtype=np.float32)
        made: Any = extractor(clip, sampling_rate=rate, padding="max_length", return_attention_mask=True)
        frames = int(np.sum(made["attention_mask"]))
        try:
            size = rule.audio(len(clip) / rate)
        except WorkloadError:
            refused += 1
            continue
        tokens = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        if (size.tokens, rule.audio_shape(len(clip) / rate)) != (tokens, (frames,)):
            differences.append(f"{len(clip)} samples: the processor makes {tokens}, the rule says {size.tokens}")
    return refused, differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="model folders (default: all shipped tiny ones)")
    parser.add_argument("--count", type=int, default=2000, help="media per folder")
    parser.add_argument("--longest", type=int, default=2000, help="longest side in pixels")
    arguments = parser.parse_args()
    from transformers import logging

    logging.set_verbosity_error()
    failed = False
    for folder in arguments.folders or sorted(MODELS.glob("tiny-*")):
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        started = time.perf_counter()
        if "image_processor_type" in settings:
            refused, differences = image_differences(folder, arguments.count, arguments.longest)
        else:
            refused, differences = audio_differences(folder, arguments.count)
        seconds = time.perf_counter() - started
        equal = arguments.count - refused - len(differences)
        print(f"{folder.name:24} {equal} equal, {refused} refused, {len(differences)} differ, {seconds:.0f} s")
        print("".join(f"  {difference}\n" for difference in differences[:5]), end="", flush=True)
        failed |= bool(differences)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
