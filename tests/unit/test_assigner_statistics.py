"""`assignment_statistics`: worked numbers, and the same as sums over microbatches done by hand."""

from dataclasses import replace

import numpy as np
import pytest

from entrain_opt.assigner import assign_microbatches
from entrain_opt.assigner.statistics import assignment_statistics, load_spread
from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.plan import PipelineShape

#: A backward costs twice the forward, so a stage of each module spends what its module's forward costs.
SHAPE = PipelineShape(encoder_stages=3, llm_stages=3)
#: Sample 1 has two images, sample 2 none.
COSTS = BatchCosts(
    encoder_seconds=np.array([4.0, 1.0, 1.0, 2.0]),
    llm_seconds=np.array([1.0, 2.0, 3.0, 6.0]),
    media_offsets=np.array([0, 1, 3, 3, 4]),
    media_tokens=np.array([40, 10, 11, 20]),
)
#: Replica 0 has microbatches of 4 + 1 and 1 encoder seconds, replica 1 one microbatch.
ASSIGNMENT = Assignment(
    replica=np.array([0, 0, 0, 1]),
    encoder_microbatch=np.array([0, 0, 1, 0]),
    llm_microbatch=np.array([0, 1, 1, 0]),
    num_microbatches=np.array([2, 1]),
)


def test_worked_numbers():
    ASSIGNMENT.check(COSTS, SHAPE)
    found = assignment_statistics(COSTS, ASSIGNMENT, SHAPE)
    encoder, llm = np.array([5.0, 1.0, 2.0]), np.array([1.0, 5.0, 6.0])
    for spread, loads in ((found.encoder, encoder), (found.llm, llm)):
        assert spread.std_seconds == pytest.approx(loads.std())
        assert spread.coefficient_of_variation == pytest.approx(loads.std() / loads.mean())
        assert spread.max_over_mean == pytest.approx(loads.max() / loads.mean())
    assert (found.deferred_samples, found.deferred_tokens, found.deferred_bytes) == (1, 10, None)


def test_one_replica():
    first = assignment_statistics(COSTS, ASSIGNMENT, SHAPE, replica=0)
    assert (first.encoder.max_over_mean, first.llm.max_over_mean) == pytest.approx((5 / 3, 5 / 3))
    assert (first.deferred_samples, first.deferred_tokens) == (1, 10)
    second = assignment_statistics(COSTS, ASSIGNMENT, SHAPE, replica=1)
    assert (second.encoder.std_seconds, second.llm.max_over_mean, second.deferred_samples) == (0.0, 1.0, 0)


def test_bytes_are_those_of_the_last_stage_of_the_items_own_encoder():
    shape = PipelineShape(encoder_stages=(2, 1), llm_stages=1)
    costs = replace(COSTS, media_encoder=np.array([0, 0, 1, 1]))
    stages = replace(costs.stage_costs(shape), output_bytes=(1.0, 100.0, 1000.0, 7.0))
    waiting = replace(ASSIGNMENT, encoder_microbatch=np.array([0, 0, 0, 0]))
    found = assignment_statistics(replace(costs, stages=stages), waiting, shape)
    assert found.deferred_bytes == 10 * 100.0 + 11 * 1000.0


@pytest.mark.parametrize("policy", ["pairwise", "auto", "in_order"])
def test_every_policy_counts_as_the_assignment_does(policy):
    generator = np.random.default_rng(0)
    costs = BatchCosts(encoder_seconds=generator.lognormal(size=30), llm_seconds=generator.lognormal(size=30))
    assignment = assign_microbatches(costs, SHAPE, num_replicas=2, num_microbatches=4, policy=policy, effort="fast")
    found = assignment_statistics(costs, assignment, SHAPE)
    assert found.deferred_samples == len(assignment.deferred_samples(costs))
    parts = [assignment_statistics(costs, assignment, SHAPE, replica=replica) for replica in range(2)]
    assert found.deferred_tokens == sum(part.deferred_tokens for part in parts)


def test_text_only_and_empty_batches_are_even():
    text = BatchCosts(encoder_seconds=np.zeros(4), llm_seconds=np.ones(4))
    for costs in (text, text.take([])):
        assignment = assign_microbatches(costs, SHAPE, num_microbatches=2, policy="in_order")
        found = assignment_statistics(costs, assignment, SHAPE)
        for spread in (found.encoder, found.llm):
            assert (spread.std_seconds, spread.coefficient_of_variation, spread.max_over_mean) == (0.0, 0.0, 1.0)
    assert load_spread(np.zeros(0)).max_over_mean == 1.0
