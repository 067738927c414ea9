"""What a device holds of a model that several share, and what cannot be shared; in one process."""

import json

import numpy as np
import pytest
import torch
from cases import make_plan, write_model
from family_models import CASES
from test_families import plan_of, write_family
from test_tensor import ONE

from entrain_opt.cost.tensor import tensor_degrees
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import ParallelDegrees
from entrain_opt.runtime.families import read_family
from entrain_opt.runtime.families.llava import LlavaFamily
from entrain_opt.runtime.shards import Shard
from entrain_opt.runtime.stages import build_rank_model
from entrain_opt.runtime.tensor_group import TensorGroup
from entrain_opt.runtime.tensor_layers import BY_COLUMNS, BY_ROWS, check_tensor, divide
from entrain_opt.runtime.trained import check_divisible
from entrain_opt.spec import ModelSpec


def parts_of(folder, plan, size, **fields):
    return [
        build_rank_model(folder, plan, 0, seed=7, tensor=TensorGroup(place=place, size=size), **fields)
        for place in range(size)
    ]


def assert_parts_of(parts, whole):
    """Each part lies where its shard says, and together they cover the whole, each value once."""
    for name, value in whole.items():
        covered = np.zeros(value.shape, dtype=int)
        for part in parts:
            held = part.optimized_parameters()[name]
            shard = part.shards().get(name)
            assert torch.equal(held, value if shard is None else shard.cut(value)), name
            for start, end in () if shard is None else shard.ranges:
                covered[shard.index(start, end)] += 1
        assert covered.min() == covered.max() == (name in parts[0].shards()), name


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "internvl"])
def test_weights_drawn_or_read_are_parts_of_those_of_one_device(name, tmp_path):
    folder = write_family(tmp_path, name)
    one, two = plan_of(folder, name, (), ()), plan_of(folder, name, (), (), tensor=2)
    whole = build_rank_model(folder, one, 0, seed=7)
    assert_parts_of(parts_of(folder, two, 2), whole.optimized_parameters())
    whole.family.new_model().save_pretrained(tmp_path / "saved")
    read = build_rank_model(tmp_path / "saved", one, 0, seed=1).optimized_parameters()
    parts = parts_of(tmp_path / "saved", two, 2)
    assert_parts_of(parts, read)
    held = sum(p.numel() for p in parts[0].optimized_parameters().values())
    assert held < 0.6 * sum(p.numel() for p in read.values())
    for buffer_name, buffer in whole.model.named_buffers():
        assert torch.equal(dict(parts[1].model.named_buffers())[buffer_name], buffer)


def test_a_part_of_fused_queries_keys_and_values_has_the_rows_of_its_heads():
    whole = torch.arange(24).reshape(12, 2)
    shard = Shard.of((12, 2), 0, place=1, size=2, blocks=3)
    assert shard.cut(whole)[:, 0].tolist() == [4, 6, 12, 14, 20, 22]
    assert shard.own_shape == (6, 2)
    uneven = [Shard.of((7,), 0, place=place, size=3).ranges for place in range(3)]
    assert uneven == [((0, 2),), ((2, 4),), ((4, 7),)]


def test_the_table_agrees_with_transformers_own_plans():
    from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3VLTextConfig

    for config in (LlamaConfig, MistralConfig, Qwen2Config, Gemma3TextConfig, Qwen3VLTextConfig):
        plan = {pattern.rpartition(".")[2]: kind for pattern, kind in config.base_model_tp_plan.items()}
        rows = {name for name, kind in plan.items() if kind == "colwise" and name != "lm_head"}
        columns = {name for name, kind in plan.items() if kind == "rowwise"}
        assert rows <= set(BY_ROWS)
        assert columns <= set(BY_COLUMNS)


def test_places_of_ranks_are_the_inverse_of_their_numbers():
    for tensor in (1, 2, (1, 2, 4)):
        degrees = ParallelDegrees(data=3, pipeline=3, tensor=tensor)
        places = [degrees.place_of(rank) for rank in range(degrees.world_size)]
        assert [degrees.global_rank(*place) for place in places] == list(range(degrees.world_size))


