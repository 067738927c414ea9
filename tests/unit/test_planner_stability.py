"""The certificate: b_min is found, splits settle with the batch size, and an order that is not random is noticed."""

from dataclasses import replace

import numpy as np
import pytest
from planner_cases import make_costs, make_model, make_plan, make_samples, segment_sums

from entrain_opt.planner import PlanOptions, solve_plan
from entrain_opt.planner.cuts import Cuts, fastest_slowest
from entrain_opt.planner.order import find_order
from entrain_opt.planner.partition import partition_chain
from entrain_opt.planner.stability import LISTED_SIZES, plan_stability

PLAN = make_plan([("vision", 0, 6, 0), ("vision", 6, 12, 1), ("llm", 0, 3, 2), ("llm", 3, 6, 3)])


def test_cuts_of_many_trials_equal_the_integer_program():
    generator = np.random.default_rng(0)
    ticks = generator.integers(1, 50, size=(5, 9))
    prefix = np.concatenate([np.zeros((5, 1)), np.cumsum(ticks, axis=1)], axis=1)
    found = fastest_slowest(prefix, 10)
    nothing = np.zeros(1, dtype=np.int64)
    for trial in range(5):
        segments = segment_sums(ticks[trial], np.zeros(9, dtype=np.int64), nothing)
        for ranks in range(1, 10):
            best = partition_chain(lambda _, s=segments: s, ranks)
            assert found[ranks, trial] == best.ticks
    assert np.isinf(found[0]).all()
    assert np.isinf(found[10]).all()


def test_regret_is_against_the_best_cut_with_modules_apart():
    samples, costs = make_samples(200), make_costs(devices=4)
    cuts = Cuts(PLAN, samples, costs)
    sums = cuts.draw(np.random.default_rng(1), 8, 20)
    regrets = cuts.regrets(sums)
    assert (regrets >= -1e-12).all()
    best = np.full(20, np.inf)
    for vision in (1, 2, 3):
        layers = [np.array_split(np.arange(count), ranks) for count, ranks in ((12, vision), (6, 4 - vision))]
        stages = [
            (name, int(part[0]), int(part[-1]) + 1)
            for name, parts in zip(("vision", "llm"), layers, strict=True)
            for part in parts
        ]
        other = Cuts(make_plan([(*stage, rank) for rank, stage in enumerate(stages)]), samples, costs)
        assert not other.shares
        # Regrets of all plans are against one best cut.
        best = np.minimum(best, other.regrets(sums))
    assert (best <= regrets + 1e-12).all() or vision == 2


def test_a_rank_with_pieces_that_are_no_neighbours_takes_as_long_as_all_of_them():
    samples, costs = make_samples(100), make_costs(devices=2)
    plan = make_plan([("vision", 0, 4, 0), ("vision", 4, 12, 1), ("llm", 0, 5, 0), ("llm", 5, 6, 1)])
    cuts = Cuts(plan, samples, costs)
    sums = cuts.draw(np.random.default_rng(0), 8, 10)
    patches, vision, projector, table, llm, head = sums.T
    first, second = patches + 4 * vision + table + 5 * llm, 8 * vision + projector + llm + head
    layers = [np.repeat(layer[:, None], count, axis=1) for layer, count in ((vision, 12), (llm, 6))]
    for module, entry, exit_ in ((layers[0], patches, projector), (layers[1], table, head)):
        module[:, 0] += entry
        module[:, -1] += exit_
    prefix = np.cumsum(np.concatenate([np.zeros((10, 1)), *layers], axis=1), axis=1)
    best = fastest_slowest(prefix, 2)[2]
    np.testing.assert_allclose(cuts.regrets(sums), np.maximum(first, second) / best - 1)


def test_the_numbers_of_the_ranks_do_not_matter():
    samples, costs = make_samples(100), make_costs(devices=4)
    stages = [("vision", 0, 3), ("vision", 3, 12), ("llm", 0, 5), ("llm", 5, 6)]
    in_order, reversed_ = (
        Cuts(make_plan([(*stage, rank) for stage, rank in zip(stages, ranks, strict=True)]), samples, costs)
        for ranks in (range(4), (3, 2, 1, 0))
    )
    sums = in_order.draw(np.random.default_rng(0), 8, 10)
    np.testing.assert_allclose(in_order.regrets(sums), reversed_.regrets(sums))


def test_b_min_is_found_and_the_chosen_plan_holds_from_there_on():
    samples, costs = make_samples(400, spread=0.7), make_costs(devices=4)
    options = PlanOptions(cost_model="analytic", pipeline_degree=4)
    plan = solve_plan(costs.model, samples, costs.cluster, global_batch_size=64, options=options)
    found = plan_stability(plan, samples, costs)
    assert found.batch_size is not None
    cuts = Cuts(plan, samples, costs)
    fresh = cuts.regrets(cuts.draw(np.random.default_rng(99), found.batch_size, 400))
    assert (fresh - found.data_regret > found.tolerance).mean() <= 2 * found.error


def test_splits_settle_as_batches_grow():
    found = plan_stability(PLAN, make_samples(500, spread=1.5), make_costs(devices=4))
    assert tuple(found.splits) == LISTED_SIZES
    assert all(sum(counts.values()) == found.trials for counts in found.splits.values())
    assert len(found.splits[1]) > len(found.splits[256])
    assert max(found.splits[256].values()) >= max(found.splits[1].values())
    lines = found.split_lines(("vision",))
    assert len(lines) == 1 + len(LISTED_SIZES)
    assert "vision:llm" in lines[0]


@pytest.mark.parametrize("how", ["length", "source"])
def test_sorted_and_grouped_data_are_detected_and_shuffled_data_are_not(how):
    samples, costs = make_samples(1024), make_costs(devices=4)
    shuffled = plan_stability(PLAN, samples, costs)
    assert shuffled.order is not None
    assert shuffled.order.is_random
    assert "order:" not in shuffled.sentence()
    rows = np.argsort(samples.text_tokens) if how == "length" else np.argsort(samples.media_counts > 0, kind="stable")
    ordered = plan_stability(PLAN, samples.take(rows), costs)
    assert not ordered.order.is_random
    assert ordered.order.spread > 1.5
    assert "sorted" in ordered.sentence()
    # The certificate itself is about batches drawn at random, whatever the order.
    assert ordered.batch_size is not None


def test_random_order_is_rarely_called_sorted():
    generator = np.random.default_rng(0)
    wrong = sum(not find_order(generator.lognormal(size=(512, 2)), seed=seed).is_random for seed in range(20))
    assert wrong <= 2
    assert find_order(np.ones((9, 2))) is None
    assert find_order(np.ones((64, 2))).is_random


def test_tensor_degrees_that_differ_keep_their_ranks():
    costs = make_costs(devices=4, model=make_model(scale=8))
    wide = replace(PLAN, degrees=replace(PLAN.degrees, tensor=(1, 1, 2, 2)))
    cuts = Cuts(wide, make_samples(50), costs)
    assert cuts.fixed_ranks
    assert (cuts.regrets(cuts.draw(np.random.default_rng(0), 8, 5)) >= -1e-12).all()


def test_where_no_size_is_enough_the_largest_one_tried_is_named():
    certificate = plan_stability(PLAN, make_samples(50), make_costs(devices=4), tolerance=-1.0, smallest=20_000)
    assert certificate.batch_size is None
    assert certificate.largest_size == 40_000
    assert "A static plan needs more than 40,000 samples per batch" in certificate.sentence()
