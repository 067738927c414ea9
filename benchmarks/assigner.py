"""How evenly, how fast: the assigner's policies on heavy-tailed multimodal data.

    python benchmarks/assigner.py                      # synthetic samples, sizes drawn from log-normal distributions
    python benchmarks/assigner.py a.parquet b.parquet  # traces with the columns sample_id, image_sizes, text_words

For each data set the samples of one replica (128 in 32 microbatches by default) are drawn several times. Printed are
means over the draws: standard deviation over microbatches and max/mean of the forward time of each module (the sum of
its stages), the simulated iteration time and bubble, and the best of the milliseconds per call; then the milliseconds
for splitting 4,096 samples over 32 replicas. A policy that uses fewer microbatches has larger ones, so compare max/mean
as well as the deviation. Seconds come from counting the model's multiplications at a nominal speed, not from a
measurement; stages are split between the modules in proportion to their work. All policies see the same samples in the
same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from entrain_opt import ModelSpec, PipelineShape, simulate
from entrain_opt.assigner import POLICIES, assign_microbatches, sample_work, split_replicas
from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.spec import ModuleSpec
from entrain_opt.workload import SampleTable
from entrain_opt.workload.media import MediaRule, media_rule
from entrain_opt.workload.trace import read_trace

Result = TypeVar("Result")

NOMINAL_FLOPS_PER_SECOND = 75e12
HEADER = (
    "policy", "microbatches", "encoder std ms", "max/mean", "LLM std ms", "max/mean", "deferred", "makespan s",
    "bubble", "ms/call",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, help="trace Parquet files; none: synthetic samples")
    parser.add_argument("--model", default="models/qwen2_5-vit-llama3_2-3b", help="model folder")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--schedule", default="1f1b", help="order that is simulated; the paper's is 1f1b")
    parser.add_argument("--frozen-encoder", action="store_true")
    arguments = parser.parse_args()
    model, rule = ModelSpec.from_pretrained(arguments.model), media_rule(arguments.model)
    tables = {path.stem: read_trace(path, rule) for path in arguments.traces}
    for name, table in (tables or {"synthetic (log-normal sizes)": synthetic_samples(rule)}).items():
        report(name, batch_costs(table, model), arguments)


def report(name: str, costs: BatchCosts, arguments: argparse.Namespace) -> None:
    shape = proportional_shape(costs, arguments.stages, trained=not arguments.frozen_encoder)
    print(
        f"\n{name}: {costs.num_samples} samples, {arguments.samples} at a time in {arguments.microbatches} "
        f"microbatches, {shape.num_encoder_stages} encoder and {shape.llm_stages} LLM stages, mean of "
        f"{arguments.draws} draws\n"
    )
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER))
    for policy in POLICIES:
        rows = []
        for batch in draws(costs, arguments.samples, arguments.draws):
            call = partial(assign_microbatches, batch, shape, num_microbatches=arguments.microbatches, policy=policy)
            assignment, milliseconds = fastest(call)
            rows.append(
                [*balance(batch, assignment), *timing(batch, assignment, shape, arguments.schedule), milliseconds]
            )
        means = [*np.mean(rows, axis=0)[:-1], np.min(rows, axis=0)[-1]]
        print(f"| {policy} | " + " | ".join(f"{value:.3g}" for value in means) + " |")
    (large,) = draws(costs, 4096, 1)
    work = sample_work(large, shape)
    for policy in POLICIES:
        _, milliseconds = fastest(partial(split_replicas, work, num_replicas=32, policy=policy))
        print(f"4,096 samples over 32 replicas, {policy}: {milliseconds:.3g} ms")


def balance(costs: BatchCosts, assignment: Assignment) -> list[float]:
    """Microbatches, then spread of each module over them, then the share of samples deferred."""
    count = int(assignment.num_microbatches[0])
    placed = assignment.encoder_microbatch >= 0
    encoder = np.bincount(assignment.encoder_microbatch[placed], weights=costs.encoder_seconds[placed], minlength=count)
    llm = np.bincount(assignment.llm_microbatch, weights=costs.llm_seconds, minlength=count)
    spread = [number for load in (encoder, llm) for number in (1e3 * load.std(), load.max() / load.mean())]
    return [count, *spread, len(assignment.deferred_samples(costs)) / costs.num_samples]


def timing(costs: BatchCosts, assignment: Assignment, shape: PipelineShape, schedule: str) -> list[float]:
    timeline = simulate(costs, assignment, shape, schedule=schedule)
    return [timeline.makespan_seconds, timeline.bubble_share]


def fastest(call: Callable[[], Result], repeats: int = 3) -> tuple[Result, float]:
    """The result and the milliseconds of the fastest call."""
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
    return result, 1e3 * best


def draws(costs: BatchCosts, size: int, count: int) -> Iterator[BatchCosts]:
    """Random batches; small data sets are drawn from with repetition."""
    generator = np.random.default_rng(0)
    for _ in range(count):
        yield costs.take(generator.choice(costs.num_samples, size, replace=size > costs.num_samples))


def proportional_shape(costs: BatchCosts, num_stages: int, *, trained: bool) -> PipelineShape:
    """Stages in proportion to forward plus backward work, at least one each."""
    encoder, llm = costs.encoder_seconds.sum() * (3 if trained else 1), costs.llm_seconds.sum() * 3
    encoder_stages = int(np.clip(round(num_stages * encoder / (encoder + llm)), 1, num_stages - 1))
    return PipelineShape(encoder_stages=encoder_stages, llm_stages=num_stages - encoder_stages, encoder_trained=trained)


def batch_costs(table: SampleTable, model: ModelSpec) -> BatchCosts:
    """Forward seconds by counting multiplications."""
    encoder, tokens = model.encoders[0], table.total_tokens
    return BatchCosts(
        encoder_seconds=forward_seconds(encoder, table.media_patches, table.media_patches / table.media_segments),
        llm_seconds=forward_seconds(model.llm, tokens, tokens / 2),  # causal: half of the keys on average
        encoder_patches=table.media_patches,
        llm_tokens=tokens,
        media_offsets=table.media_offsets,
        media_tokens=table.media_tokens,
    )


def forward_seconds(module: ModuleSpec, tokens: np.ndarray, keys: np.ndarray) -> np.ndarray:
    width = module.num_attention_heads * module.head_size
    matrices = module.num_layers * module.layer_parameters + module.output_parameters
    return (2 * matrices * tokens + 4 * module.num_layers * width * tokens * keys) / NOMINAL_FLOPS_PER_SECOND


def synthetic_samples(rule: MediaRule, count: int = 8192) -> SampleTable:
    """0 to 3 images per sample of 0.5 megapixels in the median and texts of 120 tokens, both with a heavy tail."""
    generator = np.random.default_rng(0)
    media_counts = generator.choice([0, 1, 2, 3], size=count, p=[0.1, 0.7, 0.15, 0.05])
    pixels = np.minimum(5e5 * np.exp(1.1 * generator.standard_normal(media_counts.sum())), 2.5e7)
    aspect = np.exp(0.4 * generator.standard_normal(len(pixels)))
    sides = np.sqrt([pixels * aspect, pixels / aspect]).astype(int) + 1
    sizes = [rule.image(width, height) for width, height in sides.T.tolist()]
    text = np.ceil(120 * np.exp(1.2 * generator.standard_normal(count))).astype(np.int64)
    return SampleTable(
        sample_ids=np.arange(count).astype(np.str_),
        text_tokens=text,
        label_tokens=np.maximum(text // 2, 1),
        media_offsets=np.concatenate([[0], np.cumsum(media_counts)]),
        media_kind=np.zeros(len(sizes), dtype=np.int64),
        media_patches=np.array([size.patches for size in sizes]),
        media_segments=np.array([size.segments for size in sizes]),
        media_tokens=np.array([size.tokens for size in sizes]),
    )


if __name__ == "__main__":
    main()
