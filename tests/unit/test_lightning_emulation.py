"""Which part of a plan is rehearsed, and what an emulated run refuses."""

from dataclasses import replace

import numpy as np
import pytest
from pytorch_lightning import Trainer

from entrain_opt import ClusterSpec, CostModel, EntrainStrategy, ModelSpec
from entrain_opt.errors import RuntimeConfigError, TrainingError
from entrain_opt.lightning.emulation import SHORTEST_MEAN_SECONDS, Emulation, rehearse
from entrain_opt.lightning.flags import check_trainer
from entrain_opt.plan import ParallelDegrees, Plan, StagePlan
from entrain_opt.runtime import emulation as runtime
from entrain_opt.workload.samples import SampleTable

PLAN = Plan(
    model="tiny-llava",
    degrees=ParallelDegrees(data=4, pipeline=2),
    stages=(StagePlan(module="vision", layers=(0, 12), rank=0), StagePlan(module="llm", layers=(0, 6), rank=1)),
    global_batch_size=32,
    num_microbatches=4,
)


@pytest.fixture(scope="module")
def parts():
    count = 40
    rng = np.random.default_rng(0)
    samples = SampleTable(
        sample_ids=np.arange(count).astype(np.str_),
        text_tokens=rng.integers(20, 200, count),
        label_tokens=np.full(count, 8),
        media_offsets=np.arange(count + 1),
        media_kind=np.zeros(count, dtype=np.int64),
        media_patches=np.full(count, 64),
        media_segments=np.ones(count, dtype=np.int64),
        media_tokens=np.full(count, 16),
    )
    cluster = ClusterSpec(device="cpu", devices_per_node=8)
    return samples, CostModel(ModelSpec.from_pretrained("models/tiny-llava"), cluster)


def test_replicas_keep_their_work_and_the_whole_plan_reduces(parts):
    samples, costs = parts
    found = rehearse(Emulation(replicas=2), PLAN, costs, samples)
    assert (found.plan.degrees.data, found.plan.global_batch_size) == (2, 16)
    whole = costs.batch_costs(samples, PLAN).stages.reduce_seconds
    part = costs.batch_costs(samples, found.plan).stages.reduce_seconds
    assert found.costs.batch_costs(samples, found.plan).stages.reduce_seconds == whole != part


def test_one_process_stands_for_all_devices_of_a_rank(parts):
    samples, costs = parts
    divided = replace(PLAN, degrees=ParallelDegrees(data=2, pipeline=2, context=(1, 2)))
    found = rehearse(Emulation(), divided, costs, samples)
    assert found.plan.degrees == ParallelDegrees(data=2, pipeline=2)
    forward = found.costs.batch_costs(samples, found.plan).stages.forward_seconds
    np.testing.assert_array_equal(forward[1], costs.batch_costs(samples, divided).stages.forward_seconds[1])
    assert (forward[1] != costs.batch_costs(samples, PLAN).stages.forward_seconds[1]).all()


def test_scale_makes_the_fastest_stage_long_enough_to_wait_for(parts):
    samples, costs = parts
    scale = rehearse(Emulation(), PLAN, costs, samples).scale
    stages = costs.batch_costs(samples, PLAN).stages
    means = [
        2 * seconds.mean() + fixed
        for seconds, fixed in zip(stages.forward_seconds, stages.forward_fixed_seconds, strict=True)
    ]
    assert scale * min(means) == pytest.approx(SHORTEST_MEAN_SECONDS)
    assert rehearse(Emulation(scale=3.0), PLAN, costs, samples).scale == 3.0


def test_one_replica_of_many_may_have_fewer_samples_than_the_plan_has_replicas(parts):
    samples, costs = parts
    many = replace(PLAN, degrees=ParallelDegrees(data=16, pipeline=2))
    found = rehearse(Emulation(replicas=1), many, costs, samples)
    assert found.plan.global_batch_size == 2
    assert found.costs.batch_costs(samples, found.plan).num_samples == len(samples)


@pytest.mark.parametrize(
    ("wrong", "named"), [({"replicas": 5}, "4 replicas"), ({"scale": 0.0}, "scale"), ({"num_nodes": 0}, "num_nodes")]
)
def test_wrong_values_are_named(parts, wrong, named):
    samples, costs = parts
    with pytest.raises(RuntimeConfigError, match=named):
        rehearse(Emulation(**wrong), PLAN, costs, samples)


def test_an_emulated_run_writes_no_checkpoint(tmp_path):
    with pytest.raises(RuntimeConfigError, match="enable_checkpointing"):
        check_trainer(Trainer(accelerator="cpu", devices=1, logger=False), emulated=True)
    with pytest.raises(RuntimeConfigError, match="no weights"):
        EntrainStrategy(emulate=Emulation()).save_checkpoint({}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_message_of_another_unit_is_noticed():
    message = runtime._stand_in((1, 2, 0), runtime._GRADIENT)
    runtime._await_arrival(message, (1, 2, 0), runtime._GRADIENT)
    for unit, kind in (((1, 3, 0), runtime._GRADIENT), ((1, 2, 0), runtime._OUTPUT)):
        with pytest.raises(TrainingError, match="disagree on the order"):
            runtime._await_arrival(message, unit, kind)


def test_the_plan_is_for_the_machines_named():
    strategy = EntrainStrategy(emulate=Emulation(num_nodes=8, devices_per_node=4))
    assert strategy.planned_nodes == (8, 4)
    assert replace(Emulation(), replicas=2).scale is None
