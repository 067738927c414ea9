"""Tiny models, batches and plans for multi-process tests, the plain single-process reference, and the comparison."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, SiglipVisionConfig

from entrain_opt.cost import CostModel
from entrain_opt.plan import ParallelDegrees, Plan, StagePlan
from entrain_opt.runtime.batches import RankBatchBuilder
from entrain_opt.runtime.executor import PipelineExecutor
from entrain_opt.runtime.gradients import GradientReducer
from entrain_opt.runtime.p2p import make_groups
from entrain_opt.runtime.stages import RankModel, build_rank_model, tied_stages
from entrain_opt.spec import ClusterSpec, ModelSpec
from entrain_opt.workload.chat import EncodedSample
from entrain_opt.workload.samples import SampleTable

#: Relative difference of losses, norms and gradients that float32 sums of another order make.
TOLERANCE = 1e-5
IMAGE_ID = 3
TILE_TOKENS = 4


def write_model(folder, *, tied=False, vision_feature_layer=-1, text_layers=3, vision_layers=4, dropout=0.0):
    """Write the config of a model of a few thousand parameters."""
    vision = SiglipVisionConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=vision_layers, num_attention_heads=2, image_size=28,
        patch_size=14, vision_use_head=False, attention_dropout=dropout,
    )  # fmt: skip
    text = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=text_layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=67, max_position_embeddings=512, tie_word_embeddings=tied, pad_token_id=0,
        attention_dropout=dropout,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision.to_dict(), text_config=text.to_dict(), image_token_id=IMAGE_ID, tie_word_embeddings=tied,
        vision_feature_layer=vision_feature_layer, vision_feature_select_strategy="full", image_seq_length=TILE_TOKENS,
    )  # fmt: skip
    config.architectures = ["LlavaForConditionalGeneration"]
    config.save_pretrained(folder)
    return Path(folder)


class SyntheticReader:
    """Random samples whose content depends on the row only: text-only, one image, several images of several tiles."""

    def __init__(self, tiles_per_sample, *, seed=0):
        self.tiles = tiles_per_sample
        self.seed = seed

    def _rng(self, row):
        return np.random.default_rng([self.seed, row])

    def pixels(self, row, item):
        rng = np.random.default_rng([self.seed, row, item])
        return torch.from_numpy(rng.standard_normal((self.tiles[row][item], 3, 28, 28)).astype(np.float32))

    def text(self, row):
        rng = self._rng(row)
        pieces, is_media = [], []
        for tiles in self.tiles[row]:
            words = rng.integers(4, 67, size=rng.integers(1, 5))
            pieces += [words, np.full(tiles * TILE_TOKENS, IMAGE_ID)]
            is_media += [np.zeros(len(words), bool), np.ones(tiles * TILE_TOKENS, bool)]
        words = rng.integers(4, 67, size=rng.integers(4, 20))
        ids = np.concatenate([*pieces, words]).astype(np.int64)
        media = np.concatenate([*is_media, np.zeros(len(words), bool)])
        labels = np.full(len(ids), -100, dtype=np.int64)
        answer = len(ids) - len(words) // 2
        labels[answer - 1 : -1] = ids[answer:]
        positions = np.flatnonzero(media)
        return EncodedSample(input_ids=ids, label_ids=labels, media_positions=positions, feature_positions=positions)

    def table(self):
        texts = [self.text(row) for row in range(len(self.tiles))]
        tiles = np.array([count for sample in self.tiles for count in sample], dtype=np.int64)
        return SampleTable(
            sample_ids=np.array([f"s{row}" for row in range(len(self.tiles))]),
            text_tokens=np.array([len(t.input_ids) - len(t.media_positions) for t in texts]),
            label_tokens=np.array([(t.label_ids != -100).sum() for t in texts]),
            media_offsets=np.concatenate([[0], np.cumsum([len(sample) for sample in self.tiles])]),
            media_kind=np.zeros(len(tiles), dtype=np.int64),
            media_patches=tiles * 4,
            media_segments=tiles,
            media_tokens=tiles * TILE_TOKENS,
        )


#: Ten samples: text-only, single-image and multi-image ones, with up to nine tiles.
MIXED_TILES = [[1], [], [3, 1], [2], [7], [], [1, 1, 2], [5], [4], [9]]

#: Layer ranges of the stages and the rank of each, for a model of 4 vision and 3 language-model layers.
SPLITS = {
    1: [("vision", (0, 4), 0), ("llm", (0, 3), 0)],
    2: [("vision", (0, 4), 0), ("llm", (0, 3), 1)],
    3: [("vision", (0, 2), 0), ("vision", (2, 4), 1), ("llm", (0, 3), 2)],
    "3-llm": [("vision", (0, 4), 0), ("llm", (0, 1), 1), ("llm", (1, 3), 2)],
}  # fmt: skip


def make_plan(
    folder, split, *, data=1, tensor=1, frozen=(), policy="pairwise", schedule="1f1b", num_microbatches=4,
    recompute=(), **fields
):  # fmt: skip
    stages = tuple(
        StagePlan(module=m, layers=layers, rank=rank, recompute=m in recompute) for m, layers, rank in split
    )  # fmt: skip
    return Plan(
        model=str(folder),
        degrees=ParallelDegrees(data=data, pipeline=1 + max(stage.rank for stage in stages), tensor=tensor),
        stages=stages,
        global_batch_size=10,
        num_microbatches=num_microbatches,
        schedule=schedule,
        policy=policy,
        frozen=tuple(frozen),
        **fields,
    )


@lru_cache
def rank_state(folder, stages, degrees, frozen, seed, dtype=torch.float32):
    """Groups and stages of this rank; plans that differ in policy or schedule only share them."""
    plan = Plan(
        model=folder, degrees=degrees, stages=stages, global_batch_size=8, num_microbatches=1, frozen=frozen
    )  # fmt: skip
    groups = make_groups(plan, tied_stages=tied_stages(folder, plan))
    model = build_rank_model(folder, plan, groups.pipeline_rank, seed=seed, dtype=dtype, tensor=groups.tensor)
    model.keep_masters()
    return (
        groups,
        model,
        ModelSpec.from_pretrained(folder, frozen=frozen),
    )


def run_pipeline(plan, reader, rows, *, seed=7, training=True, precision="32-true"):
    """Run one iteration on this rank. Returns its loss share, gradients by name, global norm, and rank batch."""
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    groups, shared, spec = rank_state(plan.model, plan.stages, plan.degrees, plan.frozen, seed, dtype)
    model = RankModel(shared.model, shared.family, plan, shared.stages, shared.tensor, shared.divided)
    model.masters, model.dropout_key = shared.masters, shared.dropout_key
    return run_model(model, reader, rows, groups=groups, spec=spec, training=training, precision=precision)


def run_model(model, reader, rows, *, groups=None, spec=None, training=True, precision="32-true"):
    """Run one iteration of a rank model; see `run_pipeline`."""
    plan = model.plan
    groups = groups or make_groups(plan)
    spec = spec or ModelSpec.from_pretrained(plan.model, frozen=plan.frozen)
    for parameter in model.optimized_parameters().values():
        parameter.grad = None
    builder = RankBatchBuilder(
        samples=reader.table(),
        reader=reader,
        family=model.family,
        plan=plan,
        cost_model=CostModel(spec, ClusterSpec(device="cpu")),
        replica=groups.replica,
        pipeline_rank=groups.pipeline_rank,
    )
    batch = builder.build(rows)
    reducer = GradientReducer(model, groups)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        result = PipelineExecutor(model, groups, reducer).run(batch, training=training)
    norm = float(reducer.global_norm()) if training else 0.0
    optimized = model.optimized_parameters()
    gradients = {name: p.grad.numpy().copy() for name, p in optimized.items() if p.grad is not None}
    notes = {"deferred": batch.deferred_samples, "agreement": batch.agreement, "shards": model.shards()}
    return float(result.loss), gradients, norm, notes


def reference(folder, reader, rows, *, frozen=(), seed=7, precision="32-true", prepare=None, state=None):
    """Loss and gradients of the plain model, one sample at a time, token-weighted over the global batch.

    Gradients of samples are summed in float32 under every precision. `prepare` changes the model before it takes
    `state` in place of the weights that the seed draws.
    """
    from transformers import AutoConfig

    whole = build_rank_model(folder, make_plan(folder, SPLITS[1], frozen=frozen), 0, seed=seed)
    state = state or {name: value.clone() for name, value in whole.model.state_dict().items()}
    model = LlavaForConditionalGeneration(AutoConfig.from_pretrained(folder))
    if prepare is not None:
        prepare(model)
    model.load_state_dict(state, strict=True)
    for name, parameter in model.named_parameters():
        if precision == "bf16-true":
            parameter.data = parameter.data.bfloat16()
        parameter.requires_grad_(whole.family.place(name).part not in frozen)
    gradients = {}
    texts = [reader.text(row) for row in rows]
    total = sum((t.label_ids != -100).sum() for t in texts)
    loss = 0.0
    for row, text in zip(rows, texts, strict=True):
        tiles = [reader.pixels(row, item) for item in range(len(reader.tiles[row]))]
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            share = model(
                input_ids=torch.from_numpy(text.input_ids)[None],
                pixel_values=torch.cat(tiles) if tiles else None,
                labels=torch.from_numpy(text.label_ids)[None],
                shift_labels=torch.from_numpy(text.label_ids)[None],
                num_items_in_batch=int(total),
            ).loss
        if share.requires_grad:
            share.backward()
        loss += share.item()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad.float().numpy()
                parameter.grad = None
    return loss, gradients


def freeze(model, family, frozen):
    """Switch off the gradients of a plain model's frozen parts."""
    for name, parameter in model.named_parameters():
        if family.place(name).part in frozen:
            parameter.requires_grad_(False)


