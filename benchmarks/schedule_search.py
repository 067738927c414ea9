"""By how much the schedule search beats the best fixed order.

    python benchmarks/schedule_search.py                      # synthetic heavy-tailed samples
    python benchmarks/schedule_search.py a.parquet b.parquet  # traces with the columns image_sizes and text_words

Each data set is drawn several times; a draw is one replica's samples, spread by the named assigner policy over its
microbatches. Costs are simple numbers made in this script, not measurements: a patch is 28 x 28 pixels (at most 4096
per image), a language-model token is a patch group of 4 or three quarters of a word, and both modules cost a linear and
a quadratic part. Stages are split so that both modules' stages carry about equal work. Memory holds the given number of
average microbatches per stage (but always what one language-model microbatch needs), or is unlimited.

Printed per data set, means over the draws: the makespan of each fixed order and of the search relative to the work
bound (1.00 cannot be beaten), the gain of the search over the best fixed order, and seconds per search.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from entrain_opt.assigner import assign_microbatches
from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule import FIXED_ORDERS, replica_work
from entrain_opt.schedule.search import search_schedule
from entrain_opt.simulator import simulate
from entrain_opt.simulator.bounds import work_bound

PATCH_PIXELS = 28 * 28
MOST_PATCHES = 4096


def synthetic(rng: np.random.Generator, count: int) -> tuple[list[list[int]], np.ndarray]:
    """Patches of each image of each sample, and words; log-normal, a fifth of the samples without an image."""
    images = [
        np.minimum(rng.lognormal(6, 1, rng.integers(1, 4)), MOST_PATCHES).astype(int).tolist()
        if rng.random() < 0.8
        else []
        for _ in range(count)
    ]
    return images, np.maximum(rng.lognormal(4.5, 1.2, count).astype(int), 1)


def read_columns(path: Path) -> tuple[list[list[int]], np.ndarray]:
    """The same of a trace."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(path, columns=["image_sizes", "text_words"])
    images = [
        [min(max(width * height // PATCH_PIXELS, 1), MOST_PATCHES) for width, height in sizes or []]
        for sizes in table.column("image_sizes").to_pylist()
    ]
    return images, np.maximum(np.array(table.column("text_words").to_pylist(), dtype=np.int64), 1)


def make_costs(images: list[list[int]], words: np.ndarray) -> BatchCosts:
    patches = np.array([p for row in images for p in row], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in images])]).astype(np.int64)
    media_tokens = np.maximum(patches // 4, 1)
    owner = np.repeat(np.arange(len(images)), np.diff(offsets))
    tokens = np.bincount(owner, weights=media_tokens, minlength=len(images)).astype(np.int64) + 4 * words // 3 + 1
    return BatchCosts(
        encoder_seconds=1e-6 * (patches + patches**2 / 4096),
        llm_seconds=4e-6 * (tokens + tokens**2 / 8192),
        encoder_patches=patches,
        llm_tokens=tokens,
        media_offsets=offsets,
        media_tokens=media_tokens,
    )


def make_shape(costs: BatchCosts, num_ranks: int, *, trained: bool) -> PipelineShape:
    """Stages in proportion to the work of the modules."""
    encoder = costs.encoder_seconds.sum() * (3 if trained else 1)
    share = encoder / (encoder + 3 * costs.llm_seconds.sum())
    stages = int(np.clip(round(num_ranks * share), 1, num_ranks - 1)) if costs.num_media else 0
    return PipelineShape(encoder_stages=stages, llm_stages=num_ranks - stages, encoder_trained=trained)


def with_limits(
    costs: BatchCosts, assignment: Assignment, shape: PipelineShape, in_flight: float | None
) -> PipelineShape:
    if in_flight is None:
        return shape
    share = in_flight / int(assignment.num_microbatches[0])
    needed = np.bincount(assignment.llm_microbatch[costs.media_sample], weights=costs.patches, minlength=1).max()
    return replace(
        shape,
        patches_in_flight=int(max(share * costs.patches.sum(), needed)),
        tokens_in_flight=int(share * costs.tokens.sum()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--microbatches", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--policy", default="pairwise")
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--in-flight", type=float, default=6.0, help="microbatches that memory holds; 0 for unlimited")
    parser.add_argument("--frozen", action="store_true", help="freeze the encoder")
    parser.add_argument("--no-split", action="store_true", help="never split backwards")
    arguments = parser.parse_args()
    names = [name for name in FIXED_ORDERS if not (arguments.no_split and name == "zero_bubble")]
    print(
        f"{'data':>22} {'E+L':>5} " + " ".join(f"{name:>11}" for name in names) + f" {'search':>7} {'gain':>7} {'s':>6}"
    )
    for path in arguments.traces or [None]:
        rng = np.random.default_rng(0)
        images, words = synthetic(rng, 4096) if path is None else read_columns(path)
        rows = []
        for _ in range(arguments.draws):
            drawn = rng.choice(len(words), arguments.samples, replace=len(words) < arguments.samples)
            costs = make_costs([images[i] for i in drawn], words[drawn])
            shape = make_shape(costs, arguments.ranks, trained=not arguments.frozen)
            assignment = assign_microbatches(
                costs, shape, num_microbatches=arguments.microbatches, policy=arguments.policy
            )
            shape = with_limits(costs, assignment, shape, arguments.in_flight or None)
            bound = work_bound(costs, assignment, shape, split_backward=not arguments.no_split)
            spans = [simulate(costs, assignment, shape, schedule=name).makespan_seconds / bound for name in names]
            start = time.perf_counter()
            found = search_schedule(
                replica_work(costs, assignment, shape, 0),
                shape,
                costs=costs,
                evaluations=arguments.evaluations,
                split_backward=not arguments.no_split,
            )
            seconds = time.perf_counter() - start
            span = simulate(costs, assignment, shape, schedule=found).makespan_seconds / bound
            rows.append([*spans, span, 100 * found.gain, seconds])
        mean = np.mean(rows, axis=0)
        name = "synthetic" if path is None else path.stem
        print(f"{name:>22} {shape.num_encoder_stages}+{shape.llm_stages:<3} "
              + " ".join(f"{value:>11.3f}" for value in mean[:-3])
              + f" {mean[-3]:>7.3f} {mean[-2]:>5.1f} % {mean[-1]:>6.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
