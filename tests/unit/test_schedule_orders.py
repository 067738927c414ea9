"""Every order does the work, keeps dependencies and limits; the textbook cases come out exactly."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from test_schedule_cases import cases, random_case, uniform

from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule import FIXED_ORDERS, check_schedule, replica_work, schedule_replica
from entrain_opt.schedule.actions import Backward, BackwardInput, BackwardWeight, Forward
from entrain_opt.schedule.orders import SPLITTING_ORDERS
from entrain_opt.simulator import simulate
from entrain_opt.simulator.timeline import KINDS

#: The scheduler's ticks are this near to seconds in the cases here.
ROUNDING_SECONDS = 1e-2


def schedule(costs, assignment, shape, order, replica=0):
    work = replica_work(costs, assignment, shape, replica)
    return schedule_replica(work, shape, order=order, costs=costs), work


@given(case=cases)
@settings(max_examples=120, deadline=None)
def test_every_order_is_a_correct_schedule(case):
    costs, assignment, shape = case
    for replica in range(assignment.num_replicas):
        for order in FIXED_ORDERS:
            made, work = schedule(costs, assignment, shape, order, replica)
            check_schedule(made, work, shape, costs=costs)
            assert made == schedule(costs, assignment, shape, order, replica)[0]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 11])
def test_1f1b_is_the_textbook_order(num_microbatches, num_stages):
    costs, assignment, shape = uniform(num_microbatches, num_stages)
    made, _ = schedule(costs, assignment, shape, "1f1b")
    for stage, actions in enumerate(made.compute):
        warm_up = min(num_microbatches, num_stages - stage)
        expected = [Forward(stage, m) for m in range(warm_up)]
        for m in range(num_microbatches):
            expected.append(Backward(stage, m))
            if m + warm_up < num_microbatches:
                expected.append(Forward(stage, m + warm_up))
        assert list(actions) == expected


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("order", ["1f1b", "gpipe", "eager", "interleaved"])
def test_uniform_makespan(order, num_microbatches, num_stages):
    costs, assignment, shape = uniform(num_microbatches, num_stages, forward=0.25)
    timeline = simulate(costs, assignment, shape, schedule=order)
    assert timeline.makespan_seconds == (num_microbatches + num_stages - 1) * 0.75


@pytest.mark.parametrize(("num_ranks", "chunks"), [(2, 2), (4, 2), (4, 3), (3, 4), (8, 2)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_interleaved_makespan(num_ranks, chunks, groups):
    ranks = tuple(range(num_ranks)) * chunks
    num_microbatches = groups * num_ranks
    costs, assignment, shape = uniform(num_microbatches, num_ranks * chunks, stage_ranks=ranks)
    timeline = simulate(costs, assignment, shape, schedule="interleaved")
    per_rank = 3.0 * chunks
    assert timeline.makespan_seconds == num_microbatches * per_rank + (num_ranks - 1) * per_rank / chunks


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("extra", [0, 1, 5, 20])
def test_zero_bubble_makespan_with_the_memory_of_1f1b(num_stages, extra):
    num_microbatches = num_stages + extra
    costs, assignment, shape = uniform(num_microbatches, num_stages)
    made, _ = schedule(costs, assignment, shape, "zero_bubble")
    timeline = simulate(costs, assignment, shape, schedule=made)
    assert timeline.makespan_seconds == 3 * num_microbatches + (num_stages - 1)
    for actions in made.compute:
        held = most = 0
        for action in actions:
            held += isinstance(action, Forward) - isinstance(action, Backward | BackwardWeight)
            most = max(most, held)
        assert most <= num_stages


def test_a_backward_is_split_where_memory_has_room_for_the_gradients_it_keeps():
    costs, assignment, shape = uniform(3, 2)
    costs = replace(costs, llm_tokens=np.full(3, 10))
    for limit, kinds in ((16, {Forward, BackwardInput, BackwardWeight}), (15, {Forward, Backward})):
        limited = replace(shape, tokens_in_flight=(100, limit))
        made, work = schedule(costs, assignment, limited, "zero_bubble")
        check_schedule(made, work, limited, costs=costs)
        assert {type(action) for action in made.compute[1]} == kinds
        assert {type(action) for action in made.compute[0]} == {Forward, Backward}  # Nothing gets its input gradients.
        assert simulate(costs, assignment, limited, schedule=made).peak_bytes[0, 1] == (16 if limit == 16 else 10)


@settings(max_examples=150, deadline=None)
@given(case=cases)
def test_eager_split_splits_for_ranks_that_wait(case):
    costs, assignment, shape = case
    timeline = simulate(costs, assignment, shape, schedule="eager_split")
    events, kinds = timeline.events, [KINDS[kind] for kind in timeline.events.kind]
    backwards = np.array([kind in ("backward", "backward_input") for kind in kinds])
    for event in np.flatnonzero([kind == "backward_input" for kind in kinds]):
        stage, now = int(events.stage[event]), events.start[event]
        upstream = (
            [stages[-1] for stages in map(shape.stages_of_encoder, range(shape.num_encoders))]
            if stage == shape.num_encoder_stages
            else [stage - 1]
        )
        ranks = {shape.ranks_of_stages[s] for s in upstream} - {int(events.rank[event])}
        ready = backwards & (events.arrived < now - ROUNDING_SECONDS) & (events.start > now + ROUNDING_SECONDS)
        ready &= events.replica == events.replica[event]
        assert any(not ready[events.rank == rank].any() for rank in ranks)


def test_eager_split_gains_with_fewer_splits():
    costs, assignment, shape = uniform(32, 8)
    spans = {order: simulate(costs, assignment, shape, schedule=order).makespan_seconds for order in FIXED_ORDERS}
    splits = {
        order: sum(
            isinstance(action, BackwardInput)
            for actions in schedule(costs, assignment, shape, order)[0].compute
            for action in actions
        )
        for order in SPLITTING_ORDERS
    }
    assert spans["eager_split"] < 0.9 * spans["eager"]
    assert 0 < splits["eager_split"] < 0.9 * splits["zero_bubble"]


@pytest.mark.parametrize("order", SPLITTING_ORDERS)
def test_what_splitting_costs(order):
    costs, assignment, shape = uniform(8, 4)

    def priced(share, fixed):
        stages = replace(costs.stage_costs(shape), split_share=(share,) * 4, split_fixed_seconds=(fixed,) * 4)
        return replace(costs, stages=stages)

    # The weight gradients take half of the two seconds of a backward.
    for share, fixed in ((0.25, 0.0), (0.0, 0.5)):
        events = simulate(priced(share, fixed), assignment, shape, schedule=order).events
        input_kind, weight_kind = KINDS.index("backward_input"), KINDS.index("backward_weight")
        assert (events.kind == weight_kind).any()
        assert np.allclose((events.end - events.start)[events.kind == input_kind], 1.5)
        assert np.allclose((events.end - events.start)[events.kind == weight_kind], 1.0)
    for share, fixed in ((0.5, 0.0), (0.0, 1.0), (0.4, 0.3)):
        made, _ = schedule(priced(share, fixed), assignment, shape, order)
        assert not any(isinstance(action, BackwardInput | BackwardWeight) for rank in made.compute for action in rank)


def test_encoder_depth_counts_the_language_model():
    costs = BatchCosts(encoder_seconds=np.ones(8), llm_seconds=np.ones(8))
    assignment = in_order(8)
    shape = PipelineShape(encoder_stages=2, llm_stages=2)
    made, _ = schedule(costs, assignment, shape, "1f1b")
    ahead = [next(i for i, a in enumerate(actions) if isinstance(a, Backward)) for actions in made.compute]
    assert ahead == [4, 3, 2, 1]


def in_order(count, *, deferred=None):
    deferred = np.arange(count) if deferred is None else np.asarray(deferred)
    return Assignment(
        replica=np.zeros(count, dtype=int),
        encoder_microbatch=np.arange(count),
        llm_microbatch=deferred,
        num_microbatches=np.array([count]),
    )


@pytest.mark.parametrize("order", FIXED_ORDERS)
def test_deferral_beyond_the_warm_up_does_not_lock(order):
    # The first language-model microbatch needs the last encoder microbatch: a fixed warm-up count would deadlock.
    costs = BatchCosts(encoder_seconds=np.ones(6), llm_seconds=np.ones(6))
    assignment = in_order(6, deferred=[5] * 6)
    shape = PipelineShape(encoder_stages=1, llm_stages=1)
    made, work = schedule(costs, assignment, shape, order)
    check_schedule(made, work, shape)


@pytest.mark.parametrize("order", FIXED_ORDERS)
def test_one_rank_holds_everything(order):
    costs = BatchCosts(encoder_seconds=np.ones(5), llm_seconds=np.ones(5))
    shape = PipelineShape(encoder_stages=1, llm_stages=1, stage_ranks=(0, 0))
    made, work = schedule(costs, in_order(5), shape, order)
    check_schedule(made, work, shape)
    assert simulate(costs, in_order(5), shape, schedule=order).bubble_share == pytest.approx(0)


@pytest.mark.parametrize("order", FIXED_ORDERS)
def test_a_replica_without_samples_has_empty_lists(order):
    costs = BatchCosts(encoder_seconds=np.ones(1), llm_seconds=np.ones(1))
    assignment = replace(in_order(1), num_microbatches=np.array([1, 0]))
    made, work = schedule(costs, assignment, PipelineShape(), order, replica=1)
    assert made.compute == ((), ())
    check_schedule(made, work, PipelineShape())


def test_frozen_prefix_runs_no_backward():
    shape = PipelineShape(encoder_stages=2, llm_stages=2, stage_has_backward=(False, True, True, True))
    costs = BatchCosts(encoder_seconds=np.ones(4), llm_seconds=np.ones(4))
    for order in FIXED_ORDERS:
        made, _ = schedule(costs, in_order(4), shape, order)
        assert all(isinstance(action, Forward) for action in made.compute[0])
        # Nobody waits for the input gradients of the first trained stage, so its backward is never split.
        assert not any(isinstance(action, BackwardInput) for action in made.compute[1])


def test_forward_only():
    shape = PipelineShape(encoder_stages=1, llm_stages=2, stage_has_backward=(False,) * 3)
    costs = BatchCosts(encoder_seconds=np.ones(4), llm_seconds=np.ones(4))
    for order in FIXED_ORDERS:
        made, work = schedule(costs, in_order(4), shape, order)
        check_schedule(made, work, shape)
        assert all(len(actions) == 4 for actions in made.compute)


def test_limits_are_kept_and_one_unit_alone_may_run():
    costs = BatchCosts(encoder_seconds=np.ones(6), llm_seconds=np.ones(6), encoder_patches=[9] * 6, llm_tokens=[7] * 6)
    shape = PipelineShape(encoder_stages=2, llm_stages=2, patches_in_flight=1, tokens_in_flight=1)
    for order in FIXED_ORDERS:
        made, work = schedule(costs, in_order(6), shape, order)
        check_schedule(made, work, shape, costs=costs)
        held = most = 0
        for action in made.compute[0]:
            held += isinstance(action, Forward) - isinstance(action, Backward)
            most = max(most, held)
        assert most == 1


def test_eager_goes_as_far_ahead_as_memory_allows():
    costs = BatchCosts(encoder_seconds=np.full(9, 0.1), llm_seconds=np.ones(9), encoder_patches=[10] * 9)
    shape = PipelineShape(encoder_stages=1, llm_stages=1, patches_in_flight=50)
    made, _ = schedule(costs, in_order(9), shape, "eager")
    assert [isinstance(action, Forward) for action in made.compute[0][:6]] == [True] * 5 + [False]


def test_impossible_limit_names_the_least_that_would_do():
    costs = BatchCosts(encoder_seconds=np.ones(3), llm_seconds=np.ones(3), encoder_patches=[10, 20, 30])
    shape = PipelineShape(encoder_stages=1, llm_stages=1, patches_in_flight=59)
    assignment = in_order(3, deferred=[2, 2, 2])
    with pytest.raises(ScheduleError, match=r"patches_in_flight: stage 0 may hold 59 .* microbatch 2 .*at least 60 "):
        schedule(costs, assignment, shape, "1f1b")
    for order in FIXED_ORDERS:
        enough = replace(shape, patches_in_flight=60)
        made, work = schedule(costs, assignment, enough, order)
        check_schedule(made, work, enough, costs=costs)


def test_least_limit_is_enough_for_every_order():
    for seed in range(40):
        costs, assignment, shape = random_case(seed, limited=True)
        for replica in range(assignment.num_replicas):
            for order in FIXED_ORDERS:
                made, work = schedule(costs, assignment, shape, order, replica)
                check_schedule(made, work, shape, costs=costs)


def test_errors_say_what_to_do():
    costs, assignment, shape = uniform(2, 2)
    work = replica_work(costs, assignment, shape, 0)
    with pytest.raises(ScheduleError, match=r"expected one of .*'1f1b'.*found '2f2b'"):
        schedule_replica(work, shape, order="2f2b")
    with pytest.raises(ScheduleError, match="costs: expected the batch costs"):
        schedule_replica(work, replace(shape, tokens_in_flight=3), order="1f1b")
    with pytest.raises(ScheduleError, match="costs: order 'search'"):
        schedule_replica(work, shape, order="search")
    broken = replace(shape, stage_has_backward=(True, False))
    with pytest.raises(ScheduleError, match="stage 0 runs a backward but stage 1"):
        schedule_replica(work, broken, order="1f1b")
