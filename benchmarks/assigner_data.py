"""What the assigner's benchmark runs on: traces, mixtures of them, models, and pipelines with equal memory.

A trace has one row per sample: `image_sizes`, `audio_seconds`, `video_frames` and `text_words`; no text, no media. What
the encoder computes on and the language model sees:

- image: what the model's own processor makes of it;
- audio: 50 patches and 25 tokens a second, as Whisper's encoder and a pooling of two;
- video: one frame of 30, at most 64, each with 256 patches that attend to each other and 64 tokens;
- text: 1.3 tokens a word.

Seconds come from counting multiplications at a nominal speed, not from a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from entrain_opt import ModelSpec, PipelineShape
from entrain_opt.assignment import BatchCosts
from entrain_opt.cost.attention import mean_squares
from entrain_opt.spec import ModuleSpec
from entrain_opt.workload import SampleTable
from entrain_opt.workload.media import MediaRule, MediaSize, media_rule
from entrain_opt.workload.samples import MEDIA_KINDS

MODELS_FOLDER = Path(__file__).parents[1] / "models"
#: Language models by size; all have Qwen2.5-VL's vision tower.
MODELS = ("1B", "3B", "8B")
MIXTURES: Mapping[str, tuple[str, ...]] = {
    "documents (mix)": ("docs_sections", "textbook_interleaved", "historical_pages"),
    "everything (mix)": (
        "coco_captions", "docs_sections", "math_vision", "textbook_figures", "librispeech", "nextqa_video",
    ),
}  # fmt: skip

NOMINAL_FLOPS_PER_SECOND = 75e12
TOKENS_PER_WORD = 1.3
AUDIO_PATCHES_PER_SECOND, AUDIO_TOKENS_PER_SECOND = 50, 25
FRAMES_PER_SAMPLED_FRAME, MOST_FRAMES, FRAME_PATCHES, FRAME_TOKENS = 30, 64, 256, 64

#: The paper's microbatches hold this many samples; memory is counted in their mean sizes.
SAMPLES_PER_MICROBATCH = 4
#: Microbatches that a rank may hold, beyond one for each rank from it to the end.
SPARE_MICROBATCHES = 4
#: Samples from which the ranks' parts of the modules follow, and the least part of its work that a rank has of one.
_SAMPLES_FOR_STAGES, _LEAST_PART = 2000, 0.02


def read_model(size: str) -> ModelSpec:
    """The model of one of `MODELS`."""
    folder = MODELS_FOLDER / f"qwen2_5-vit-llama3_2-{size.lower()}"
    if folder.exists() or size != "8B":
        return ModelSpec.from_pretrained(folder)
    return with_llama_8b(read_model("3B"))


def with_llama_8b(model: ModelSpec) -> ModelSpec:
    """The same encoder with a language model of the size of Llama-3.1-8B."""
    layers, hidden, inner, heads, key_value_heads, head, vocabulary = 32, 4096, 14336, 32, 8, 128, 128256
    attention = hidden * head * (2 * heads + 2 * key_value_heads)
    llm = replace(
        model.llm,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_size=head,
        layer_parameters=attention + 3 * hidden * inner + 2 * hidden,
        input_parameters=vocabulary * hidden,
        output_parameters=hidden + vocabulary * hidden,
    )
    (encoder,) = model.encoders
    # The projector's last matrix is wider: four merged patches, with a bias.
    wider = (hidden - model.llm.hidden_size) * (4 * encoder.hidden_size + 1)
    encoder = replace(encoder, output_parameters=encoder.output_parameters + wider)
    return replace(model, name="qwen2_5-vit-llama3_1-8b", encoders=(encoder,), llm=llm, tied_embeddings=False)


def read_tables(folder: Path) -> dict[str, SampleTable]:
    """All traces of a folder by name.

    Raises:
        SystemExit: there is none.
    """
    rule = media_rule(MODELS_FOLDER / "qwen2_5-vit-llama3_2-3b")
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise SystemExit(f"--traces: expected Parquet files in {folder}, found none.")
    return {path.stem: read_table(path, rule) for path in paths}


def read_table(path: Path, rule: MediaRule) -> SampleTable:
    """A trace of images, audio and video, as the model would see it."""
    import pyarrow.parquet as pq

    rows = pq.read_table(path).to_pylist()
    kinds: list[str] = []
    sizes: list[MediaSize] = []
    counts = []
    for row in rows:
        media = [("image", rule.image(int(width), int(height))) for width, height in row["image_sizes"] or ()]
        if row.get("audio_seconds"):
            media.append(("audio", audio_size(row["audio_seconds"])))
        if row.get("video_frames"):
            media.append(("video", video_size(row["video_frames"])))
        kinds += [kind for kind, _ in media]
        sizes += [size for _, size in media]
        counts.append(len(media))
    text = np.array([max(1, math.ceil(TOKENS_PER_WORD * row["text_words"])) for row in rows])
    ids = np.array([row["sample_id"] for row in rows], dtype=np.str_)
    return make_table(ids, text, counts, kinds, sizes)


def audio_size(seconds: float) -> MediaSize:
    patches, tokens = (max(1, int(rate * seconds)) for rate in (AUDIO_PATCHES_PER_SECOND, AUDIO_TOKENS_PER_SECOND))
    return MediaSize(patches=patches, segments=1, tokens=tokens)


def video_size(frames: int) -> MediaSize:
    sampled = min(MOST_FRAMES, max(1, frames // FRAMES_PER_SAMPLED_FRAME))
    return MediaSize(patches=FRAME_PATCHES * sampled, segments=sampled, tokens=FRAME_TOKENS * sampled)


def synthetic_table(count: int = 8192) -> SampleTable:
    """0 to 3 images per sample of 0.5 megapixels in the median and texts of 120 tokens, both with a heavy tail."""
    rule, generator = media_rule(MODELS_FOLDER / "qwen2_5-vit-llama3_2-3b"), np.random.default_rng(0)
    counts = generator.choice([0, 1, 2, 3], size=count, p=[0.1, 0.7, 0.15, 0.05])
    pixels = np.minimum(5e5 * np.exp(1.1 * generator.standard_normal(counts.sum())), 2.5e7)
    aspect = np.exp(0.4 * generator.standard_normal(len(pixels)))
    sides = np.sqrt([pixels * aspect, pixels / aspect]).astype(int) + 1
    sizes = [rule.image(width, height) for width, height in sides.T.tolist()]
    text = np.ceil(120 * np.exp(1.2 * generator.standard_normal(count))).astype(np.int64)
    return make_table(np.arange(count).astype(np.str_), text, counts.tolist(), ["image"] * len(sizes), sizes)


def make_table(
    ids: NDArray[np.str_], text: NDArray[np.int64], counts: list[int], kinds: list[str], sizes: list[MediaSize]
) -> SampleTable:
    table = SampleTable(
        sample_ids=ids,
        text_tokens=text,
        label_tokens=np.maximum(text // 2, 1),
        media_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        media_kind=np.array([MEDIA_KINDS.index(kind) for kind in kinds], dtype=np.int64),
        media_patches=np.array([size.patches for size in sizes], dtype=np.int64),
        media_segments=np.array([size.segments for size in sizes], dtype=np.int64),
        media_tokens=np.array([size.tokens for size in sizes], dtype=np.int64),
    )
    table.check()
    return table


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Samples to draw from: each draw takes one of the parts, all equally often, then one of its samples.

    Attributes:
        name: of the trace or mixture.
        parts: one table for a trace, several for a mixture.
    """

    name: str
    parts: tuple[SampleTable, ...]

    def draw(self, model: ModelSpec, size: int, count: int, seed: int) -> Iterator[BatchCosts]:
        """Random batches; a trace smaller than a batch is drawn from with repetition."""
        generator = np.random.default_rng(seed)
        costs = [batch_costs(part, model) for part in self.parts]
        for _ in range(count):
            if len(costs) == 1:
                available = costs[0].num_samples
                yield costs[0].take(generator.choice(available, size, replace=size > available))
            else:
                picks = generator.integers(0, len(costs), size)
                rows = [int(generator.integers(costs[part].num_samples)) for part in picks]
                yield join([costs[part].take([row]) for part, row in zip(picks, rows, strict=True)])


