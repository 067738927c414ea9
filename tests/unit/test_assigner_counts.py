"""The choice of the number of microbatches."""

import numpy as np
import pytest

from entrain_opt.assigner.counts import choose_placement, estimate_iteration_seconds
from entrain_opt.assigner.pairwise import place_pairwise
from entrain_opt.assigner.peers import place_in_order
from entrain_opt.assigner.work import sample_work
from entrain_opt.assignment import BatchCosts, StageCosts
from entrain_opt.plan import PipelineShape


def uniform_work(num_samples, shape, fixed_seconds=0.0):
    costs = BatchCosts(encoder_seconds=np.full(num_samples, 2.0), llm_seconds=np.full(num_samples, 4.0))
    stages = costs.stage_costs(shape)
    values = {name: getattr(stages, name) for name in StageCosts.__dataclass_fields__}
    values["forward_fixed_seconds"] = (fixed_seconds,) * shape.num_stages
    return sample_work(
        BatchCosts(encoder_seconds=costs.encoder_seconds, llm_seconds=costs.llm_seconds, stages=StageCosts(**values)),
        shape,
    )


def test_estimate_is_the_closed_form_on_uniform_stages():
    shape = PipelineShape(encoder_stages=1, llm_stages=2)
    work = uniform_work(8, shape, fixed_seconds=0.5)
    placement = place_in_order(work, 4)  # 2 samples in each: 3 * 2 * 2 + 0.5 seconds on each of 3 stages
    assert estimate_iteration_seconds(work, placement) == pytest.approx((4 + 3 - 1) * 12.5)


def test_estimate_is_at_least_the_way_of_the_largest_microbatch_through_all_stages():
    costs = BatchCosts(encoder_seconds=np.array([90.0, 1, 1, 1]), llm_seconds=np.array([60.0, 1, 1, 1]))
    work = sample_work(costs, PipelineShape(encoder_stages=3, llm_stages=2))
    assert estimate_iteration_seconds(work, place_in_order(work, 4)) >= 3 * (90 + 60)


def test_modules_on_one_rank_add_up():
    work = uniform_work(8, PipelineShape(encoder_stages=1, llm_stages=1, stage_ranks=(0, 0)))
    assert estimate_iteration_seconds(work, place_in_order(work, 4)) == pytest.approx(3 * (2 + 4) * 8)


def test_fixed_costs_make_fewer_microbatches_the_better_answer():
    shape = PipelineShape(encoder_stages=1, llm_stages=2)
    counts = [
        choose_placement(uniform_work(64, shape, seconds), place_in_order).num_microbatches for seconds in (0, 5, 500)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 24
    assert counts[2] == 3


def test_a_cap_on_tokens_in_flight_asks_for_more_microbatches():
    free = PipelineShape(encoder_stages=1, llm_stages=4)
    tight = PipelineShape(encoder_stages=1, llm_stages=4, tokens_in_flight=8)
    few = choose_placement(uniform_work(64, free, 20), place_pairwise).num_microbatches
    many = choose_placement(uniform_work(64, tight, 20), place_pairwise).num_microbatches
    assert few < many
