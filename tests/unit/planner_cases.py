"""Small models, data and plans, built by hand, for the tests of costs and planner."""

from __future__ import annotations

import numpy as np

from entrain_opt.cost import CostModel
from entrain_opt.plan import ParallelDegrees, Plan, StagePlan
from entrain_opt.planner.partition import IMPOSSIBLE
from entrain_opt.spec import ClusterSpec, ModelSpec, ModuleSpec
from entrain_opt.workload import SampleTable


def make_model(
    *, frozen: tuple[str, ...] = (), tied: bool = False, vision_layers: int = 12, llm_layers: int = 6, scale: int = 1
) -> ModelSpec:
    """A tower of 12 layers and a language model of 6, both 192 wide (times scale)."""
    hidden, vocabulary = 192 * scale, 4096
    tower = "vision_tower" not in frozen
    vision = ModuleSpec(
        name="vision", num_layers=vision_layers, hidden_size=hidden, intermediate_size=4 * hidden,
        num_attention_heads=6 * scale, num_key_value_heads=6 * scale, head_size=32, gated_mlp=False,
        layer_parameters=12 * hidden**2, input_parameters=588 * hidden, output_parameters=2 * hidden**2,
        input_width=588, trained=tower, output_trained="projector" not in frozen,
    )  # fmt: skip
    trained = "language_model" not in frozen
    llm = ModuleSpec(
        name="llm", num_layers=llm_layers, hidden_size=hidden, intermediate_size=2 * hidden,
        num_attention_heads=6 * scale, num_key_value_heads=2 * scale, head_size=32, gated_mlp=True,
        layer_parameters=26 * hidden**2 // 3, input_parameters=vocabulary * hidden,
        output_parameters=hidden + (0 if tied else vocabulary * hidden), vocabulary_size=vocabulary,
        trained=trained, output_trained=trained,
    )  # fmt: skip
    return ModelSpec(
        name="hand-built", family="llava", encoders=(vision,), llm=llm, max_tokens=4096, tied_embeddings=tied
    )


def make_samples(count: int, *, seed: int = 0, spread: float = 1.0) -> SampleTable:
    """Samples with 0 to 3 images of 1 to 7 tiles of 64 patches, and texts of log-normal length."""
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 4, size=count)
    tiles = generator.integers(1, 8, size=int(images.sum()))
    text = np.ceil(60 * generator.lognormal(0, spread, size=count)).astype(np.int64)
    return SampleTable(
        sample_ids=np.array([f"s{i}" for i in range(count)], dtype=np.str_),
        text_tokens=text,
        label_tokens=np.maximum(text // 2, 1),
        media_offsets=np.concatenate([[0], np.cumsum(images)]).astype(np.int64),
        media_kind=np.zeros(len(tiles), dtype=np.int64),
        media_patches=64 * tiles,
        media_segments=tiles,
        media_tokens=64 * tiles,
    )


def make_costs(
    *, model: ModelSpec | None = None, devices: int = 1, device: str = "cpu", precision: str = "32-true"
) -> CostModel:
    cluster = ClusterSpec(device=device, devices_per_node=devices)
    return CostModel(model or make_model(), cluster, precision=precision)


def make_plan(stages: list[tuple[str, int, int, int]], *, data: int = 1, num_microbatches: int = 4) -> Plan:
    """Stages as (module, first layer, end, rank)."""
    built = tuple(StagePlan(module=m, layers=(first, end), rank=rank) for m, first, end, rank in stages)
    return Plan(
        model="hand-built",
        degrees=ParallelDegrees(data=data, pipeline=max(stage.rank for stage in built) + 1),
        stages=built,
        global_batch_size=16,
        num_microbatches=num_microbatches,
        policy="pairwise",
        schedule="1f1b",
    )


def segment_sums(layer_ticks: np.ndarray, module_of_layer: np.ndarray, stage_ticks: np.ndarray) -> np.ndarray:
    """[n + 1, n + 1] ticks of layers i to j - 1: their sum and, for every module among them, its stage's own part.

    Entries with j <= i are IMPOSSIBLE: every rank holds a layer.
    """
    num_layers = len(layer_ticks)
    prefix = np.concatenate([[0], np.cumsum(layer_ticks)])
    sums = prefix[None, :] - prefix[:, None]
    position = np.arange(num_layers + 1)
    for module, ticks in enumerate(stage_ticks):
        held = np.flatnonzero(module_of_layer == module)
        overlaps = (position[:, None] <= held[-1]) & (position[None, :] > held[0])
        sums = sums + np.where(overlaps, ticks, 0)
    return np.where(position[None, :] > position[:, None], sums, IMPOSSIBLE)
