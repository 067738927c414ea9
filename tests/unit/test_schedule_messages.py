"""Both ends of every edge agree, nothing locks, and reductions and steps stand where they must."""

from collections import defaultdict, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedule_cases import cases, uniform

from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.errors import ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule import FIXED_ORDERS, replica_work, schedule_replica, with_messages
from entrain_opt.schedule.actions import Backward, BackwardWeight, Forward, Receive, Reduce, Send, Step


def lists_of(case, order, replica=0, **options):
    costs, assignment, shape = case
    work = replica_work(costs, assignment, shape, replica)
    made = schedule_replica(work, shape, order=order, costs=costs)
    return with_messages(made, work, shape, **options), made, work


def edge_of(message, shape):
    ranks = shape.ranks_of_stages
    forward = message.source_stage < message.target_stage
    return ranks[message.source_stage], ranks[message.target_stage], forward


def replay_both_ends(lists, work, shape):
    """Run all ranks: sends never block, receives are posted in order and matched in order on each edge, a compute
    action waits for every message it needs. Fails on a lock, a mismatch or a missing message."""
    on_wire = defaultdict(deque)
    posted = defaultdict(deque)
    arrived, done = set(), set()
    place = [0] * len(lists)

    def match():
        for edge, queue in posted.items():
            while queue and on_wire[edge]:
                expected, sent = queue.popleft(), on_wire[edge].popleft()
                assert expected == sent, f"edge {edge}: receiver expects {expected}, sender sends {sent}"
                arrived.add(expected)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while place[rank] < len(actions):
                action = actions[place[rank]]
                if isinstance(action, Send):
                    on_wire[edge_of(action.message, shape)].append(action.message)
                elif isinstance(action, Receive):
                    posted[edge_of(action.message, shape)].append(action.message)
                elif not isinstance(action, Reduce | Step):
                    if not inputs_there(action, work, shape, done, arrived):
                        break
                    done.add(action)
                place[rank] += 1
                moved = True
        match()
    assert place == [len(actions) for actions in lists], "locked"
    assert not any(on_wire.values())
    assert not any(posted.values())
    return done


def inputs_there(action, work, shape, done, arrived):
    """By the definition of the dependencies, not by the graph that the schedules are made from."""
    kind, stage, m, p = type(action).__name__, action.stage, action.microbatch, action.part
    ranks, first_llm = shape.ranks_of_stages, shape.num_encoder_stages
    messages = {(x.source_stage, x.target_stage, x.microbatch, x.part) for x in arrived}
    ran = {(type(a).__name__.replace("Input", ""), a.stage, a.microbatch, a.part) for a in done}

    def there(what, source, target, unit_m, unit_p, own_m, own_p):
        if ranks[source] == ranks[target]:
            return (what, source, own_m, own_p) in ran
        return (source, target, unit_m, unit_p) in messages

    if kind == "Forward":
        if stage == first_llm:
            sources = next(u.sources for u in work.llm_units if u.microbatch == m)
            units = [work.encoder_units[i] for i in sources]
            return all(
                there(
                    "Forward", shape.stages_of_encoder(u.encoder)[-1], stage, u.microbatch, u.part, u.microbatch, u.part
                )
                for u in units
            )
        first = stage > first_llm or stage != shape.stages_of_encoder(shape.encoder_of_stage(stage))[0]
        return not first or there("Forward", stage - 1, stage, m, p, m, p)
    if kind == "BackwardWeight":
        return ("Backward", stage, m, p) in ran
    if ("Forward", stage, m, p) not in ran:
        return False
    encoder = shape.encoder_of_stage(stage)
    if encoder is not None and stage == shape.stages_of_encoder(encoder)[-1]:
        unit = next(u for u in work.encoder_units if (u.encoder, u.microbatch, u.part) == (encoder, m, p))
        return there("Backward", first_llm, stage, m, p, unit.consumers[0], 0)
    return stage == shape.num_stages - 1 or there("Backward", stage + 1, stage, m, p, m, p)


