"""Ranks that wait instead of computing run the same schedules with the same messages."""

import pytest
from cases import MIXED_TILES, SPLITS, SyntheticReader, make_plan, write_model
from ranks import run_ranks

from entrain_opt import simulate
from entrain_opt.assigner import assign_microbatches
from entrain_opt.cost import CostModel
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.lightning.iteration import IterationRunner
from entrain_opt.runtime.batches import RankBatchBuilder
from entrain_opt.runtime.emulation import EmulatedExecutor, StandInModel
from entrain_opt.runtime.families import read_family
from entrain_opt.runtime.p2p import make_groups
from entrain_opt.spec import ClusterSpec, ModelSpec

#: Predicted seconds of these models are microseconds: waits stay near a millisecond.
SCALE = 3.0
ROWS = list(range(10))


def costs_of(plan):
    return CostModel(ModelSpec.from_pretrained(plan.model, frozen=plan.frozen), ClusterSpec(device="cpu"))


def emulate(plans):
    """On each rank: wall and predicted seconds of each plan's iteration, and its metrics."""
    found = []
    for plan in plans:
        groups = make_groups(plan)
        builder = RankBatchBuilder(
            samples=SyntheticReader(MIXED_TILES).table(),
            reader=None,
            family=None,
            plan=plan,
            cost_model=costs_of(plan),
            replica=groups.replica,
            pipeline_rank=groups.pipeline_rank,
        )
        model = StandInModel(plan, plan.pipeline_shape.stages_of_rank(groups.pipeline_rank))
        runner = IterationRunner(model, groups, executor=EmulatedExecutor(model, groups, scale=SCALE))
        batch = builder.build(ROWS)
        assert not batch.pixels
        assert not batch.texts
        metrics = runner.train(batch)
        runner.restore_gradients()
        found.append((metrics.iteration_seconds, metrics.predicted_seconds, float(runner.evaluate(batch))))
    return found


def simulated(plan):
    costs = costs_of(plan).batch_costs(SyntheticReader(MIXED_TILES).table().take(ROWS), plan)
    assignment = assign_microbatches(
        costs,
        plan.pipeline_shape,
        num_replicas=plan.degrees.data,
        num_microbatches=plan.num_microbatches,
        policy=plan.policy,
        schedule=plan.schedule,
    )
    return simulate(costs, assignment, plan.pipeline_shape, schedule=plan.schedule)


def check(plans, results_of_ranks):
    """The prediction is the simulator's, and no rank is faster than that: waits do not end early."""
    for index, plan in enumerate(plans):
        timeline = simulated(plan)
        for results in results_of_ranks:
            wall, predicted, loss = results[index]
            assert predicted == pytest.approx(timeline.makespan_seconds, abs=2e-9)
            assert wall >= SCALE * timeline.busy_seconds.sum(axis=1).max() / plan.degrees.pipeline
            assert loss == 0


def test_every_schedule_on_one_rank_and_on_two(tmp_path):
    folder = write_model(tmp_path / "plain")
    schedules = ("1f1b", "gpipe", "eager", "eager_split", "zero_bubble", "search")
    plans = [make_plan(folder, SPLITS[1], schedule=schedule) for schedule in schedules]
    check(plans, [emulate(plans)])
    # The iteration ends after the last action of the only rank: never before the simulator's time.
    for plan, (wall, _, _) in zip(plans, emulate(plans), strict=True):
        assert wall >= SCALE * simulated(plan).makespan_seconds
    plans = [make_plan(folder, SPLITS[2], schedule=schedule) for schedule in schedules]
    plans += [make_plan(folder, SPLITS[2], frozen=("vision_tower",)), make_plan(folder, SPLITS[1], data=2)]
    check(plans, run_ranks(emulate, 2, plans))


def test_a_batch_with_content_is_refused(tmp_path):
    plan = make_plan(write_model(tmp_path / "plain"), SPLITS[1])
    reader = SyntheticReader(MIXED_TILES)
    batch = RankBatchBuilder(
        samples=reader.table(),
        reader=reader,
        family=read_family(plan.model),
        plan=plan,
        cost_model=costs_of(plan),
        replica=0,
        pipeline_rank=0,
    ).build(ROWS)
    model = StandInModel(plan, (0, 1))
    with pytest.raises(RuntimeConfigError, match="action_seconds"):
        EmulatedExecutor(model, make_groups(plan), scale=1.0).run(batch, training=True)
