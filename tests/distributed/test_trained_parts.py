"""What trains: first layers frozen, groups with their own settings, rates over time."""

import numpy as np
import pytest
import torch
from cases import MIXED_TILES, SPLITS, SyntheticReader, make_plan, reference, relative_error, run_model, write_model

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.lightning.schedules import WarmupCosine
from entrain_opt.runtime.stages import build_rank_model
from entrain_opt.runtime.trained import ParameterGroup, check_groups, optimizer_groups

ROWS = list(range(len(MIXED_TILES)))
SEED = 7


@pytest.mark.parametrize(
    ("frozen_layers", "tied"), [({"vision": 2}, False), ({"vision": 4, "llm": 1}, False), ({"llm": 2}, True)]
)
def test_first_layers_frozen_leave_the_other_gradients_exact(tmp_path, frozen_layers, tied):
    folder, reader = write_model(tmp_path / "plain", tied=tied), SyntheticReader(MIXED_TILES)
    expected_loss, expected = reference(folder, reader, ROWS, seed=SEED)
    for schedule in ("1f1b", "zero_bubble"):
        plan = make_plan(folder, SPLITS[1], schedule=schedule)
        model = build_rank_model(folder, plan, 0, seed=SEED, frozen_layers=frozen_layers)
        loss, found, _, _ = run_model(model, reader, ROWS)
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        for name in expected:
            is_vision, is_llm = "vision_tower" in name, "language_model" in name
            count = frozen_layers.get("vision" if is_vision else "llm" if is_llm else "", 0)
            early = [f"layers.{n}." for n in range(count)] + (["embeddings.", "embed_tokens."] if count else [])
            assert (name in found) != any(piece in name for piece in early), name
        assert relative_error(found, {name: expected[name] for name in found}) < 1e-5


def test_groups_are_the_same_on_every_rank_and_hold_every_parameter_once(tmp_path):
    folder = write_model(tmp_path / "plain")
    plan = make_plan(folder, SPLITS[2], frozen=("projector",))
    groups = [ParameterGroup(parts=["vision_tower"], lr=1e-5, weight_decay=0.3)]
    settings, sizes = [], []
    for rank in range(2):
        model = build_rank_model(folder, plan, rank, seed=SEED)
        found = optimizer_groups(model.optimized_parameters(), model.family, groups)
        optimizer = torch.optim.AdamW(found, lr=1e-3, weight_decay=0.1)
        settings.append([(g["lr"], g["weight_decay"]) for g in optimizer.param_groups])
        sizes.append([len(g["params"]) for g in optimizer.param_groups])
        held = [id(p) for g in optimizer.param_groups for p in g["params"]]
        assert sorted(held) == sorted(id(p) for p in model.model.parameters() if p.requires_grad)
        assert all(p.ndim == 1 for g in optimizer.param_groups[1::2] for p in g["params"])
        assert all(p.ndim > 1 for g in optimizer.param_groups[::2] for p in g["params"])
    assert settings[0] == settings[1] == [(1e-5, 0.3), (1e-5, 0.0), (1e-3, 0.1), (1e-3, 0.0)]
    assert (np.array(sizes) > 0).tolist() == [[True, True, False, False], [False, False, True, True]]


def test_norms_and_biases_decay_only_on_request(tmp_path):
    folder = write_model(tmp_path / "plain")
    model = build_rank_model(folder, make_plan(folder, SPLITS[1]), 0, seed=SEED)
    for decays in (False, True):
        found = optimizer_groups(model.optimized_parameters(), model.family, decay_norms_and_biases=decays)
        assert len(found) == (1 if decays else 2)
        norm = model.optimized_parameters()["model.language_model.norm.weight"]
        before = norm.detach().clone()
        optimizer = torch.optim.SGD(found, lr=0.1, weight_decay=0.5)
        for parameter in model.optimized_parameters().values():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert torch.equal(norm, before) != decays


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([ParameterGroup(parts=["tower"])], r"parameter_groups\[0\].parts: expected names from .*'tower'"),
        ([ParameterGroup(parts=["projector"])], "'projector' is frozen"),
        ([ParameterGroup(parts=["vision_tower"])] * 2, r"parameter_groups\[1\].parts: expected each part in one group"),
        ([ParameterGroup(parts=["vision_tower"], lr=-1.0)], r"parameter_groups\[0\].lr: expected at least 0"),
    ],
)
def test_wrong_groups_are_refused(groups, message):
    with pytest.raises(RuntimeConfigError, match=message):
        check_groups(groups, ["projector"])


@pytest.mark.parametrize(
    ("layers", "message"), [({"audio": 1}, "'audio'"), ({"llm": 4}, "frozen_layers.llm: .*0 to 3")]
)
def test_layers_that_the_model_does_not_have_are_refused(tmp_path, layers, message):
    folder = write_model(tmp_path / "plain")
    with pytest.raises(RuntimeConfigError, match=message):
        build_rank_model(folder, make_plan(folder, SPLITS[1]), 0, seed=SEED, frozen_layers=layers)


def test_warmup_and_cosine_scale_each_group():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weights[0]], "lr": 1.0}, {"params": [weights[1]], "lr": 0.1}])
    scheduler = WarmupCosine(optimizer, warmup_steps=4, total_steps=10, final_share=0.2)
    rates = []
    for _ in range(13):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    first, second = np.array(rates).T
    np.testing.assert_allclose(first[:5], [0.25, 0.5, 0.75, 1.0, 1.0])
    assert first[7] == pytest.approx(0.2 + 0.8 / 2)
    np.testing.assert_allclose(first[10:], 0.2)
    np.testing.assert_allclose(second, 0.1 * first)
    with pytest.raises(RuntimeConfigError, match="warmup_steps"):
        WarmupCosine(optimizer, warmup_steps=10, total_steps=10)