def test_cross_entropy_of_one_part_is_that_of_torch():
    logits = (100 * torch.randn(5, 7, generator=torch.Generator().manual_seed(0))).requires_grad_()
    labels = torch.tensor([0, 6, 3, 3, 1])
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    (expected_gradient,) = torch.autograd.grad(2 * expected, logits)
    found = TensorGroup().cross_entropy_sum(logits, labels, 0)
    (gradient,) = torch.autograd.grad(2 * found, logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, expected_gradient)


def family_folder(root, name, **changes):
    """A family's folder with changed settings of its encoder, or of its language model (`text_...`)."""
    folder = write_family(root, name)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        part = "text_config" if key.startswith("text_") else f"{CASES[name].module}_config"
        config[part][key.removeprefix("text_")] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "tensor", "changes", "message"),
    [
        ("llava_next", 2, {"text_attention_dropout": 0.1}, r"llm has degree 2, but .*self_attn has dropout inside"),
        ("qwen2_audio", 2, {"activation_dropout": 0.1}, r"audio has degree 2, but .*layers.0 has dropout inside"),
        ("llava_next", 4, {}, r"vision has degree 4, but .*k_proj makes 2 heads, which it does not divide"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_starts(tmp_path, name, tensor, changes, message):
    folder = family_folder(tmp_path, name, **changes)
    with pytest.raises(RuntimeConfigError, match=message):
        check_tensor(folder, plan_of(folder, name, (), (), tensor=tensor))
    check_tensor(folder, plan_of(folder, name, (), ()))
    # The planner knows, so it makes no such plan.
    spec = ModelSpec.from_pretrained(folder)
    possible = {module.name: tensor_degrees(spec, module, (1, tensor), 4) for module in spec.modules}
    refused = message.split()[0]
    assert possible.pop(refused) == [1]
    if changes:
        assert list(possible.values()) == [[1, tensor]]


def test_a_norm_over_all_heads_is_refused_unless_it_is_known(tmp_path):
    folder = write_family(tmp_path, "internvl")
    plan, family = plan_of(folder, "internvl", (), (), tensor=2), read_family(folder)
    model = family.build()
    assert (
        "model.vision_tower.encoder.layer.0.attention.q_norm.weight"
        in divide(model, family, plan, TensorGroup(place=1, size=2)).shards
    )
    model.get_submodule("model.vision_tower.encoder.layer.0.attention").k_norm = torch.nn.LayerNorm(24)
    with pytest.raises(RuntimeConfigError, match=r"has degree 2, but .*k_norm \(LayerNorm\) normalises over all"):
        divide(model, family, plan, TensorGroup(size=2))


def test_layers_of_another_kind_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(LlavaFamily, "text_types", ("mixtral",))
    folder = write_model(tmp_path / "plain")
    config = json.loads((folder / "config.json").read_text())
    mixture = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    config["text_config"] = {**config["text_config"], **mixture}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeConfigError, match=r"module llm has degree 2, but how to divide 'model.language_model"):
        check_tensor(folder, make_plan(folder, ONE, tensor=2))


def test_a_model_is_not_built_for_another_number_of_devices(tmp_path):
    folder = write_model(tmp_path / "plain")
    with pytest.raises(RuntimeConfigError, match="pipeline rank 0 has 2 devices, built for 1"):
        build_rank_model(folder, make_plan(folder, ONE, tensor=2), 0, seed=7)


@pytest.mark.parametrize("fields", [{"tensor": 2}, {"data": 2, "data_parallel": "sharded"}])
def test_optimizers_that_look_at_whole_matrices_are_refused(fields):
    weight, plan = [torch.nn.Parameter(torch.zeros(2, 2))], make_plan("m", ONE, **fields)
    check_divisible(torch.optim.AdamW(weight), plan)
    with pytest.raises(RuntimeConfigError, match=r"model.optimizer: .*AdamW.*found Adafactor.*, or plan with"):
        check_divisible(torch.optim.Adafactor(weight), plan)
    check_divisible(torch.optim.Adafactor(weight), make_plan("m", ONE, data_parallel="sharded"))
