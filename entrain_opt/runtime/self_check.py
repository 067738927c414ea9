"""One training step of a tiny model over two processes, compared with the plain Hugging Face model in one.

1. A LLaVA of a few thousand parameters is written as a config; its weights are drawn from a seed.
2. Two gloo ranks on CPU (encoder on one, language model on the other) run one global batch of five samples through the
   real assigner, schedule, messages and executor.
3. Each rank runs the same samples through the plain model, one at a time, and compares its own gradients.

Promise: every process is ended when the check returns, also where it fails or takes too long; a failure is a result,
not an exception. Price: about ten seconds, nearly all of it start-up. Compiled code runs interpreted here (Numba
otherwise compiles for a minute on first use), which such small work does not notice.

Run by `entrain doctor` as `python -m entrain_opt.runtime.self_check REQUEST`, one process per rank.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from entrain_opt.runtime.children import run_together

#: Largest error of a gradient relative to its norm, and of the loss, in float32.
TOLERANCE = 1e-5
_NUM_RANKS, _SEED, _PLACEHOLDER, _WORDS, _SIDE, _TILE_TOKENS = 2, 7, 3, 67, 28, 4
#: Tiles of each image of each sample: text alone, one image, several of several sizes.
_TILES = ((1,), (), (3, 1), (2,), (1, 1))
_LAYERS = {"vision": 2, "llm": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfCheck:
    """What came out.

    Attributes:
        error: what failed, in words; None if everything agrees.
        loss: of the pipeline.
        plain_loss: of the plain model.
        largest_error: over all gradients, relative to each one's norm.
        num_gradients: compared.
        seconds: taken.
    """

    error: str | None
    seconds: float
    loss: float | None = None
    plain_loss: float | None = None
    largest_error: float | None = None
    num_gradients: int = 0


def run_self_check(timeout_seconds: float = 120.0) -> SelfCheck:
    """Run both ranks and compare; see the module.

    Args:
        timeout_seconds: after which the ranks are ended and the check has failed.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="entrain-doctor-") as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(_config()), encoding="utf-8")
        requests = [
            json.dumps({"folder": str(folder), "rank": rank, "timeout_seconds": timeout_seconds})
            for rank in range(_NUM_RANKS)
        ]
        error = run_together(
            "entrain_opt.runtime.self_check",
            requests,
            folder,
            timeout_seconds=timeout_seconds,
            environment={"NUMBA_DISABLE_JIT": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        seconds = time.monotonic() - started
        if error is not None:
            return SelfCheck(error=error, seconds=seconds)
        results = [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(_NUM_RANKS)]
    return judge(results, seconds)


def judge(results: list[dict[str, Any]], seconds: float) -> SelfCheck:
    plain_loss = results[0]["plain_loss"]
    loss = sum(result["loss"] for result in results)
    errors = {name: error for result in results for name, error in result["errors"].items()}
    missing = sorted(set(results[0]["trained"]) - set(errors))
    # What is not a number is worse than any.
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name], default="")
    problem = None
    if missing:
        problem = f"no rank has a gradient of {missing[0]} ({len(missing)} parameters)"
    elif not errors[worst] < TOLERANCE:
        problem = f"the gradient of {worst} differs by {errors[worst]:.1e}; expected less than {TOLERANCE:g}"
    elif not abs(loss - plain_loss) < TOLERANCE * abs(plain_loss):
        problem = f"the loss is {loss:.7f}, the plain model's {plain_loss:.7f}"
    return SelfCheck(
        error=problem,
        seconds=seconds,
        loss=loss,
        plain_loss=plain_loss,
        largest_error=errors.get(worst),
        num_gradients=len(errors),
    )


def _config() -> dict[str, Any]:
    sizes = {"num_attention_heads": 2, "intermediate_size": 48}
    return {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_id": _PLACEHOLDER,
        "image_token_index": _PLACEHOLDER,
        "image_seq_length": _TILE_TOKENS,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 24, "num_hidden_layers": _LAYERS["vision"],
            "image_size": _SIDE, "patch_size": _SIDE // 2, "vision_use_head": False, **sizes,
        },
        "text_config": {
            "model_type": "llama", "hidden_size": 32, "num_hidden_layers": _LAYERS["llm"], "num_key_value_heads": 2,
            "vocab_size": _WORDS, "max_position_embeddings": 128, "pad_token_id": 0, **sizes,
        },
    }  # fmt: skip


