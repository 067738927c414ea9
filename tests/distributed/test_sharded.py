"""Optimizer state shared out over replicas: the weights of summing everything everywhere, for a share of the bytes."""

import importlib.util

import numpy as np
import pytest
import torch
from cases import make_plan, own_parts, write_model
from ranks import run_ranks
from test_checkpoint import assert_same, snapshot
from test_training import BATCHES, Run, poison

from entrain_opt.cost import CostModel
from entrain_opt.plan.shares import BUCKET_BYTES, owned_rows, row_dim
from entrain_opt.runtime import checkpoint
from entrain_opt.runtime import sharded as sharded_state
from entrain_opt.runtime.lora import Lora
from entrain_opt.runtime.shards import Shard
from entrain_opt.runtime.trained import ParameterGroup, optimizer_groups
from entrain_opt.spec import ClusterSpec, ModelSpec

ONE = [("vision", (0, 4), 0), ("llm", (0, 3), 0)]
#: The tied embedding lies on both ranks.
CUT = [("vision", (0, 4), 0), ("llm", (0, 1), 0), ("llm", (1, 3), 1)]
STEPS = [*BATCHES, BATCHES[0], BATCHES[1]]
MAX_NORM = 0.05


#: In place of 32 MiB: many messages, and single parameters that are larger.
SMALL_MESSAGE_BYTES = 3000


class ScheduledRun(Run):
    """AdamW on two groups of parameters with their own rates, which fall with every step.

    Its epsilon is above rounding: the direction of a gradient of 1e-9 is noise.
    """

    def __init__(self, plan, **fields):
        super().__init__(plan, **fields)
        self.dtype = fields.get("dtype", torch.float32)
        groups = [ParameterGroup(parts=["projector"], lr=3e-2)]
        groups = optimizer_groups(self.model.optimized_parameters(), self.model.family, groups)
        self.use(torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, weight_decay=0.1))

    def step(self, rows, **fields):
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9
        return super().step(rows, **fields)

    def weights(self):
        """What the model computes with."""
        return {name: p.detach().float().numpy().copy() for name, p in self.model.model.named_parameters()}

    def optimizer_bytes(self):
        """Of moments, without the counters of steps, and of masters."""
        held = 0
        for parameter, state in self.optimizer.state.items():
            held += sum(value.nbytes for value in state.values() if value.ndim)
            held += parameter.nbytes * (self.dtype != torch.float32)
        return held


def train(plan, *, path=None, after=3, **fields):
    """Norms, weights, bytes of moments and shards after all steps; a checkpoint after some of them."""
    run, norms = ScheduledRun(plan, **fields), []
    for index, rows in enumerate(STEPS):
        if index == after and path is not None:
            checkpoint.write(path, snapshot(run, plan, step=index))
        norms.append(run.step(rows, max_norm=MAX_NORM).gradient_norm)
    return {
        "norms": norms,
        "weights": run.weights(),
        "bytes": run.optimizer_bytes(),
        "shards": run.model.divided.shards,
    }


def resume(plan, path, *, after=3, **fields):
    """Weights after the remaining steps."""
    run = ScheduledRun(plan, **fields)
    checkpoint.load_model(path, run.model)
    loaded = run.weights()
    checkpoint.load_optimizers(path, run.model, [run.optimizer], checkpoint.load_meta(path))
    for rows in STEPS[after:]:
        run.step(rows, max_norm=MAX_NORM)
    return run.weights(), loaded


def plan_of(root, split, *, data=2, **fields):
    return make_plan(root, split, data=data, data_parallel="sharded", **fields)


HALF = {"dtype": torch.bfloat16}
LORA = Lora(parts=["language_model", "vision_tower"], rank=3, alpha=6.0)
VARIANTS = {
    "whole": ({}, {}),
    "frozen": ({"frozen": ("vision_tower", "language_model")}, {}),
    "bf16-true": ({"schedule": "zero_bubble"}, HALF),
}
HAS_PEFT = importlib.util.find_spec("peft") is not None


def on_two(root):
    """Everything that one of two replicas runs."""
    found = {}
    for name, (fields, how) in VARIANTS.items():
        sharded_state.BUCKET_BYTES = BUCKET_BYTES if name == "whole" else SMALL_MESSAGE_BYTES
        sharded, summed = plan_of(root, ONE, **fields), make_plan(root, ONE, data=2, **fields)
        found[name] = {
            "sharded": train(sharded, path=root.parent / f"sharded-{name}", **how),
            "summed": train(summed, path=root.parent / f"summed-{name}", **how),
            "resumed": resume(sharded, root.parent / f"summed-{name}", **how),
            "back": resume(summed, root.parent / f"sharded-{name}", **how),
        }
    found["from one"] = resume(plan_of(root, ONE), root.parent / "alone")
    found["poisoned"] = [poison(plan_of(root.parent / "plain", ONE), policy) for policy in ("error", "skip")]
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    write_model(folder / "plain")
    return write_model(folder / "tied", tied=True)


@pytest.fixture(scope="module")
def alone(root):
    """One plain process, with a checkpoint."""
    return train(make_plan(root, ONE), path=root.parent / "alone")


