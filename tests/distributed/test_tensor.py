"""Devices that share layers: loss, gradients, norms, steps and resumes are those of one process, whatever the degrees.

Each number of ranks is started once and runs everything; the tests compare what came back.
"""

import importlib.util
import json

import numpy as np
import pytest
import torch
from cases import (
    MIXED_TILES,
    SyntheticReader,
    assert_exact,
    make_plan,
    own_parts,
    reference,
    relative_error,
    run_model,
    run_pipeline,
    write_model,
)  # fmt: skip
from family_models import CASES, FamilyReader
from ranks import run_ranks
from test_checkpoint import assert_same, snapshot
from test_exactness import expected_of
from test_families import ROWS as FAMILY_ROWS
from test_families import expected_of as expected_of_family
from test_families import plan_of, write_family
from test_lora import LORA
from test_precision import distance
from test_training import BATCHES, STEPS, Run

from entrain_opt.errors import TrainingError
from entrain_opt.runtime import checkpoint
from entrain_opt.runtime.p2p import PipelineGroups, make_groups
from entrain_opt.runtime.stages import build_rank_model

ROWS = list(range(len(MIXED_TILES)))
ONE = [("vision", (0, 4), 0), ("llm", (0, 3), 0)]
TWO = [("vision", (0, 4), 0), ("llm", (0, 3), 1)]
CUT = [("vision", (0, 4), 0), ("llm", (0, 1), 0), ("llm", (1, 3), 1)]
HAS_PEFT = importlib.util.find_spec("peft") is not None
#: Below the norms of all steps, so that clipping changes each.
MAX_NORM = 0.05
AUDIO, DROPPING, SHORT = "qwen2_audio", "dropping", ("bf16-mixed", "bf16-true")


def plans_of(root, number):
    """(plan, rows) of the cases that a number of ranks runs."""
    plain, tied = str(root / "plain"), str(root / "tied")
    if number == 2:
        fields = [
            {},
            {"schedule": "zero_bubble"},
            {"recompute": ("vision", "llm")},
            {"frozen": ("vision_tower",)},
            {"frozen": ("vision_tower", "language_model"), "recompute": ("llm",)},
        ]
        cases = [(make_plan(plain, ONE, tensor=2, **one), ROWS) for one in fields]
        return [*cases, (make_plan(plain, ONE, tensor=2), [1, 5]), (make_plan(tied, ONE, tensor=2), ROWS)]
    if number == 3:
        frozen = ("vision_tower", "language_model")
        return [
            (make_plan(plain, TWO, tensor=(1, 2)), ROWS),
            (make_plan(plain, TWO, tensor=(2, 1), schedule="zero_bubble"), ROWS),
            (make_plan(plain, TWO, tensor=(1, 2), frozen=frozen), ROWS),
            (make_plan(plain, TWO, tensor=(1, 2)), [1, 5]),
        ]
    return [
        (make_plan(plain, TWO, tensor=2), ROWS),
        (make_plan(plain, TWO, tensor=2, recompute=("llm",), frozen=("vision_tower",)), ROWS),
        (make_plan(tied, CUT, tensor=2, schedule="eager"), ROWS),
        (make_plan(plain, ONE, tensor=2, data=2), [0, 1, 5]),  # media on one replica only
        (make_plan(plain, ONE, tensor=2, data=2), [9]),  # one replica has nothing to do
    ]


def run_with_adam(plan):
    """With an epsilon above rounding: the direction of a gradient of 1e-9 is noise."""
    run = Run(plan)
    run.use(torch.optim.AdamW(run.model.optimized_parameters().values(), lr=1e-2, eps=1e-3))
    return run


def train_and_save(plan, path, *, after):
    """Norms and weights (whole, or this device's parts) of all steps; a checkpoint after some of them."""
    run, norms = run_with_adam(plan), []
    for index, rows in enumerate(STEPS):
        if index == after:
            checkpoint.write(path, snapshot(run, plan, step=index))
        norms.append(run.step(rows, max_norm=MAX_NORM).gradient_norm)
    return norms, run.weights(), run.model.shards()


