"""The timing core: transfers overlap compute, links carry one message at a time, circles are named."""

import numpy as np
import pytest
from test_schedule_cases import uniform

from entrain_opt.errors import ScheduleError
from entrain_opt.schedule import replica_work
from entrain_opt.schedule.graph import work_graph
from entrain_opt.schedule.orders import fixed_order
from entrain_opt.schedule.replay import replay


def play(num_microbatches, num_stages, transfer_seconds, order="gpipe", **stages):
    costs, assignment, shape = uniform(num_microbatches, num_stages, **stages)
    graph = work_graph(replica_work(costs, assignment, shape, 0), shape)
    durations = [1.0] * graph.num_slots + [2.0] * (2 * graph.num_slots)
    orders = fixed_order(graph, order, None)
    return graph, replay(graph, orders, durations, [transfer_seconds] * graph.num_slots)


def test_transfers_shorter_than_compute_only_delay_the_start():
    graph, times = play(4, 2, 0.5)
    second_stage = times.start[graph.stage_first[1] : graph.stage_first[2]].tolist()
    assert second_stage == [1.5, 2.5, 3.5, 4.5]


def test_a_link_carries_one_message_at_a_time():
    graph, times = play(4, 2, 3.0)
    second_stage = times.start[graph.stage_first[1] : graph.stage_first[2]].tolist()
    # The first output is there at 1 + 3; each later one queues behind the transfer before it.
    assert second_stage == [4.0, 7.0, 10.0, 13.0]
    assert times.sent[: graph.stage_first[1]].tolist() == [4.0, 7.0, 10.0, 13.0]


def test_directions_do_not_share_a_link():
    _, both = play(1, 2, 5.0)
    assert both.makespan_seconds == 1 + 5 + 1 + 2 + 5 + 2


def test_stages_of_one_rank_exchange_nothing():
    _, times = play(3, 2, 100.0, stage_ranks=(0, 0))
    assert times.makespan_seconds == 3 * 2 * 3


def test_circle_names_the_blocked_ranks():
    costs, assignment, shape = uniform(2, 2)
    graph = work_graph(replica_work(costs, assignment, shape, 0), shape)
    orders = [order[::-1] for order in fixed_order(graph, "1f1b", None)]
    with pytest.raises(ScheduleError, match=r"cannot go on: rank 0 at Backward\(.*, rank 1 at Backward\("):
        replay(graph, orders, [1.0] * (3 * graph.num_slots), [0.0] * graph.num_slots)


def test_scaling_all_times_scales_the_result():
    costs, assignment, shape = uniform(5, 3)
    graph = work_graph(replica_work(costs, assignment, shape, 0), shape)
    orders = fixed_order(graph, "1f1b", None)
    durations = np.random.default_rng(0).uniform(0, 1, 3 * graph.num_slots)
    transfer = np.full(graph.num_slots, 0.25)
    once = replay(graph, orders, durations, transfer)
    twice = replay(graph, orders, 2 * durations, 2 * transfer)
    assert twice.makespan_seconds == 2 * once.makespan_seconds