def make_sources(tables: Mapping[str, SampleTable]) -> list[Source]:
    """Each trace, and each mixture whose parts are all there."""
    sources = [Source(name=name, parts=(table,)) for name, table in tables.items()]
    for name, parts in MIXTURES.items():
        if set(parts) <= set(tables):
            sources.append(Source(name=name, parts=tuple(tables[part] for part in parts)))
    return sources


def join(costs: Sequence[BatchCosts]) -> BatchCosts:
    """One batch of the samples of several."""

    def columns(name: str) -> NDArray[np.int64]:
        return np.concatenate([getattr(each, name) for each in costs])

    counts = np.concatenate([np.diff(each.media_offsets) for each in costs])
    return BatchCosts(
        encoder_seconds=columns("encoder_seconds"),
        llm_seconds=columns("llm_seconds"),
        encoder_patches=columns("encoder_patches"),
        llm_tokens=columns("llm_tokens"),
        media_offsets=np.concatenate([[0], np.cumsum(counts)]),
        media_tokens=columns("media_tokens"),
    )


def batch_costs(table: SampleTable, model: ModelSpec) -> BatchCosts:
    """Forward seconds by counting multiplications."""
    encoder, tokens = model.encoders[0], table.total_tokens
    squares = table.media_segments * mean_squares(encoder, table.media_patches / table.media_segments)
    return BatchCosts(
        encoder_seconds=forward_seconds(encoder, table.media_patches, squares),
        llm_seconds=forward_seconds(model.llm, tokens, mean_squares(model.llm, tokens) / 2),  # causal: half of the keys
        encoder_patches=table.media_patches,
        llm_tokens=tokens,
        media_offsets=table.media_offsets,
        media_tokens=table.media_tokens,
    )