@pytest.fixture(scope="module")
def pair(root, alone):
    return run_ranks(on_two, 2, root)


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_are_those_of_summing_everything_everywhere(pair, alone, variant):
    for found in (rank[variant] for rank in pair):
        sharded, summed = found["sharded"], found["summed"]
        assert sharded["norms"] == pytest.approx(summed["norms"], rel=1e-6)
        assert min(sharded["norms"]) > MAX_NORM
        for name, value in summed["weights"].items():
            np.testing.assert_allclose(sharded["weights"][name], value, rtol=1e-6, atol=1e-7, err_msg=name)
    if variant == "whole":
        assert_same(pair[0][variant]["sharded"]["weights"], alone["weights"])
    first, second = (rank[variant]["sharded"]["weights"] for rank in pair)
    assert all(np.array_equal(first[name], value) for name, value in second.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_replica_holds_the_state_of_its_rows_alone_as_the_plan_counts_it(root, pair, variant):
    """Together that of all; a replica's share differs from half by at most a row of each parameter."""
    fields, how = VARIANTS[variant]
    plan = plan_of(root, ONE, **fields)
    precision = "bf16-true" if how else "32-true"
    spec = ModelSpec.from_pretrained(root, frozen=plan.frozen)
    costs = CostModel(spec, ClusterSpec(device="cpu", devices_per_node=2), precision=precision)
    shares = [rank[variant]["sharded"]["bytes"] for rank in pair]
    whole = pair[0][variant]["summed"]["bytes"]
    predicted = {
        count: sum(costs.static_bytes(stage, plan.degrees, count).optimizer for stage in plan.stages)
        for count in (1, plan.num_shares)
    }
    assert sum(shares) == whole == predicted[1] == 2 * predicted[2]
    assert max(shares) < 0.51 * whole


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumes_both_ways(pair, variant):
    for found in (rank[variant] for rank in pair):
        for way, origin in (("resumed", "summed"), ("back", "sharded")):
            weights, _ = found[way]
            for name, value in found[origin]["weights"].items():
                np.testing.assert_allclose(weights[name], value, rtol=1e-6, atol=1e-7, err_msg=name)


def test_one_process_and_replicas_go_on_from_each_other(root, pair, alone):
    for rank in pair:
        assert_same(rank["from one"][0], alone["weights"])
    assert_same(resume(make_plan(root, ONE), root.parent / "sharded-whole")[0], alone["weights"])


def test_an_export_of_shares_is_the_export_of_the_whole(root, pair):
    """What loading gives before any step is what the checkpoint's export holds."""
    checkpoint.export(root.parent / "sharded-whole", root.parent / "exported")
    exported = Run(make_plan(root.parent / "exported", ONE)).weights()
    loaded = pair[0]["whole"]["back"][1]
    assert all(np.array_equal(exported[name], value) for name, value in loaded.items())


def test_a_value_that_is_not_finite_is_noticed_by_every_replica(pair):
    for (kind, message), (skipped, changed) in (rank["poisoned"] for rank in pair):
        assert kind == "error"
        assert "s0" in message
        assert skipped is True
        assert changed == []


def on_four(root):
    """Two replicas of two stages, and of two devices that share the layers."""
    found = []
    sharded_state.BUCKET_BYTES = SMALL_MESSAGE_BYTES
    for split, tensor in ((CUT, 1), (ONE, 2)):
        plan = plan_of(root, split, tensor=tensor, schedule="zero_bubble")
        path = root.parent / f"four-{tensor}"
        found.append((train(plan, path=path), resume(plan, path)[0]))
    if HAS_PEFT:
        plan, path = plan_of(root, ONE, data=4), root.parent / "four-adapters"
        found.append((train(plan, path=path, lora=LORA), resume(plan, path, lora=LORA)[0]))
    return found


@pytest.fixture(scope="module")
def four(root):
    return run_ranks(on_four, 4, root)


def test_two_replicas_of_two_stages_or_of_two_devices(root, alone, four):
    """The tied embedding lies on both stages; a device's part of a matrix is cut along rows or columns."""
    for of_rank in four:
        for trained, resumed in of_rank[:2]:
            assert trained["norms"] == pytest.approx(alone["norms"], rel=1e-5)
            for weights in (trained["weights"], resumed):
                assert_same(weights, own_parts(alone["weights"], trained["shards"]))
    for tensor in (1, 2):
        assert_same(resume(make_plan(root, ONE), root.parent / f"four-{tensor}")[0], alone["weights"])


@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
def test_replicas_without_a_row_of_an_adapter_or_without_samples(root, four):
    """Adapters of rank 3 on four replicas; a step has fewer samples than there are replicas."""
    one, path = make_plan(root, ONE), root.parent / "four-adapters"
    expected = train(one, lora=LORA)
    for of_rank in four:
        trained, resumed = of_rank[2]
        assert trained["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert_same(trained["weights"], expected["weights"])
        assert_same(resumed, expected["weights"])
    assert_same(resume(one, path, lora=LORA)[0], expected["weights"])
    assert sum(of_rank[2][0]["bytes"] for of_rank in four) == expected["bytes"]


@pytest.mark.parametrize(("rows", "replicas"), [(1, 3), (7, 2), (8, 4), (5, 8), (67, 6)])
def test_every_row_has_one_owner_and_shares_are_even(rows, replicas):
    ends = [owned_rows(rows, replica, replicas) for replica in range(replicas)]
    assert [first for first, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == rows
    sizes = [end - first for first, end in ends]
    assert max(sizes) - min(sizes) <= 1


def test_rows_of_parts_are_ranges_of_the_whole():
    whole = torch.arange(12 * 6).view(12, 6)
    for dim, size in ((0, 2), (1, 3)):
        for blocks in (1, 2):
            part = Shard.of((12, 6), dim, place=1, size=size, blocks=blocks)
            held = part.cut(whole)
            for replica in range(2):
                first, end = owned_rows(held.shape[0], replica, 2)
                rows = part.rows(0, first, end)
                assert rows.own_shape == (end - first, held.shape[1])
                assert torch.equal(rows.cut(whole), held[first:end])
                assert sum(np.prod(sizes) for _, sizes, _ in rows.chunks()) == held[first:end].numel()
    assert [row_dim(shape) for shape in ((), (1,), (5, 2), (1, 1, 8))] == [0, 0, 0, 2]