@given(case=cases, order=st.sampled_from(FIXED_ORDERS), lookahead=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_both_ends_agree_and_nothing_locks(case, order, lookahead):
    _costs, assignment, shape = case
    for replica in range(assignment.num_replicas):
        lists, made, work = lists_of(case, order, replica, lookahead=lookahead)
        assert replay_both_ends(lists, work, shape) == {action for actions in made.compute for action in actions}
        for actions, compute in zip(lists, made.compute, strict=True):
            assert tuple(a for a in actions if not isinstance(a, Send | Receive | Reduce | Step)) == compute
        messages = [a.message for actions in lists for a in actions if isinstance(a, Send)]
        assert len(messages) == len(set(messages))
        assert all(edge_of(m, shape)[0] != edge_of(m, shape)[1] for m in messages)
        assert all(shape.has_backward[m.target_stage] for m in messages if m.source_stage > m.target_stage), (
            "gradient sent to a stage without a backward"
        )


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_receives_are_posted_ahead(lookahead):
    lists, _, _ = lists_of(uniform(6, 3), "1f1b", lookahead=lookahead)
    middle = lists[1]
    compute = [a for a in middle if isinstance(a, Forward | Backward)]
    for i, action in enumerate(middle):
        if isinstance(action, Receive):
            done = sum(isinstance(a, Forward | Backward) for a in middle[:i])
            message = action.message
            kind = Forward if message.source_stage < message.target_stage else Backward
            assert compute.index(kind(1, message.microbatch)) - done == min(
                lookahead, compute.index(kind(1, message.microbatch))
            )


def test_frozen_output_with_several_consumers_crosses_once():
    costs = BatchCosts(encoder_seconds=np.ones(3), llm_seconds=np.ones(3))
    assignment = Assignment(
        replica=np.zeros(3, dtype=int),
        encoder_microbatch=np.zeros(3, dtype=int),
        llm_microbatch=np.arange(3),
        num_microbatches=np.array([3]),
    )
    shape = PipelineShape(encoder_stages=1, llm_stages=1, encoder_trained=False)
    lists, _, _ = lists_of((costs, assignment, shape), "1f1b")
    assert [type(a).__name__ for a in lists[0]] == ["Forward", "Send"]
    assert sum(isinstance(a, Receive) for a in lists[1]) == 1


def test_split_encoder_backward_returns_one_gradient_per_part():
    costs = BatchCosts(encoder_seconds=np.ones(3), llm_seconds=np.ones(3))
    assignment = Assignment(
        replica=np.zeros(3, dtype=int),
        encoder_microbatch=np.zeros(3, dtype=int),
        llm_microbatch=np.arange(3),
        num_microbatches=np.array([3]),
    )
    lists, _, _ = lists_of((costs, assignment, PipelineShape()), "1f1b")
    gradients = [a.message for a in lists[1] if isinstance(a, Send)]
    assert [(g.microbatch, g.part) for g in gradients] == [(0, 0), (0, 1), (0, 2)]


@given(case=cases, order=st.sampled_from(FIXED_ORDERS))
@settings(max_examples=60, deadline=None)
def test_reductions_in_one_order_on_every_replica_and_steps_last(case, order):
    _costs, assignment, shape = case
    for replica in range(assignment.num_replicas):
        lists, _, _ = lists_of(case, order, replica)
        for rank, actions in enumerate(lists):
            trained = [stage for stage in shape.stages_of_rank(rank) if shape.has_backward[stage]]
            reductions = [a.stage for a in actions if isinstance(a, Reduce)]
            assert reductions == trained[::-1]
            assert [a.stage for a in actions[len(actions) - len(trained) :]] == trained
            for stage in trained:
                behind = actions[actions.index(Reduce(stage)) :]
                assert not any(isinstance(a, Backward | BackwardWeight) and a.stage == stage for a in behind)


def test_a_frozen_stage_that_passes_gradients_is_neither_reduced_nor_stepped():
    lists, _, _ = lists_of(uniform(2, 2), "1f1b", trained_stages=(True, False))
    assert not any(isinstance(a, Reduce | Step) for a in lists[1])
    assert any(isinstance(a, Reduce) for a in lists[0])


def test_errors():
    case = uniform(2, 2, stage_has_backward=(False, True))
    with pytest.raises(ScheduleError, match=r"trained_stages\[0\]: expected False"):
        lists_of(case, "1f1b", trained_stages=(True, True))
    with pytest.raises(ScheduleError, match="trained_stages: expected 2 values, found 1"):
        lists_of(case, "1f1b", trained_stages=(True,))
    with pytest.raises(ScheduleError, match="lookahead: expected at least 0"):
        lists_of(case, "1f1b", lookahead=-1)