def resume(plan, path, *, after):
    """Weights after the remaining steps."""
    run = run_with_adam(plan)
    meta = checkpoint.load_meta(path)
    checkpoint.load_model(path, run.model)
    checkpoint.load_optimizers(path, run.model, [run.optimizer], meta)
    for rows in STEPS[after:]:
        run.step(rows, max_norm=MAX_NORM)
    return run.weights()


def notices_a_value_that_is_not_finite(plan):
    """In the part of one device alone."""
    run = Run(plan)
    weight = dict(run.model.model.named_parameters()).get("model.language_model.layers.2.mlp.down_proj.weight")
    if weight is not None and run.groups.tensor.place == 1:
        with torch.no_grad():
            weight[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="not finite"):
        run.step(BATCHES[0])
    return True


def steps_plan(root, number):
    split, tensor = {2: (ONE, 2), 3: (TWO, (1, 2))}[number]
    return make_plan(root / "tied", split, tensor=tensor)


def on_rank(root, number):
    """Everything that one of `number` ranks runs."""
    found = {"plans": [run_pipeline(plan, SyntheticReader(MIXED_TILES), rows) for plan, rows in plans_of(root, number)]}
    if number < 4:
        plan = steps_plan(root, number)
        found["trained"] = train_and_save(plan, root / f"divided{number}", after=2)
        found["resumed"] = resume(plan, root / "whole", after=3)
        found["noticed"] = notices_a_value_that_is_not_finite(plan)
    if number == 2:
        found["families"] = [run_family(root / name, name, tensor=2) for name in CASES]
        found["dropout"] = run_family(root / DROPPING, AUDIO, tensor=2, training=True)
        plain = make_plan(str(root / "plain"), ONE, tensor=2)
        found |= {one: run_pipeline(plain, SyntheticReader(MIXED_TILES), ROWS, precision=one) for one in SHORT}
        found["adapters"] = run_adapters(root / "plain", tensor=2) if HAS_PEFT else None
    return found


def run_family(folder, name, *, tensor=1, training=False):
    plan = plan_of(folder, name, (), (), tensor=tensor)
    groups = make_groups(plan) if tensor > 1 else PipelineGroups(replica=0, pipeline_rank=0)
    model = build_rank_model(folder, plan, 0, seed=7, tensor=groups.tensor).train(training)
    torch.manual_seed(groups.tensor.place)
    return run_model(model, FamilyReader(name), list(FAMILY_ROWS), groups=groups)


