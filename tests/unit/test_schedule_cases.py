"""Random work for the schedule and simulator tests, and a test that it covers what it should."""

import numpy as np
from hypothesis import strategies as st

from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.plan import PipelineShape
from entrain_opt.schedule import replica_work
from entrain_opt.schedule.admission import check_limits
from entrain_opt.schedule.graph import slot_amounts, work_graph


def uniform(num_microbatches, num_stages, *, stage_ranks=None, forward=1.0, **stages):
    """One sample per microbatch, every forward of a stage takes `forward` seconds, every backward twice that."""
    count = num_microbatches
    costs = BatchCosts(
        encoder_seconds=np.zeros(count),
        llm_seconds=np.full(count, forward * num_stages),
        encoder_patches=np.zeros(count),
    )
    assignment = Assignment(
        replica=np.zeros(count, dtype=int),
        encoder_microbatch=np.full(count, -1),
        llm_microbatch=np.arange(count),
        num_microbatches=np.array([count]),
    )
    return costs, assignment, PipelineShape(encoder_stages=0, llm_stages=num_stages, stage_ranks=stage_ranks, **stages)


def random_case(seed, *, limited=None):
    """A batch, an assignment and a shape: deferral, frozen prefixes, several encoders, shared ranks, empty replicas."""
    rng = np.random.default_rng(seed)
    num_samples, num_replicas = int(rng.integers(0, 14)), int(rng.integers(1, 3))
    encoders = tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 3))) or 0
    num_encoders = len(encoders) if encoders else 0
    llm_stages = int(rng.integers(1, 5))
    num_stages = (sum(encoders) if encoders else 0) + llm_stages
    ranks = None
    if rng.random() < 0.5:
        num_ranks = int(rng.integers(1, num_stages + 1))
        ranks = [*range(num_ranks), *rng.integers(0, num_ranks, num_stages - num_ranks).tolist()]
        rng.shuffle(ranks)
    has_backward, any_trained = [], False
    for count in encoders or ():
        frozen = int(rng.integers(0, count + 1))
        has_backward += [False] * frozen + [True] * (count - frozen)
        any_trained |= frozen < count
    frozen = 0 if any_trained else int(rng.integers(0, llm_stages + 1))
    has_backward += [False] * frozen + [True] * (llm_stages - frozen)
    media_counts = rng.integers(0, 3, num_samples) * bool(num_encoders)
    num_media = int(media_counts.sum())
    num_microbatches = int(rng.integers(1, 9))
    llm_microbatch = rng.integers(0, num_microbatches, num_samples)
    consumer = llm_microbatch[np.repeat(np.arange(num_samples), media_counts)]
    costs = BatchCosts(
        encoder_seconds=rng.uniform(0.1, 3, num_media),
        llm_seconds=rng.uniform(0.1, 3, num_samples),
        encoder_patches=rng.integers(1, 20, num_media),
        llm_tokens=rng.integers(1, 50, num_samples),
        media_offsets=np.concatenate([[0], np.cumsum(media_counts)]),
        media_encoder=rng.integers(0, max(num_encoders, 1), num_media),
    )
    assignment = Assignment(
        replica=rng.integers(0, num_replicas, num_samples),
        encoder_microbatch=np.maximum(consumer - rng.integers(0, 4, num_media), 0),
        llm_microbatch=llm_microbatch,
        num_microbatches=np.full(num_replicas, num_microbatches),
    )
    limits = {}
    if rng.random() < 0.6 if limited is None else limited:
        limits = {"patches_in_flight": int(rng.integers(1, 80)), "tokens_in_flight": int(rng.integers(1, 150))}
    shape = PipelineShape(
        encoder_stages=encoders,
        llm_stages=llm_stages,
        stage_ranks=None if ranks is None else tuple(ranks),
        stage_has_backward=tuple(has_backward),
        **limits,
    )
    if limits:
        shape = _feasible(costs, assignment, shape)
    assignment.check(costs)
    return costs, assignment, shape


def _feasible(costs, assignment, shape):
    """The least encoder limit that can work, if the drawn one cannot."""
    from dataclasses import replace

    from entrain_opt.errors import ScheduleError

    for replica in range(assignment.num_replicas):
        graph = work_graph(replica_work(costs, assignment, shape, replica), shape)
        limits = [shape.patches_in_flight if s < shape.num_encoder_stages else None for s in range(shape.num_stages)]
        try:
            check_limits(graph, limits, slot_amounts(graph, costs))
        except ScheduleError as error:
            least = int(str(error).split("Allow at least ")[1].split()[0])
            return _feasible(costs, assignment, replace(shape, patches_in_flight=least))
    return shape


cases = st.builds(random_case, st.integers(0, 2**32 - 1))
"""(costs, assignment, shape)"""


def test_cases_cover_what_they_should():
    drawn = [random_case(seed) for seed in range(200)]
    shapes = [shape for _, _, shape in drawn]
    assert any(len(assignment.deferred_samples(costs)) for costs, assignment, _ in drawn)
    assert any(shape.num_encoders == 2 for shape in shapes)
    assert any(shape.num_encoders == 0 for shape in shapes)
    assert any(shape.num_ranks == 1 < shape.num_stages for shape in shapes)
    assert any(not any(shape.has_backward) for shape in shapes)
    assert any(costs.num_samples == 0 for costs, _, _ in drawn)
    assert any(shape.tokens_in_flight is not None for shape in shapes)