class _Samples:
    """Random samples; their content depends on the row only."""

    def __init__(self) -> None:
        import numpy as np

        from entrain_opt.workload.chat import EncodedSample
        from entrain_opt.workload.samples import SampleTable

        self.texts: list[Any] = []
        for row, tiles in enumerate(_TILES):
            rng = np.random.default_rng(row)
            pieces = [piece for count in tiles for piece in (rng.integers(4, _WORDS, 2), _image(count))]
            ids = np.concatenate([*pieces, rng.integers(4, _WORDS, 12)]).astype(np.int64)
            labels = np.full(len(ids), -100, dtype=np.int64)
            labels[-7:-1] = ids[-6:]
            at = np.flatnonzero(ids == _PLACEHOLDER)
            self.texts.append(EncodedSample(input_ids=ids, label_ids=labels, media_positions=at, feature_positions=at))
        flat = np.array([count for tiles in _TILES for count in tiles], dtype=np.int64)
        self.table = SampleTable(
            sample_ids=np.array([f"sample {row}" for row in range(len(_TILES))]),
            text_tokens=np.array([text.num_text_tokens for text in self.texts]),
            label_tokens=np.array([text.num_label_tokens for text in self.texts]),
            media_offsets=np.concatenate([[0], np.cumsum([len(tiles) for tiles in _TILES])]),
            media_kind=np.zeros(len(flat), dtype=np.int64),
            media_patches=flat * _TILE_TOKENS,
            media_segments=flat,
            media_tokens=flat * _TILE_TOKENS,
        )

    def pixels(self, row: int, item: int) -> Any:
        import torch

        generator = torch.Generator().manual_seed(1000 * row + item)
        return torch.randn((_TILES[row][item], 3, _SIDE, _SIDE), generator=generator)

    def shapes(self, row: int) -> list[tuple[int, ...]]:
        return [(_SIDE, _SIDE)] * len(_TILES[row])

    def text(self, row: int) -> Any:
        return self.texts[row]


def _image(tiles: int) -> Any:
    import numpy as np

    return np.full(tiles * _TILE_TOKENS, _PLACEHOLDER)


def _run_rank(folder: Path, rank: int, timeout_seconds: float) -> dict[str, Any]:
    """One rank of the pipeline, and the plain model beside it."""
    from entrain_opt.cost import CostModel
    from entrain_opt.plan import ParallelDegrees, Plan, StagePlan
    from entrain_opt.spec import ClusterSpec, ModelSpec

    # What needs no torch comes first: a broken installation fails early.
    cost_model = CostModel(ModelSpec.from_pretrained(folder), ClusterSpec(device="cpu"))
    stages = [StagePlan(module=name, layers=(0, count), rank=r) for r, (name, count) in enumerate(_LAYERS.items())]
    plan = Plan(
        model=str(folder), degrees=ParallelDegrees(pipeline=_NUM_RANKS), stages=tuple(stages), schedule="1f1b",
        policy="pairwise", global_batch_size=len(_TILES), num_microbatches=3,
    )  # fmt: skip
    samples = _Samples()
    import torch
    import torch.distributed as dist

    from entrain_opt.runtime.batches import RankBatchBuilder
    from entrain_opt.runtime.executor import PipelineExecutor
    from entrain_opt.runtime.gradients import GradientReducer
    from entrain_opt.runtime.p2p import make_groups
    from entrain_opt.runtime.stages import build_rank_model

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), _NUM_RANKS)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_NUM_RANKS, timeout=timeout)
    groups = make_groups(plan, timeout_seconds=timeout_seconds)
    model = build_rank_model(folder, plan, groups.pipeline_rank, seed=_SEED)
    builder = RankBatchBuilder(
        samples=samples.table,
        reader=samples,
        family=model.family,
        plan=plan,
        cost_model=cost_model,
        replica=0,
        pipeline_rank=rank,
    )
    reducer = GradientReducer(model, groups)
    result = PipelineExecutor(model, groups, reducer).run(builder.build(range(len(_TILES))), training=True)
    plain_loss, expected = _plain_gradients(folder, plan, samples)
    found = {name: parameter.grad for name, parameter in reducer.named_parameters().items()}
    dist.barrier()
    dist.destroy_process_group()
    return {
        "loss": float(result.loss),
        "plain_loss": plain_loss,
        "trained": sorted(expected),
        "errors": {
            name: _relative_error(gradient, expected, name) for name, gradient in found.items() if name in expected
        },
    }


def _relative_error(gradient: Any, expected: dict[str, Any], name: str) -> float:
    # Softmax ignores a key bias: its gradient is rounding alone, so the query bias beside it is the measure.
    scale = expected[name.replace("k_proj.bias", "q_proj.bias")].norm()
    return float((gradient - expected[name]).norm() / scale)


def _plain_gradients(folder: Path, plan: Any, samples: _Samples) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of the plain model, one sample at a time."""
    from dataclasses import replace

    import torch

    from entrain_opt.plan import ParallelDegrees
    from entrain_opt.runtime.families import read_family
    from entrain_opt.runtime.stages import build_rank_model

    stages = tuple(replace(stage, rank=0) for stage in plan.stages)
    alone = replace(plan, degrees=ParallelDegrees(), stages=stages)
    whole = build_rank_model(folder, alone, 0, seed=_SEED)
    # A config of its own: the pipeline's asks for packed attention.
    model = read_family(folder).new_model().eval()
    model.load_state_dict(whole.model.state_dict(), strict=True)
    total, loss = int(samples.table.label_tokens.sum()), 0.0
    for row, tiles in enumerate(_TILES):
        pixels = [samples.pixels(row, item) for item in range(len(tiles))]
        text = samples.text(row)
        logits = model(
            input_ids=torch.from_numpy(text.input_ids)[None], pixel_values=torch.cat(pixels) if pixels else None
        ).logits[0]
        labels = torch.from_numpy(text.label_ids)
        share = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / total
        share.backward()
        loss += share.item()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    """One rank: the request is the argument, the result a file."""
    request = json.loads(sys.argv[1])
    folder, rank = Path(request["folder"]), int(request["rank"])
    result = _run_rank(folder, rank, float(request["timeout_seconds"]))
    (folder / f"result{rank}.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
