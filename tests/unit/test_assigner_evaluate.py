"""The compiled evaluation of placements: what `simulate` says, and infinite where memory limits are broken.

Orders that follow the durations are timed by the scheduler that makes them. It does not know that a link carries one
message at a time, so where messages would queue it is early; elsewhere, and for the other orders, both are equal.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner.evaluate import Evaluator
from entrain_opt.assigner.work import Placement, sample_work
from entrain_opt.assignment import Assignment, BatchCosts, StageCosts
from entrain_opt.errors import AssignmentError, ScheduleError
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule.orders import TIMED_ORDERS
from entrain_opt.simulator import simulate

SCHEDULES = ("eager", "eager_split", "1f1b", "zero_bubble", "gpipe")


def random_case(seed):
    """A batch, its stages and an assignment that may defer and may break the limits."""
    generator = np.random.default_rng(seed)
    num_samples, num_microbatches = int(generator.integers(1, 14)), int(generator.integers(1, 8))
    media_counts = generator.integers(0, 3, num_samples)
    num_media = int(media_counts.sum())
    encoder_stages = tuple(generator.integers(1, 3, generator.integers(1, 4)).tolist())
    llm_stages = int(generator.integers(1, 4))
    num_stages = sum(encoder_stages) + llm_stages
    media_encoder = generator.integers(0, len(encoder_stages), num_media)
    shape = PipelineShape(
        encoder_stages=encoder_stages,
        llm_stages=llm_stages,
        encoder_trained=bool(generator.random() < 0.6),
        stage_ranks=random_ranks(generator, num_stages),
        patches_in_flight=random_limit(generator, 20, 90, sum(encoder_stages)),
        tokens_in_flight=random_limit(generator, 30, 100, llm_stages),
    )
    costs = BatchCosts(
        encoder_seconds=generator.random(num_media) + 0.1,
        llm_seconds=generator.random(num_samples) + 0.1,
        encoder_patches=generator.integers(1, 20, num_media),
        llm_tokens=generator.integers(1, 20, num_samples),
        media_offsets=np.concatenate([[0], np.cumsum(media_counts)]),
        media_encoder=media_encoder,
        stages=random_stages(generator, shape, media_encoder, num_samples) if generator.random() < 0.5 else None,
    )
    llm = generator.integers(0, num_microbatches, num_samples)
    together = llm[costs.media_sample]
    earlier = (together * generator.random(num_media)).astype(np.int64)
    assignment = Assignment(
        replica=np.zeros(num_samples, dtype=np.int64),
        encoder_microbatch=earlier if generator.random() < 0.7 else together,
        llm_microbatch=llm,
        num_microbatches=np.array([num_microbatches]),
    )
    return costs, shape, assignment


def random_ranks(generator, num_stages):
    if generator.random() < 0.7:
        return None
    num_ranks = int(generator.integers(1, num_stages + 1))
    return tuple(stage % num_ranks for stage in range(num_stages))


def random_limit(generator, least, most, num_stages):
    """None, one limit, or one for each stage."""
    kind = generator.integers(0, 3)
    limits = generator.integers(least, most, num_stages).tolist()
    return (None, limits[0], tuple(limits))[kind]


def random_stages(generator, shape, media_encoder, num_samples):
    """Uneven stages with fixed parts and transfers."""
    lengths = [len(media_encoder)] * shape.num_encoder_stages + [num_samples] * shape.llm_stages
    own = [
        media_encoder == shape.encoder_of_stage(stage) if stage < shape.num_encoder_stages else 1
        for stage in range(shape.num_stages)
    ]

    def per_item(share=1.0):
        return tuple(share * generator.random(length) * mine for length, mine in zip(lengths, own, strict=True))

    backward = tuple(
        seconds if has else 0 * seconds for seconds, has in zip(per_item(2.0), shape.has_backward, strict=True)
    )
    return StageCosts(
        num_encoder_stages=shape.num_encoder_stages,
        forward_seconds=per_item(),
        backward_seconds=backward,
        weight_gradient_share=tuple(generator.choice([0.0, 0.25, 0.5], shape.num_stages).tolist()),
        split_share=tuple(generator.choice([0.0, 0.1, 0.3], shape.num_stages).tolist()),
        split_fixed_seconds=tuple((0.1 * generator.random(shape.num_stages)).tolist()),
        forward_fixed_seconds=tuple((0.1 * generator.random(shape.num_stages)).tolist()),
        backward_fixed_seconds=tuple((0.1 * generator.random(shape.num_stages)).tolist()),
        send_seconds=per_item(0.1),
        send_fixed_seconds=0.01,
    )


def placement_of(assignment):
    return Placement(
        encoder_microbatch=assignment.encoder_microbatch,
        llm_microbatch=assignment.llm_microbatch,
        num_microbatches=int(assignment.num_microbatches[0]),
    )


def simulated_seconds(costs, assignment, shape, schedule):
    """Pipeline seconds; infinite where the assignment or the schedule is refused."""
    try:
        assignment.check(costs, shape)
        return simulate(costs, assignment, shape, schedule=schedule).pipeline_seconds
    except (AssignmentError, ScheduleError):
        return np.inf


def without_queues(costs, shape):
    """The same costs with messages that never wait for a link."""
    if costs.stages is None:
        return costs
    none = tuple(0 * seconds for seconds in costs.stages.send_seconds)
    latency = 0.01 if shape.num_ranks == shape.num_stages else 0.0
    return replace(costs, stages=replace(costs.stages, send_seconds=none, send_fixed_seconds=latency))


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_equals_the_simulator(schedule, seed):
    costs, shape, assignment = random_case(seed)
    if schedule in TIMED_ORDERS:
        costs = without_queues(costs, shape)
    evaluator = Evaluator(sample_work(costs, shape), schedule)
    expected = simulated_seconds(costs, assignment, shape, schedule)
    found = evaluator.seconds(placement_of(assignment))
    assert np.isinf(found) == np.isinf(expected)
    if np.isfinite(expected):
        assert found == pytest.approx(expected, rel=1e-6)
    assert evaluator.seconds(placement_of(assignment)) == found


@pytest.mark.parametrize("schedule", TIMED_ORDERS)
@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_fast_cases_equal_the_general_one(schedule, seed):
    costs, shape, assignment = random_case(seed)
    work, placement = sample_work(costs, replace(shape, stage_ranks=None)), placement_of(assignment)
    general = Evaluator(work, schedule, general=True).seconds(placement)
    assert Evaluator(work, schedule).seconds(placement) == general


@pytest.mark.parametrize("schedule", TIMED_ORDERS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_is_never_late_where_messages_queue(schedule, seed):
    costs, shape, assignment = random_case(seed)
    expected = simulated_seconds(costs, assignment, shape, schedule)
    found = Evaluator(sample_work(costs, shape), schedule).seconds(placement_of(assignment))
    assert np.isinf(found) == np.isinf(expected)
    assert found <= expected * (1 + 1e-6)


def test_the_cases_above_meet_every_rule():
    """Both outcomes, limits of either kind, shared ranks, several encoders and deferral are among them."""
    refused, met = 0, set()
    for seed in range(60):
        costs, shape, assignment = random_case(seed)
        refused += np.isinf(simulated_seconds(costs, assignment, shape, "eager"))
        for name, happens in (
            ("per-stage patches", isinstance(shape.patches_in_flight, tuple)),
            ("per-stage tokens", isinstance(shape.tokens_in_flight, tuple)),
            ("one limit", isinstance(shape.tokens_in_flight, int)),
            ("shared ranks", shape.num_ranks < shape.num_stages),
            ("several encoders", shape.num_encoders > 1),
            ("deferral", len(assignment.deferred_samples(costs)) > 0),
            ("frozen", not shape.encoder_trained),
            ("stage costs", costs.stages is not None),
        ):
            if happens:
                met.add(name)
    assert 5 < refused < 55
    assert len(met) == 8


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_text_only_and_no_encoder(schedule):
    llm = np.array([1.0, 2.0, 3.0])
    placement = Placement(encoder_microbatch=np.full(3, -1), llm_microbatch=np.array([0, 1, 1]), num_microbatches=2)
    costs = BatchCosts(encoder_seconds=np.zeros(3), llm_seconds=llm)
    assignment = Assignment(
        replica=np.zeros(3, dtype=np.int64),
        encoder_microbatch=placement.encoder_microbatch,
        llm_microbatch=placement.llm_microbatch,
        num_microbatches=np.array([2]),
    )
    for encoder_stages in (0, 1, 2):
        shape = PipelineShape(encoder_stages=encoder_stages, llm_stages=2)
        found = Evaluator(sample_work(costs, shape), schedule).seconds(placement)
        assert found == pytest.approx(simulate(costs, assignment, shape, schedule=schedule).pipeline_seconds)


def test_zero_costs_take_no_time():
    costs = BatchCosts(encoder_seconds=np.zeros(2), llm_seconds=np.zeros(2), encoder_patches=np.array([3, 3]))
    placement = Placement(encoder_microbatch=np.array([0, 1]), llm_microbatch=np.array([0, 1]), num_microbatches=2)
    assert Evaluator(sample_work(costs, PipelineShape()), "eager").seconds(placement) == 0


@pytest.mark.parametrize("schedule", ["interleaved", "search"])
def test_orders_that_are_not_compiled_count_as_eager(schedule):
    costs, shape, assignment = random_case(4)
    work = sample_work(costs, shape)
    found = Evaluator(work, schedule).seconds(placement_of(assignment))
    assert found == Evaluator(work, "eager").seconds(placement_of(assignment))
