"""Keys that attention looks at: formulas against masks built entry by entry, and against what torch counts."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_cases import make_model

from entrain_opt.cost.analytic import layer_matmul_parameters, layer_square_flops
from entrain_opt.cost.attention import attended_squares, both_ways_squares, mean_squares
from entrain_opt.cost.features import module_features
from entrain_opt.cost.lines import Line
from entrain_opt.spec import ModelSpec
from entrain_opt.spec.model import AttentionWindow, LayerKind
from entrain_opt.workload import SampleTable
from entrain_opt.workload.samples import MEDIA_KINDS

MODELS = Path(__file__).resolve().parents[2] / "models"


def causal_pairs(length: int, window: int | None, runs: list[range] = ()) -> int:
    """Entries of a causal mask, with runs of tokens that see each other in both directions."""
    query, key = np.mgrid[:length, :length]
    mask = (key <= query) & (query - key < (window or length))
    for run in runs:
        mask |= np.isin(query, run) & np.isin(key, run)
    return int(mask.sum())


def square_pairs(columns: int, rows: int, side: int) -> int:
    """Pairs of patches of a picture that lie in the same square."""
    y, x = (index.ravel() // side for index in np.mgrid[:rows, :columns])
    return int(((y[:, None] == y) & (x[:, None] == x)).sum())


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 70))
def test_sliding_windows(length, window):
    squares = attended_squares(length, AttentionWindow(shape="sliding", keys=window))
    assert squares == 2 * causal_pairs(length, window) - length
    assert attended_squares(length, None) == 2 * causal_pairs(length, None) - length


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 70))
def test_blocks(length, block):
    number = np.arange(length) // block
    pairs = int((number[:, None] == number).sum())
    assert attended_squares(length, AttentionWindow(shape="blocks", keys=block)) == pairs


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 9))
def test_squares_of_pictures(columns, rows, side):
    squares = attended_squares(columns * rows, AttentionWindow(shape="squares", keys=side**2))
    pairs = square_pairs(columns, rows, side)
    if columns == rows:
        assert squares == pytest.approx(pairs)
    # Never more than whole squares, never less than one patch a query.
    assert columns * rows <= round(float(squares), 6) <= columns * rows * side**2
    if columns % side == rows % side == 0 and columns == rows:
        assert squares == pytest.approx(columns * rows * side**2)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 20), st.one_of(st.none(), st.integers(1, 60)))
def test_runs_that_see_both_ways(before, run, after, keys):
    window = None if keys is None else AttentionWindow(shape="sliding", keys=keys)
    length = before + run + after
    squares = attended_squares(length, window) + both_ways_squares(run, window)
    assert squares == 2 * causal_pairs(length, keys, [range(before, before + run)]) - length


def table(patches, segments, tokens, text, *, kind: str = "image") -> SampleTable:
    """One sample per media item."""
    count = len(patches)
    return SampleTable(
        sample_ids=np.array([f"s{i}" for i in range(count)], dtype=np.str_),
        text_tokens=np.array(text), label_tokens=np.array(text), media_offsets=np.arange(count + 1),
        media_kind=np.full(count, MEDIA_KINDS.index(kind)), media_patches=np.array(patches),
        media_segments=np.array(segments), media_tokens=np.array(tokens),
    )  # fmt: skip


def test_layers_that_differ_add_up_to_the_module():
    model = make_model()
    spec = {"parameters": 1, "active_parameters": 1, "intermediate_size": 4}
    kinds = (
        LayerKind(name="window", layers=tuple(i for i in range(12) if i % 4 != 3), **spec,
                  window=AttentionWindow(shape="squares", keys=16)),
        LayerKind(name="full", layers=(3, 7, 11), **spec),
    )  # fmt: skip
    model = replace(model, encoders=(replace(model.encoders[0], layer_kinds=kinds),))
    samples = table([64, 144, 2 * 64], [1, 1, 2], [16, 36, 32], [5, 6, 7], kind="video")
    item = module_features(samples, model)["vision"]
    window, full = np.array([64 * 16, 144 * 16, 2 * 64 * 16]), np.array([64**2, 144**2, 2 * 64**2])
    np.testing.assert_allclose(item.squares, (9 * window + 3 * full) / 12)
    np.testing.assert_allclose(item.squares_of((0, 3)), window)
    np.testing.assert_allclose(item.squares_of((3, 4)), full)
    line = Line(square_seconds=1e-9, token_seconds=1e-6, segment_seconds=1e-5)
    parts = [item.layer_seconds(line.scaled(end - first), (first, end)) for first, end in ((0, 2), (2, 7), (7, 12))]
    np.testing.assert_allclose(sum(parts), item.layer_seconds(line.scaled(12)))
    np.testing.assert_allclose(mean_squares(model.encoders[0], [64.0, 144.0]), item.squares[:2])


def test_language_models_with_sliding_layers_and_pictures_both_ways():
    model = make_model()
    spec = {"parameters": 1, "active_parameters": 1, "intermediate_size": 4}
    kinds = (
        LayerKind(name="sliding", layers=(0, 1, 3, 4), **spec, window=AttentionWindow(shape="sliding", keys=10)),
        LayerKind(name="full", layers=(2, 5), **spec),
    )
    samples = table([16, 32], [1, 2], [8, 16], [20, 3])
    llm = replace(model.llm, layer_kinds=kinds, bidirectional_media=True)
    squares = module_features(samples, replace(model, llm=llm))["llm"].squares
    for sample, (length, runs) in enumerate(((28, [range(5, 13)]), (19, [range(1, 9), range(10, 18)]))):
        pairs = 4 * causal_pairs(length, 10, runs) + 2 * causal_pairs(length, None, runs)
        assert squares[sample] == pytest.approx((2 * pairs - 6 * length) / 6)


def flops_of(run) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_operations_of_a_tower_with_windows_are_those_that_torch_counts(tmp_path):
    import torch
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    vision = {"depth": 5, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 24,
              "window_size": 56, "fullatt_block_indexes": [1, 4]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "vision_config": vision}))
    spec = ModelSpec.from_pretrained(tmp_path)
    # The counter does not know the fused attention of CPUs.
    made = Qwen2_5_VLVisionConfig(**vision)
    tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(made, attn_implementation="eager").eval()
    module = spec.module("vision")
    for frames, rows, columns in ((1, 8, 8), (1, 10, 10), (3, 12, 12), (1, 8, 24)):
        patches, tokens = frames * rows * columns, frames * rows * columns // 4
        pixels, grid = torch.zeros(patches, module.input_width), torch.tensor([[frames, rows, columns]])
        with torch.no_grad():
            counted = flops_of(lambda pixels=pixels, grid=grid: tower(pixels, grid_thw=grid))
        samples = table([patches], [frames], [tokens], [1], kind="image" if frames == 1 else "video")
        item = module_features(samples, spec)["vision"]
        layers = 2 * layer_matmul_parameters(module) * patches + layer_square_flops(module) * item.squares[0]
        merged = 4 * module.hidden_size
        ends = 2 * module.input_width * module.hidden_size * patches + 2 * merged * (merged + 24) * tokens
        # Windows of a picture that is not square are estimated from its area.
        assert counted == pytest.approx(5 * layers + ends, rel=1e-9 if rows == columns else 1e-2)


@pytest.mark.parametrize(
    "text",
    [
        {"model_type": "llama"},
        {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
        {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
         "decoder_sparse_step": 2, "head_dim": 12},
    ],
)  # fmt: skip
def test_operations_follow_the_experts_that_a_token_goes_to(text, tmp_path):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {"hidden_size": 48, "intermediate_size": 36, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, **text}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    module = ModelSpec.from_pretrained(tmp_path).llm
    made = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager", experts_implementation="eager").eval()
    tokens = 24
    with torch.no_grad():
        counted = flops_of(lambda: model.model(input_ids=torch.arange(tokens)[None]))
    # Eager attention computes the masked half too.
    layers = 2 * layer_matmul_parameters(module) * tokens + 2 * layer_square_flops(module) * tokens**2
    rotary = 2 * tokens * module.head_size // 2
    assert counted - 4 * layers == pytest.approx(rotary, abs=rotary + 1)
    assert math.isclose(module.active_parameters - module.parameters, 0) == (not module.layer_kinds)
