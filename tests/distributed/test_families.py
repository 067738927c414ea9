"""Every family: loss and gradients equal the plain model's, however it is cut, with no, one and several media."""

import itertools
import json
from functools import lru_cache

import pytest
import torch
from cases import make_plan, relative_error, run_pipeline
from family_models import CASES, MEDIA, FamilyReader
from ranks import run_ranks

from entrain_opt.runtime.executor import PipelineExecutor
from entrain_opt.runtime.families import UNUSED, read_family
from entrain_opt.runtime.stages import build_rank_model
from entrain_opt.spec import ModelSpec

ROWS = tuple(range(len(MEDIA)))
TOLERANCE = 1e-5


def write_family(root, name):
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CASES[name].config))
    return folder


def plan_of(folder, name, vision_cuts, llm_cuts, ranks=None, **fields):
    """A plan whose modules are cut at the given layers; all stages on rank 0 unless `ranks` says otherwise."""
    case = CASES[name]
    bounds = [(case.module, (0, *vision_cuts, case.vision_layers)), ("llm", (0, *llm_cuts, 4))]
    parts = [(module, pair) for module, cuts in bounds for pair in itertools.pairwise(cuts)]
    ranks = ranks or [0] * len(parts)
    return make_plan(folder, [(*part, rank) for part, rank in zip(parts, ranks, strict=True)], **fields)


def plain_model(folder, name, seed=7):
    """The plain model with the weights that the runtime draws."""
    whole = build_rank_model(folder, plan_of(folder, name, (), ()), 0, seed=seed)
    family = read_family(folder)
    model = family.new_model()
    model.load_state_dict(whole.model.state_dict(), strict=True)
    return model.eval(), family


@lru_cache
def expected_of(folder, name, rows, frozen=()):
    """Loss and gradients, one sample at a time."""
    model, family = plain_model(folder, name)
    for parameter_name, parameter in model.named_parameters():
        if family.place(parameter_name).part in frozen:
            parameter.requires_grad_(False)
    reader = FamilyReader(name)
    total = int(reader.table().label_tokens[list(rows)].sum())
    loss = 0.0
    for row in rows:
        logits = model(**reader.plain_inputs(row)).logits[0]
        labels = torch.from_numpy(reader.text(row).label_ids)
        share = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / total
        share.backward()
        loss += share.item()
    return loss, {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def assert_exact(expected, results):
    expected_loss, gradients = expected
    assert sum(result[0] for result in results) == pytest.approx(expected_loss, rel=TOLERANCE)
    for result in results:
        owned = {name: gradient for name, gradient in gradients.items() if name in result[1]}
        assert relative_error(result[1], owned) < TOLERANCE
    assert set(gradients) <= {name for result in results for name in result[1]}


@pytest.fixture
def checked_shapes(monkeypatch):
    """Stages that share a rank send no messages: check what they would have sent against what would be received."""
    forward = PipelineExecutor._forward

    def checked(self, unit, inputs, batch, flight, training):
        loss = forward(self, unit, inputs, batch, flight, training)
        if unit in flight.outputs:
            assert flight.outputs[unit].shape == self._output_shape(unit, batch)
        return loss

    monkeypatch.setattr(PipelineExecutor, "_forward", checked)


@pytest.mark.parametrize("name", CASES)
def test_cut_in_one_process(name, tmp_path, checked_shapes):
    folder = write_family(tmp_path, name)
    reader = FamilyReader(name)
    tower = "audio_tower" if CASES[name].module == "audio" else "vision_tower"
    cases = [
        (plan_of(folder, name, (), ()), ROWS, ()),
        (plan_of(folder, name, (1,), (1,), schedule="eager"), ROWS, ()),
        (plan_of(folder, name, (2,), (2, 3), policy="in_order", num_microbatches=3), (5, 1, 2, 7), ()),
        (plan_of(folder, name, (1,), (3,), frozen=(tower,)), ROWS, (tower,)),
        (plan_of(folder, name, (1,), (1,), schedule="zero_bubble"), (1, 4), ()),  # text only
    ]
    for plan, rows, frozen in cases:
        assert_exact(expected_of(folder, name, rows, frozen), [run_pipeline(plan, reader, list(rows))])


def run_on_ranks(root):
    """Every family on this rank, in four stages: encoder and language model are cut across both ranks."""
    return [
        run_pipeline(plan_of(root / name, name, (2,), (1,), (0, 1, 0, 1)), FamilyReader(name), list(ROWS))
        for name in CASES
    ]


def test_cut_over_two_processes(tmp_path):
    for name in CASES:
        write_family(tmp_path, name)
    of_ranks = run_ranks(run_on_ranks, 2, tmp_path)
    for index, name in enumerate(CASES):
        assert_exact(expected_of(tmp_path / name, name, ROWS), [results[index] for results in of_ranks])


@pytest.mark.parametrize("name", CASES)
def test_family_agrees_with_planner_and_model(name, tmp_path):
    folder = write_family(tmp_path, name)
    model, family = plain_model(folder, name)
    spec = ModelSpec.from_pretrained(folder)
    assert family.num_layers() == {module.name: module.num_layers for module in spec.modules}
    assert dict(model.all_tied_weights_keys) == family.tied()
    # Parameters that the family calls unused are those that get no gradient in the plain model.
    _, gradients = expected_of(folder, name, ROWS)
    unused = {n for n, p in model.named_parameters() if p.requires_grad and family.place(n).position == UNUSED}
    assert unused == {n for n, p in model.named_parameters() if p.requires_grad} - set(gradients)


@pytest.mark.parametrize("name", CASES)
def test_exported_weights_give_equal_logits(name, tmp_path):
    folder = write_family(tmp_path, name)
    model, _family = plain_model(folder, name)
    model.save_pretrained(tmp_path / "exported")
    again = type(model).from_pretrained(tmp_path / "exported").eval()
    # The cut model reads the same folder, by the names that the plain model wrote.
    plan = plan_of(tmp_path / "exported", name, (1,), (1,))
    cut = build_rank_model(tmp_path / "exported", plan, 0, seed=99).model.state_dict()
    reader = FamilyReader(name)
    with torch.no_grad():
        for row in (2, 4):
            assert torch.equal(model(**reader.plain_inputs(row)).logits, again(**reader.plain_inputs(row)).logits)
    for parameter_name, value in model.state_dict().items():
        assert torch.equal(cut[parameter_name], value), parameter_name
