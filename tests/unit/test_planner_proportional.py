"""The paper's rule: whole ranks in proportion to work, and Algorithm 1 judged on regret."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import make_costs, make_model, make_plan, make_samples

from entrain_opt.errors import PlanError
from entrain_opt.planner.proportional import allocate_ranks
from entrain_opt.planner.stability import num_trials, plan_stability


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=4), st.integers(4, 16))
def test_all_ranks_are_given_and_every_module_has_one(work, num_ranks):
    ranks = allocate_ranks(work, num_ranks, [16] * len(work))
    assert sum(ranks) == num_ranks
    assert min(ranks) >= 1
    shares = num_ranks * np.array(work) / sum(work)
    if shares.min() >= 1:
        assert np.abs(np.array(ranks) - shares).max() < 1


@pytest.mark.parametrize(
    ("work", "expected"), [((5, 3), (5, 3)), ((1, 1), (4, 4)), ((0, 1), (1, 7)), ((99, 1), (7, 1))]
)
def test_proportions(work, expected):
    assert allocate_ranks(work, 8, (32, 28)) == expected


def test_no_module_gets_more_ranks_than_layers():
    assert allocate_ranks((99, 1), 8, (4, 28)) == (4, 4)


def test_the_papers_59_trials():
    assert num_trials(0.95, 0.05) == 59 == math.ceil(math.log(0.05) / math.log(0.95))
    with pytest.raises(PlanError, match="between 0 and 1"):
        num_trials(1.0, 0.05)


def test_even_data_is_stable_at_once_and_uneven_data_later():
    costs = make_costs(devices=4)
    plan = make_plan([("vision", 0, 4, 0), ("vision", 4, 8, 1), ("vision", 8, 12, 2), ("llm", 0, 6, 3)])
    same = make_samples(1)
    alike = plan_stability(plan, same.take(np.zeros(50, dtype=np.int64)), costs, tolerance=10.0)
    assert alike.batch_size == alike.same_split_size == 16
    uneven = plan_stability(plan, make_samples(500, spread=2.0), costs, tolerance=0.01)
    assert uneven.batch_size is None or uneven.batch_size > 16
    assert uneven.worst_regret >= 0


def test_regret_of_one_rank_is_none_and_sentences_say_so():
    single = plan_stability(make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 0)]), make_samples(50), make_costs())
    assert (single.batch_size, single.worst_regret) == (16, 0.0)
    assert "one rank" in single.sentence()


def test_sentences_state_the_probability_in_words():
    plan = make_plan([("vision", 0, 12, 0), ("llm", 0, 6, 1)])
    costs, samples = make_costs(devices=2, model=make_model()), make_samples(300)
    good = plan_stability(plan, samples, costs, tolerance=0.9)
    assert "95% confidence" in good.sentence()
    assert "5% of random batches" in good.sentence()
    lopsided = make_plan([("vision", 0, 1, 0), ("vision", 1, 2, 1), ("vision", 2, 12, 2), ("llm", 0, 6, 3)])
    bad = plan_stability(lopsided, samples, make_costs(devices=4), tolerance=0.0001)
    assert "needs" in bad.sentence()