def forward_seconds(module: ModuleSpec, tokens: NDArray[np.int64], squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of all layers.

    Args:
        module: the layers.
        tokens: [n] of each item.
        squares: [n] query-key pairs of one layer, in the mean over layers.
    """
    width = module.num_attention_heads * module.head_size
    matrices = module.num_layers * module.layer_parameters + module.output_parameters
    return (2 * matrices * tokens + 4 * module.num_layers * width * squares) / NOMINAL_FLOPS_PER_SECOND


@dataclass(frozen=True, kw_only=True, slots=True)
class EvenPipeline:
    """Pipeline ranks of equal work. The rank on the border has the encoder's end and the language model's beginning.

    Attributes:
        shape: its stages, memory not limited.
        shares: of its module's work that each stage has.
    """

    shape: PipelineShape
    shares: tuple[float, ...]

    @classmethod
    def of(cls, source: Source, model: ModelSpec, num_ranks: int, *, trained: bool) -> EvenPipeline:
        """Ranks that are even over many samples of a source; in a single batch its samples decide."""
        (costs,) = source.draw(model, _SAMPLES_FOR_STAGES, 1, seed=99)
        encoder, llm = costs.encoder_seconds.sum() * (3 if trained else 1), costs.llm_seconds.sum() * 3
        encoder_ranks = num_ranks * encoder / (encoder + llm)
        whole, part = int(encoder_ranks), encoder_ranks % 1
        if whole and part < _LEAST_PART:
            encoder_ranks = whole
        elif part > 1 - _LEAST_PART:
            encoder_ranks = whole + 1
        # What each rank has of either module, in ranks' work.
        of_encoder = np.clip(encoder_ranks - np.arange(num_ranks), 0, 1)
        encoder_on, llm_on = np.flatnonzero(of_encoder > 0), np.flatnonzero(of_encoder < 1)
        shape = PipelineShape(
            encoder_stages=len(encoder_on),
            llm_stages=len(llm_on),
            encoder_trained=trained,
            stage_ranks=(*encoder_on.tolist(), *llm_on.tolist()),
        )
        shares = (of_encoder[encoder_on] / encoder_ranks, (1 - of_encoder[llm_on]) / (num_ranks - encoder_ranks))
        return cls(shape=shape, shares=tuple(np.concatenate(shares).tolist()))

    def with_stages(self, costs: BatchCosts, split_share: float = 0.0) -> BatchCosts:
        """The same samples with the seconds of each stage.

        Args:
            costs: of whole modules.
            split_share: what splitting a backward adds to it, as a part of it.
        """
        even, encoder_stages = costs.stage_costs(self.shape), self.shape.num_encoder_stages
        counts = [encoder_stages] * encoder_stages + [self.shape.llm_stages] * self.shape.llm_stages
        forward, backward = (
            tuple(share * count * seconds for share, count, seconds in zip(self.shares, counts, each, strict=True))
            for each in (even.forward_seconds, even.backward_seconds)
        )
        prices = (split_share,) * self.shape.num_stages
        stages = replace(even, forward_seconds=forward, backward_seconds=backward, split_share=prices)
        return replace(costs, stages=stages)

    def with_memory(self, costs: BatchCosts) -> PipelineShape:
        """The same memory for every policy: what microbatches of the mean size need, and room for the largest sample.

        Rank r of R may hold R - r + `SPARE_MICROBATCHES` microbatches of `SAMPLES_PER_MICROBATCH` samples.
        """
        microbatches = costs.num_samples / SAMPLES_PER_MICROBATCH
        patches = np.bincount(costs.media_sample, weights=costs.patches, minlength=costs.num_samples)
        ranks, first_llm = self.shape.ranks_of_stages, self.shape.num_encoder_stages

        def limits(amounts: NDArray[np.float64], ranks: Sequence[int]) -> tuple[int, ...]:
            mean, largest = float(amounts.sum()) / microbatches, max(int(amounts.max()), 1)
            return tuple(max(largest, math.ceil(mean * (self.shape.num_ranks - r + SPARE_MICROBATCHES))) for r in ranks)

        return replace(
            self.shape,
            patches_in_flight=limits(patches, ranks[:first_llm]),
            tokens_in_flight=limits(costs.tokens.astype(np.float64), ranks[first_llm:]),
        )
