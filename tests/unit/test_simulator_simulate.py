"""Whole iterations: costs per stage, replicas, reductions, steps, memory, bubbles and their causes, traces."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule_cases import cases, random_case, uniform

from entrain_opt.assigner import assign_microbatches
from entrain_opt.assignment import Assignment, BatchCosts, StageCosts
from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule import FIXED_ORDERS, replica_work, schedule_replica
from entrain_opt.simulator import simulate
from entrain_opt.simulator.timeline import BACKWARD, FORWARD, REDUCE, STEP


def stage_costs(costs, shape, **changes):
    return replace(costs, stages=replace(costs.stage_costs(shape), **changes))


@given(case=cases, order=st.sampled_from(FIXED_ORDERS))
@settings(max_examples=120, deadline=None)
def test_idle_time_has_causes_and_everything_runs_once(case, order):
    costs, assignment, shape = case
    timeline = simulate(costs, assignment, shape, schedule=order)
    causes = timeline.bubble_causes()
    assert all((seconds >= -1e-9).all() for seconds in causes.values())
    np.testing.assert_allclose(sum(causes.values()), timeline.idle_seconds, atol=1e-9)
    events = timeline.events
    total = sum(seconds.sum() for seconds in costs.stage_costs(shape).forward_seconds)
    forward = events.kind == FORWARD
    assert (events.end - events.start)[forward].sum() == pytest.approx(total)
    for replica in range(assignment.num_replicas):
        for rank in range(shape.num_ranks):
            mine = (events.replica == replica) & (events.rank == rank) & (events.kind < REDUCE)
            assert (events.start[mine][1:] >= events.end[mine][:-1]).all()
            curve = timeline.memory[replica][rank]
            assert (curve.parts >= -1e-6).all()
            np.testing.assert_allclose(curve.parts[-1:], 0, atol=1e-6)
    assert timeline.table().count("\n") == 1 + assignment.num_replicas * shape.num_ranks


@given(case=cases)
@settings(max_examples=40, deadline=None)
def test_a_schedule_made_before_gives_the_same_timeline(case):
    costs, assignment, shape = case
    for order in FIXED_ORDERS:
        made = [
            schedule_replica(replica_work(costs, assignment, shape, r), shape, order=order, costs=costs)
            for r in range(assignment.num_replicas)
        ]
        first, second = (simulate(costs, assignment, shape, schedule=s) for s in (order, made))
        np.testing.assert_array_equal(first.events.start, second.events.start)
        np.testing.assert_array_equal(first.events.kind, second.events.kind)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_memory_in_units_stays_under_the_limits(seed):
    # Default stage costs hold one byte per patch or token, so peak bytes are patches or tokens.
    costs, assignment, shape = random_case(seed, limited=True)
    if shape.num_ranks < shape.num_stages:
        return
    largest = {"patches": 0, "tokens": 0}
    for replica in range(assignment.num_replicas):
        work = replica_work(costs, assignment, shape, replica)
        for unit in work.encoder_units:
            largest["patches"] = max(largest["patches"], costs.patches[unit.media].sum())
        for unit in work.llm_units:
            largest["tokens"] = max(largest["tokens"], costs.tokens[unit.samples].sum())
    for order in FIXED_ORDERS:
        peak = simulate(costs, assignment, shape, schedule=order).peak_bytes.max(axis=0)
        for stage in range(shape.num_stages):
            is_encoder = stage < shape.num_encoder_stages
            limit = shape.patches_in_flight if is_encoder else shape.tokens_in_flight
            assert peak[shape.ranks_of_stages[stage]] <= max(limit, largest["patches" if is_encoder else "tokens"])


def test_uniform_bubbles_are_fill_and_drain():
    costs, assignment, shape = uniform(8, 4)
    timeline = simulate(costs, assignment, shape)
    assert timeline.bubble_share == pytest.approx(3 / 11)
    assert timeline.bubble_share_of_rank == pytest.approx(np.full((1, 4), 3 / 11))
    causes = timeline.bubble_causes()
    np.testing.assert_allclose(causes["fill"] + causes["drain"], 9.0)


def test_uneven_stages_and_uneven_microbatches_are_told_apart():
    costs, assignment, shape = uniform(12, 3)
    stages = costs.stage_costs(shape)
    slow = stage_costs(costs, shape, forward_seconds=(stages.forward_seconds[0] * 2, *stages.forward_seconds[1:]))
    causes = simulate(slow, assignment, shape).bubble_causes()
    assert causes["stage_imbalance"][0, 1] > 1
    assert causes["microbatch_imbalance"].sum() == pytest.approx(0)
    uneven = replace(costs, llm_seconds=costs.llm_seconds * np.tile([1, 3], 6))
    causes = simulate(uneven, assignment, shape).bubble_causes()
    assert causes["microbatch_imbalance"].sum() > 1
    assert causes["stage_imbalance"].sum() == pytest.approx(0)


def test_waiting_for_deferred_gradients_and_transfers():
    costs = BatchCosts(encoder_seconds=np.ones(2), llm_seconds=np.ones(2))
    assignment = Assignment(
        replica=np.zeros(2, dtype=int),
        encoder_microbatch=np.array([0, 1]),
        llm_microbatch=np.array([1, 1]),
        num_microbatches=np.array([2]),
    )
    causes = simulate(costs, assignment, PipelineShape()).bubble_causes()
    assert causes["deferred_gradients"][0, 0] > 0
    shape = PipelineShape()
    assignment = replace(assignment, llm_microbatch=np.array([0, 1]))
    assert simulate(costs, assignment, shape).bubble_causes()["deferred_gradients"].sum() == 0
    slow = stage_costs(costs, shape, send_fixed_seconds=0.5)
    causes = simulate(slow, assignment, shape).bubble_causes()
    assert causes["communication"][0, 1] == pytest.approx(0.5)


def test_fixed_parts_and_messages_add_up():
    costs, assignment, shape = uniform(1, 3)
    fixed = stage_costs(
        costs,
        shape,
        forward_fixed_seconds=(0.1,) * 3,
        backward_fixed_seconds=(0.2,) * 3,
        send_fixed_seconds=0.01,
        send_seconds=(np.full(1, 0.02),) * 3,
    )
    assert simulate(fixed, assignment, shape).makespan_seconds == pytest.approx(3 * 3.3 + 4 * 0.03)


def two_replicas(first, second, **changes):
    costs = BatchCosts(encoder_seconds=np.zeros(2), llm_seconds=np.array([first, second]), encoder_patches=[0, 0])
    assignment = Assignment(
        replica=np.array([0, 1]),
        encoder_microbatch=np.array([-1, -1]),
        llm_microbatch=np.zeros(2, dtype=int),
        num_microbatches=np.array([1, 1]),
    )
    shape = PipelineShape(encoder_stages=0, llm_stages=1)
    return simulate(stage_costs(costs, shape, **changes), assignment, shape)


def test_the_slowest_replica_decides_when_gradients_are_reduced():
    timeline = two_replicas(1.0, 4.0, reduce_seconds=(0.5,), step_seconds=(0.25,))
    events = timeline.events
    assert timeline.pipeline_seconds == 12.0
    assert set(events.start[events.kind == REDUCE]) == {12.0}
    assert set(events.start[events.kind == STEP]) == {12.5}
    assert timeline.makespan_seconds == 12.75
    assert timeline.bubble_causes()["replica_imbalance"][:, 0].tolist() == [9.0, 0.0]


def test_reductions_overlap_compute_of_other_stages_on_the_rank():
    costs = BatchCosts(encoder_seconds=np.ones(1), llm_seconds=np.ones(1))
    zero = np.zeros(1, dtype=int)
    assignment = Assignment(replica=zero, encoder_microbatch=zero, llm_microbatch=zero, num_microbatches=np.array([1]))
    shape = PipelineShape(stage_ranks=(0, 0))
    timeline = simulate(stage_costs(costs, shape, reduce_seconds=(1.0, 1.0)), assignment, shape)
    events = timeline.events
    reduce = events.kind == REDUCE
    # Forwards 0-2, language-model backward 2-4, encoder backward 4-6.
    assert dict(zip(events.stage[reduce].tolist(), events.start[reduce].tolist(), strict=True)) == {1: 4.0, 0: 6.0}
    assert timeline.makespan_seconds == 7.0


def test_replica_without_samples_still_reduces():
    costs = BatchCosts(encoder_seconds=np.ones(1), llm_seconds=np.ones(1))
    zero = np.zeros(1, dtype=int)
    assignment = Assignment(
        replica=zero, encoder_microbatch=zero, llm_microbatch=zero, num_microbatches=np.array([1, 0])
    )
    timeline = simulate(costs, assignment, PipelineShape())
    events = timeline.events
    assert sorted(events.replica[events.kind == REDUCE].tolist()) == [0, 0, 1, 1]
    assert timeline.bubble_share_of_rank[1].tolist() == [1.0, 1.0]


def test_memory_of_work_that_takes_no_time():
    shape = PipelineShape(encoder_stages=1, llm_stages=1)
    costs = BatchCosts(encoder_seconds=np.zeros(4), llm_seconds=np.zeros(4), llm_tokens=np.full(4, 9))
    costs = stage_costs(costs, shape, activation_bytes=(3.0, 5.0))
    timeline = simulate(costs, assign_microbatches(costs, shape, num_microbatches=2), shape)
    assert timeline.makespan_seconds == 0
    curve = timeline.memory[0][1]
    assert (curve.seconds == 0).all()
    assert len(curve.seconds) == 4
    assert curve.parts[-1].tolist() == [0, 0, 0]


def test_empty_batch():
    empty = np.zeros(0, dtype=int)
    costs = BatchCosts(encoder_seconds=empty, llm_seconds=empty)
    assignment = Assignment(
        replica=empty, encoder_microbatch=empty, llm_microbatch=empty, num_microbatches=np.array([0])
    )
    timeline = simulate(costs, assignment, PipelineShape())
    assert timeline.makespan_seconds == 0
    assert timeline.bubble_share == 0
    assert "iteration" in timeline.table()


def test_memory_counts_weights_activations_waiting_features_and_logits():
    costs = BatchCosts(
        encoder_seconds=np.ones(2),
        llm_seconds=np.full(2, 10.0),
        encoder_patches=[40, 40],
        media_tokens=[10, 10],
        llm_tokens=[100, 100],
        label_tokens=[50, 50],
    )
    assignment = Assignment(
        replica=np.zeros(2, dtype=int),
        encoder_microbatch=np.arange(2),
        llm_microbatch=np.arange(2),
        num_microbatches=np.array([2]),
    )
    shape = PipelineShape(encoder_trained=False)
    full = stage_costs(
        costs,
        shape,
        weight_bytes=(1000.0, 2000.0),
        activation_bytes=(1.0, 3.0),
        output_bytes=(7.0, 0.0),
        logit_bytes=5.0,
    )
    timeline = simulate(full, assignment, shape)
    # The frozen encoder holds one microbatch at a time (and sends in no time); while the first language-model
    # microbatch runs on its features, the features of the second wait.
    assert timeline.peak_bytes[0, 0] == 1000 + 40
    assert timeline.peak_bytes[0, 1] == 2000 + 3 * 100 + 2 * 7 * 10 + 5 * 50


def test_errors():
    costs, assignment, shape = uniform(2, 2)
    made = schedule_replica(replica_work(costs, assignment, shape, 0), shape, order="1f1b")
    with pytest.raises(ScheduleError, match="one schedule for each of 1 replicas, found 2"):
        simulate(costs, assignment, shape, schedule=[made, made])
    with pytest.raises(ScheduleError, match="expected one of"):
        simulate(costs, assignment, shape, schedule="unknown")
    wrong = replace(costs, stages=costs.stage_costs(shape))
    with pytest.raises(ScheduleError, match="expected costs of 3 stages, found 2"):
        simulate(wrong, assignment, PipelineShape(encoder_stages=0, llm_stages=3))


def test_stage_costs_without_optional_parts():
    costs, assignment, shape = uniform(2, 1)
    bare = StageCosts(
        num_encoder_stages=0,
        forward_seconds=(np.ones(2),),
        backward_seconds=(np.ones(2),),
        weight_gradient_share=(0.5,),
        forward_fixed_seconds=(0.0,),
        backward_fixed_seconds=(0.0,),
        send_seconds=(np.zeros(2),),
    )
    timeline = simulate(replace(costs, stages=bare), assignment, shape)
    assert timeline.makespan_seconds == 4
    assert timeline.peak_bytes.tolist() == [[0.0]]


def test_trace(tmp_path):
    costs = BatchCosts(encoder_seconds=np.ones(3), llm_seconds=np.ones(3))
    assignment = Assignment(
        replica=np.zeros(3, dtype=int),
        encoder_microbatch=np.arange(3),
        llm_microbatch=np.array([1, 1, 2]),
        num_microbatches=np.array([3]),
    )
    timeline = simulate(costs, assignment, PipelineShape())
    timeline.write_trace(tmp_path / "deep" / "trace.json")
    events = json.loads((tmp_path / "deep" / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    assert {e["name"] for e in slices if e["tid"] == 0} >= {"F 0", "B 2", "step"}
    names = {e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert {"replica 0", "rank 0: encoder 0", "rank 1: llm 0"} <= names
    arrows = [(e["name"], e["ph"]) for e in events if e.get("cat") == "deferral"]
    assert arrows == [
        ("deferred", "s"),
        ("deferred", "f"),
        ("gradient of deferred", "s"),
        ("gradient of deferred", "f"),
    ]
    backward = next(e for e in slices if e["cat"] == "backward" and e["tid"] == 0)
    assert backward["dur"] == pytest.approx(2e6)
    assert any(e["ph"] == "C" and e["name"] == "rank 1 bytes" for e in events)
    assert (timeline.events.kind == BACKWARD).sum() == 5
