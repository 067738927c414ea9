"""check_schedule notices each way in which a schedule can be wrong."""

from dataclasses import replace

import numpy as np
import pytest
from test_schedule_cases import uniform

from entrain_opt.assignment import BatchCosts
from entrain_opt.errors import ScheduleError
from entrain_opt.schedule import ReplicaSchedule, check_schedule, replica_work, schedule_replica
from entrain_opt.schedule.actions import Backward, BackwardInput, BackwardWeight, Forward


@pytest.fixture
def good():
    costs, assignment, shape = uniform(3, 2)
    work = replica_work(costs, assignment, shape, 0)
    return schedule_replica(work, shape, order="1f1b"), work, shape


def changed(schedule, rank, actions):
    compute = list(schedule.compute)
    compute[rank] = tuple(actions)
    return ReplicaSchedule(compute=tuple(compute), order="by hand")


def test_accepts_a_good_one(good):
    check_schedule(*good)


def test_omitted_repeated_and_foreign_actions(good):
    schedule, work, shape = good
    with pytest.raises(ScheduleError, match=r"expected Backward\(stage=0, microbatch=2, part=0\) 1 times, found 0"):
        check_schedule(changed(schedule, 0, schedule.compute[0][:-1]), work, shape)
    with pytest.raises(ScheduleError, match=r"expected Forward\(stage=0, microbatch=0, part=0\) 1 times, found 2"):
        check_schedule(changed(schedule, 0, (Forward(0, 0), *schedule.compute[0])), work, shape)
    with pytest.raises(ScheduleError, match=r"rank 0 runs Forward\(stage=0, microbatch=7, part=0\)"):
        check_schedule(changed(schedule, 0, (*schedule.compute[0], Forward(0, 7))), work, shape)
    with pytest.raises(ScheduleError, match=r"rank 0 runs Forward\(stage=1, microbatch=0"):
        check_schedule(changed(schedule, 0, schedule.compute[1]), work, shape)
    with pytest.raises(ScheduleError, match="expected 2 ranks, found 1"):
        check_schedule(ReplicaSchedule(compute=schedule.compute[:1], order="by hand"), work, shape)


def test_broken_dependency(good):
    schedule, work, shape = good
    with pytest.raises(ScheduleError, match=r"the orders cannot go on: rank 0 at Backward"):
        check_schedule(changed(schedule, 0, schedule.compute[0][::-1]), work, shape)


def test_split_and_whole_backward_do_not_mix(good):
    schedule, work, shape = good
    half = [BackwardInput(a.stage, a.microbatch) if isinstance(a, Backward) else a for a in schedule.compute[1]]
    with pytest.raises(ScheduleError, match="weight gradients do not run on their own"):
        check_schedule(changed(schedule, 1, half), work, shape)
    with pytest.raises(ScheduleError, match=r"found Backward\(stage=1.*weight gradients run on their own"):
        check_schedule(changed(schedule, 1, (*schedule.compute[1], BackwardWeight(1, 0))), work, shape)
    full = [*half, *(BackwardWeight(1, m) for m in range(3))]
    check_schedule(changed(schedule, 1, full), work, shape)


def test_memory_limit(good):
    schedule, work, shape = good
    costs = BatchCosts(
        encoder_seconds=np.zeros(3), llm_seconds=np.ones(3), encoder_patches=np.zeros(3), llm_tokens=[5] * 3
    )
    check_schedule(schedule, work, replace(shape, tokens_in_flight=10), costs=costs)
    with pytest.raises(ScheduleError, match=r"tokens_in_flight: stage 0 holds 10 tokens .* the limit is 9"):
        check_schedule(schedule, work, replace(shape, tokens_in_flight=9), costs=costs)


def test_memory_limit_counts_the_gradients_that_a_split_backward_keeps(good):
    _, work, shape = good
    costs = BatchCosts(
        encoder_seconds=np.zeros(3), llm_seconds=np.ones(3), encoder_patches=np.zeros(3), llm_tokens=[10] * 3
    )
    schedule = schedule_replica(work, shape, order="zero_bubble")
    assert any(isinstance(action, BackwardInput) for action in schedule.compute[1])
    with pytest.raises(ScheduleError, match=r"stage 1 holds 16 tokens .*BackwardInput.*, the limit is 15"):
        check_schedule(schedule, work, replace(shape, tokens_in_flight=(99, 15)), costs=costs)