def expected_gradients(model, inputs, texts):
    """Loss and gradients of any plain model, one sample at a time, token-weighted over all.

    Args:
        model: takes each of the `inputs` as keyword arguments; under `torch.no_grad` there are no gradients.
        inputs: of each sample.
        texts: encoded, whose labels count.
    """
    total = sum(text.num_label_tokens for text in texts)
    loss = 0.0
    for arguments, text in zip(inputs, texts, strict=True):
        logits = model(**arguments).logits[0]
        share = torch.nn.functional.cross_entropy(logits, torch.from_numpy(text.label_ids), reduction="sum") / total
        if share.requires_grad:
            share.backward()
        loss += share.item()
    return loss, {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def own_parts(values, shards):
    """What a device holds of whole arrays."""

    def part(name, value):
        shard = shards.get(name)
        if shard is None:
            return value
        return np.concatenate([value[shard.index(*ends)] for ends in shard.ranges], axis=shard.dim)

    return {name: part(name, value) for name, value in values.items()}


def assert_exact(expected, results, case=None):
    """Loss and norm are the plain model's, and every rank's gradients its parts of the plain model's.

    Args:
        expected: loss and gradients of the plain model.
        results: of each rank, as `run_model` returns them.
        case: told where they differ.
    """
    expected_loss, gradients = expected
    assert sum(result[0] for result in results) == pytest.approx(expected_loss, rel=TOLERANCE), case
    norm = np.sqrt(sum(float(np.linalg.norm(gradient)) ** 2 for gradient in gradients.values()))
    for _, found, found_norm, notes in results:
        owned = {name: gradient for name, gradient in gradients.items() if name in found}
        assert relative_error(found, own_parts(owned, notes["shards"])) < TOLERANCE, case
        assert found_norm == pytest.approx(norm, rel=TOLERANCE), case
    assert set(gradients) <= {name for _, found, *_ in results for name in found}, case


class ReaderWithTable:
    """A reader as `run_pipeline` takes it."""

    def __init__(self, reader, table):
        self.pixels, self.shapes, self.text = reader.pixels, reader.shapes, reader.text
        self.table = lambda: table


def relative_error(found, expected):
    """Largest error over all parameters, each relative to the norm of its own gradient.

    A missing gradient counts as zero. Softmax ignores a key bias: its gradient is zero in exact arithmetic and pure
    rounding here, so it is measured against the query bias of the same layer.
    """
    worst = 0.0
    for name in set(found) | set(expected):
        a, b = found.get(name), expected.get(name)
        a = np.zeros_like(b) if a is None else a
        b = np.zeros_like(a) if b is None else b
        scale = float(np.linalg.norm(expected.get(name.replace("k_proj.bias", "q_proj.bias"), b)))
        error = float(np.linalg.norm(a - b))
        worst = max(worst, error / scale if scale > 0 else error)
    return worst