def run_adapters(folder, *, tensor=1):
    """Second factors that are not zero, so that every adapter has a gradient; the same ones under every degree."""
    plan = make_plan(folder, ONE, tensor=tensor, schedule="zero_bubble")
    groups = make_groups(plan) if tensor > 1 else PipelineGroups(replica=0, pipeline_rank=0)
    model = build_rank_model(folder, plan, 0, seed=7, lora=LORA, tensor=groups.tensor)
    with torch.no_grad():
        for name, parameter in model.model.named_parameters():
            if "lora_B" in name:
                shard = model.divided.shards.get(name)
                shape = parameter.shape if shard is None else shard.shape
                drawn = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) / 10
                parameter.copy_(drawn if shard is None else shard.cut(drawn))
    return run_model(model, SyntheticReader(MIXED_TILES), [0, 1, 2, 6], groups=groups)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models of all tests, and the checkpoint and results of a run in one process."""
    folder = tmp_path_factory.mktemp("tensor")
    write_model(folder / "plain")
    write_model(folder / "tied", tied=True)
    for name in CASES:
        write_family(folder, name)
    config = {**CASES[AUDIO].config, "audio_config": {**CASES[AUDIO].config["audio_config"], "dropout": 0.3}}
    (folder / DROPPING).mkdir()
    (folder / DROPPING / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def whole(root):
    """Norms and weights of a run in one process, with a checkpoint after three steps."""
    norms, weights, _ = train_and_save(make_plan(root / "tied", ONE), root / "whole", after=3)
    assert min(norms) > MAX_NORM
    return norms, weights


@pytest.fixture(scope="module")
def pair(root, whole):
    return run_ranks(on_rank, 2, root, 2, timeout_seconds=400)


@pytest.fixture(scope="module")
def three(root, whole):
    return run_ranks(on_rank, 3, root, 3, timeout_seconds=400)


def assert_plans_exact(root, of_ranks):
    for index, (plan, rows) in enumerate(plans_of(root, len(of_ranks))):
        results = [found["plans"][index] for found in of_ranks]
        assert_exact(expected_of(plan.model, tuple(rows), plan.frozen), results)
        for rank, result in enumerate(results):
            _, pipeline_rank, _ = plan.degrees.place_of(rank)
            assert bool(result[3]["shards"]) == (plan.degrees.tensor_of(pipeline_rank) > 1)


def test_two_devices_share_all_layers(root, pair):
    assert_plans_exact(root, pair)


def test_degrees_that_differ_between_modules(root, three):
    assert_plans_exact(root, three)


def test_two_pipeline_ranks_or_replicas_of_two_devices(root):
    assert_plans_exact(root, run_ranks(on_rank, 4, root, 4, timeout_seconds=400))


@pytest.mark.parametrize("number", [2, 3])
def test_steps_with_clipping_and_resumes_under_another_degree(root, whole, number, request):
    """Two devices go on from the checkpoint of one, and one from that of two; export joins the parts."""
    of_ranks = request.getfixturevalue({2: "pair", 3: "three"}[number])
    norms, expected = whole
    for found in of_ranks:
        found_norms, weights, shards = found["trained"]
        assert found_norms == pytest.approx(norms, rel=1e-5)
        assert_same(weights, own_parts(expected, shards))
        assert_same(found["resumed"], own_parts(expected, shards))
        assert found["noticed"]
    one, path = make_plan(root / "tied", ONE), root / f"divided{number}"
    assert_same(resume(one, path, after=2), expected)
    checkpoint.export(path, root / f"exported{number}")
    saved = Run(one)
    checkpoint.load_model(path, saved.model)
    again = build_rank_model(root / f"exported{number}", one, 0, seed=99).optimized_parameters()
    assert all(torch.equal(again[name], value) for name, value in saved.model.optimized_parameters().items())


@pytest.mark.parametrize("name", CASES)
def test_families(root, pair, name):
    index = list(CASES).index(name)
    expected = expected_of_family(root / name, name, FAMILY_ROWS)
    assert_exact(expected, [found["families"][index] for found in pair])


def test_dropout_outside_of_what_is_shared_draws_the_same_masks(root, pair):
    loss, gradients, _, _ = run_family(root / DROPPING, AUDIO, training=True)
    assert_exact((loss, gradients), [found["dropout"] for found in pair])
    assert relative_error(gradients, expected_of_family(root / AUDIO, AUDIO, FAMILY_ROWS)[1]) > 1e-2


@pytest.mark.parametrize("precision", SHORT)
def test_shorter_precisions_are_as_close_as_the_plain_model(root, pair, precision):
    """A sum over two devices rounds once more."""
    reader = SyntheticReader(MIXED_TILES)
    _, exact = reference(root / "plain", reader, ROWS)
    _, plain = reference(root / "plain", reader, ROWS, precision=precision)
    for _, found, _, notes in (one[precision] for one in pair):
        own, own_plain = own_parts(exact, notes["shards"]), own_parts(plain, notes["shards"])
        assert distance(found, own) < 1.5 * distance(own_plain, own)
        assert all(gradient.dtype == np.float32 for gradient in found.values())


@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
def test_adapters(root, pair):
    loss, gradients, _, _ = run_adapters(root / "plain")
    assert_exact((loss, gradients), [found["adapters"] for found in pair])
