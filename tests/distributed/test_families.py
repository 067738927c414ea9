"""Every family: loss and gradients equal the plain model's, however it is cut, with no, one and several media."""

import itertools
import json
from functools import lru_cache

import pytest
import torch
from cases import TOLERANCE, assert_exact, expected_gradients, freeze, make_plan, run_model, run_pipeline
from family_models import CASES, MEDIA, FamilyReader
from ranks import run_ranks

from entrain_opt.plan import to_plain
from entrain_opt.runtime import checkpoint
from entrain_opt.runtime.executor import PipelineExecutor
from entrain_opt.runtime.families import UNUSED, read_family
from entrain_opt.runtime.stages import build_rank_model
from entrain_opt.spec import ModelSpec

ROWS = tuple(range(len(MEDIA)))


#: Cuts of encoder and language model, and the rank of each stage. On two ranks: each module whole; the encoder alone is
#: cut; the language model alone is; both are, across both ranks. On four: one stage per rank, cut at several places.
TWO_RANKS = [((), (), (0, 1)), ((1,), (), (0, 1, 1)), ((), (3,), (0, 0, 1)), ((2,), (1,), (0, 1, 0, 1))]
FOUR_RANKS = [((2,), (1,), (0, 1, 2, 3)), ((), (1, 3), (0, 1, 2, 3)), ((1, 2), (), (0, 1, 2, 3))]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folders of all families by name; expected gradients are computed once for each."""
    root = tmp_path_factory.mktemp("families")
    for name in CASES:
        write_family(root, name)
    return root


def write_family(root, name):
    """The folder of one family."""
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
    freeze(model, family, frozen)
    reader = FamilyReader(name)
    return expected_gradients(model, map(reader.plain_inputs, rows), [reader.text(row) for row in rows])


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
def test_cut_in_one_process(name, root, checked_shapes):
    folder = root / name
    reader = FamilyReader(name)
    tower = "audio_tower" if CASES[name].module == "audio" else "vision_tower"
    cases = [
        (plan_of(folder, name, (), ()), ROWS, ()),
        (plan_of(folder, name, (1,), (1,), schedule="eager"), ROWS, ()),
        (plan_of(folder, name, (2,), (2, 3), policy="in_order", num_microbatches=3), (5, 1, 2, 7), ()),
        (plan_of(folder, name, (1,), (3,), frozen=(tower,)), ROWS, (tower,)),
        (plan_of(folder, name, (1,), (1,), schedule="zero_bubble"), (1, 4), ()),  # text only
        (plan_of(folder, name, (1, 2), (1, 2), num_microbatches=1), ROWS, ()),  # all samples in one row
        (plan_of(folder, name, (), (2,), policy="karmarkar_karp", num_microbatches=8), (7, 0, 5, 2, 6), ()),
    ]
    for plan, rows, frozen in cases:
        assert_exact(expected_of(folder, name, rows, frozen), [run_pipeline(plan, reader, list(rows))])


def cuts_of(names, cuts, each):
    """(family, cut): every family gets `each` of the cuts, in turn."""
    return [(name, cuts[(index + k) % len(cuts)]) for index, name in enumerate(names) for k in range(each)]


def run_on_ranks(root, cuts):
    """Every case of `cuts` on this rank."""
    return [run_pipeline(plan_of(root / name, name, *cut), FamilyReader(name), list(ROWS)) for name, cut in cuts]


def assert_exact_on_ranks(root, world_size, cuts):
    of_ranks = run_ranks(run_on_ranks, world_size, root, cuts, timeout_seconds=400)
    for index, (name, _) in enumerate(cuts):
        assert_exact(expected_of(root / name, name, ROWS), [results[index] for results in of_ranks])


def test_cut_over_two_processes(root):
    assert_exact_on_ranks(root, 2, cuts_of(CASES, TWO_RANKS[:3], 1) + [(name, TWO_RANKS[3]) for name in CASES])


def test_cut_over_four_processes(root):
    """Families whose boundaries carry most (several features, spans, grids) at all places, the others in turn."""
    rest = [name for name in CASES if name not in ("qwen3_vl", "gemma3")]
    assert_exact_on_ranks(root, 4, cuts_of(["qwen3_vl", "gemma3"], FOUR_RANKS, 3) + cuts_of(rest, FOUR_RANKS, 1))


@pytest.mark.parametrize("name", CASES)
def test_family_agrees_with_planner_and_model(name, root):
    folder = root / name
    model, family = plain_model(folder, name)
    spec = ModelSpec.from_pretrained(folder)
    assert family.num_layers() == {module.name: module.num_layers for module in spec.modules}
    assert dict(model.all_tied_weights_keys) == family.tied()
    # Parameters that the family calls unused are those that get no gradient in the plain model.
    _, gradients = expected_of(folder, name, ROWS)
    unused = {n for n, p in model.named_parameters() if p.requires_grad and family.place(n).position == UNUSED}
    assert unused == {n for n, p in model.named_parameters() if p.requires_grad} - set(gradients)


@pytest.mark.parametrize("name", CASES)
def test_transformers_own_folders_are_read(name, root, tmp_path):
    """By the names that the plain model writes."""
    model, _family = plain_model(root / name, name)
    model.save_pretrained(tmp_path)
    cut = build_rank_model(tmp_path, plan_of(tmp_path, name, (1,), (1,)), 0, seed=99).model.state_dict()
    for parameter_name, value in model.state_dict().items():
        assert torch.equal(cut[parameter_name], value), parameter_name


@pytest.mark.parametrize("name", CASES)
def test_export_after_a_step_gives_the_plain_model_with_equal_logits(name, root, tmp_path):
    """Train a step in four stages, save, export: the folder is a plain one, and its logits are the trained model's."""
    plan, reader = plan_of(root / name, name, (1,), (2,)), FamilyReader(name)
    model = build_rank_model(root / name, plan, 0, seed=7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run_model(model, reader, list(ROWS))
    optimizer.step()
    snapshot = checkpoint.take_snapshot(
        model, [optimizer], meta={"global_step": 1}, model_folder=root / name, plan=to_plain(plan), copy=False
    )
    checkpoint.write(tmp_path / "step=1.ckpt", snapshot)
    checkpoint.export(tmp_path / "step=1.ckpt", tmp_path / "out")
    initial, _family = plain_model(root / name, name)
    exported, info = type(initial).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    trained = type(initial)(type(initial.config).from_pretrained(root / name))
    trained.load_state_dict(model.model.state_dict(), strict=True)
    inputs = [reader.plain_inputs(row) for row in ROWS]
    with torch.no_grad():
        for one in inputs:
            logits = exported.eval()(**one).logits
            assert torch.equal(logits, trained.eval()(**one).logits)
            assert not torch.allclose(logits, initial(**one).logits, atol=1e-3)
        loss, _ = expected_gradients(exported, inputs, [reader.text(row) for row in ROWS])
    # And the pipeline, cut otherwise, makes the same of the exported folder.
    again = build_rank_model(tmp_path / "out", plan_of(tmp_path / "out", name, (2,), (1,)), 0, seed=99)
    assert run_model(again, reader, list(ROWS), training=False)[0] == pytest.approx(loss, rel=TOLERANCE)
