"""The paper's Algorithm 3: its worked examples and what it promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner.pairwise import (
    defer_pairwise,
    effective_microbatches,
    execution_order,
    place_pairwise,
    plan_deferral,
    stratified_microbatches,
)
from entrain_opt.assigner.work import sample_work
from entrain_opt.assignment import BatchCosts
from entrain_opt.plan import PipelineShape

ONE_STAGE_EACH = PipelineShape(encoder_stages=1, llm_stages=1)
UNIT = 3.0  # forward and a backward of twice that


def work_of(encoder, llm, shape=ONE_STAGE_EACH, **more):
    costs = BatchCosts(encoder_seconds=np.array(encoder, float), llm_seconds=np.array(llm, float), **more)
    return sample_work(costs, shape)


# 18 samples with 18 units of encoder work and 36 of language-model work, as in Figure 8.
FIGURE_8_ENCODER = [2, 0.5, 0.5, 1, 1, 1, 1.5, 1.5, 1.5, 0.5, 0.5, 0.5, 1, 1, 1, 1.5, 1, 0.5]
FIGURE_8_LLM = [1, 2, 1, 2, 4, 1, 2, 1, 1, 4, 1, 2, 3, 3, 2, 3, 2, 1]


def test_figure_eight():
    work = work_of(FIGURE_8_ENCODER, FIGURE_8_LLM)
    placement = place_pairwise(work, 6)
    encoder, llm = placement.encoder_microbatch, placement.llm_microbatch
    assert placement.num_microbatches == 6
    assert sorted(np.bincount(encoder).tolist()) == [2, 3, 3, 3, 3, 4]
    assert np.bincount(encoder, weights=FIGURE_8_ENCODER).tolist() == [3] * 6
    assert sorted(np.bincount(encoder, weights=FIGURE_8_LLM).tolist()) == [3, 5, 6, 6, 7, 9]
    assert np.bincount(llm, weights=FIGURE_8_LLM).tolist() == [6] * 6
    assert set((llm - encoder).tolist()) == {0, 1}


def test_figure_nine():
    # Microbatches MB1 to MB6 are 0 to 5; their loads are 3, 4, 8, 6, 6, 9.
    samples = [(0, 3), (1, 4), (2, 2), (2, 6), (3, 6), (4, 6), (5, 3), (5, 6)]
    microbatch, llm = np.array(samples).T
    work = work_of(np.ones(len(samples)), llm)
    plan = plan_deferral(work, microbatch)
    givers, receivers = [5, 2, 3], [0, 1, 4]
    assert (plan.givers.tolist(), plan.receivers.tolist()) == (givers, receivers)
    assert (plan.paired / UNIT).tolist() == [[6, 7, 9], [6, 6, 8], [6, 6, 6]]
    assert plan.largest_seconds / UNIT == 6
    pairs = dict(zip(givers, plan.receivers[plan.partner].tolist(), strict=True))
    assert pairs == {2: 1, 5: 0, 3: 4}
    assert plan.deferred.tolist() == [6, 2]  # 3 units from MB6, 2 from MB3
    moved, order = defer_pairwise(work, microbatch)
    assert np.bincount(moved, weights=llm).tolist() == [6] * 6
    assert order.tolist() == [5, 0, 2, 1, 3, 4]
    # The figure lists the same pairs starting with MB3.
    order = execution_order(np.array([2, 5, 3]), np.array([1, 0, 4]), np.arange(3))
    assert (order + 1).tolist() == [3, 2, 6, 1, 4, 5]


@pytest.mark.parametrize(
    ("encoder", "requested", "expected"),
    [([4, 1, 1, 2], 8, 2), ([1, 1, 1, 1], 3, 3), ([1, 1, 1], 8, 3), ([5], 4, 1), ([0, 0], 4, 0), ([0.1] * 10, 10, 10)],
)
def test_effective_microbatches(encoder, requested, expected):
    assert effective_microbatches(np.array(encoder, float), requested) == expected


def test_samples_heavy_on_the_language_model_are_spread_first():
    # Canonical order; the median of the language-model seconds is 2, so samples 1 and 3 are coarse.
    work = work_of([6, 5, 4, 3, 2], [1, 9, 1, 9, 2])
    assert stratified_microbatches(work, 2).tolist() == [1, 0, 0, 1, 0]


work_lists = st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(rows=work_lists, requested=st.integers(1, 12))
def test_rule_for_the_number_of_microbatches_and_list_scheduling_bound(rows, requested):
    encoder, llm = np.array(rows).T
    placement = place_pairwise(work_of(encoder, llm), requested)
    count = placement.num_microbatches
    assert count == min(requested, int(encoder.sum() / encoder.max() + 1e-9))
    loads = np.bincount(placement.encoder_microbatch, weights=encoder)
    assert loads.max() <= (2 - 1 / count) * max(encoder.sum() / count, encoder.max()) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(rows=work_lists, requested=st.integers(1, 12), text_only=st.integers(0, 8), room=st.floats(1, 3))
def test_deferral_never_raises_the_largest_load(rows, requested, text_only, room):
    encoder, llm = np.array(rows + [(0.0, 1.0)] * text_only).T
    tokens = np.ceil(llm * 10).astype(int)
    shape = PipelineShape(encoder_stages=2, llm_stages=2, tokens_in_flight=int(tokens.max() * room))
    work = work_of(encoder, llm, shape, llm_tokens=tokens)
    work = work.take(work.canonical_order)
    before = stratified_microbatches(work, requested)
    after, order = defer_pairwise(work, before)
    count = before.max() + 1
    assert sorted(order.tolist()) == list(range(count))
    largest = np.bincount(before, weights=work.llm_seconds).max()
    assert np.bincount(after, weights=work.llm_seconds).max() <= largest * (1 + 1e-12)
    assert np.bincount(after, weights=work.tokens).max() <= shape.tokens_in_flight
    assert set(after.tolist()) == set(range(count))
    position = np.argsort(order)
    assert set((position[after] - position[before]).tolist()) <= {0, 1}


def test_deferral_leaves_room_for_nothing_when_receivers_are_full():
    samples = [(0, 4, 5), (0, 4, 5), (1, 1, 5)]  # microbatch, seconds, tokens
    microbatch, llm, tokens = np.array(samples).T
    for limit, expected in ((9, 0), (10, 1)):
        shape = PipelineShape(encoder_stages=1, llm_stages=1, tokens_in_flight=limit)
        plan = plan_deferral(work_of(np.ones(3), llm, shape, llm_tokens=tokens), microbatch)
        assert len(plan.deferred) == expected


def test_text_only_samples_fill_microbatches_of_their_own():
    # One image among twenty texts must not squeeze everything into one microbatch.
    work = work_of([5] + [0] * 20, [2] * 21)
    placement = place_pairwise(work, 7)
    assert placement.num_microbatches == 7
    assert np.bincount(placement.llm_microbatch).tolist() == [3] * 7
    assert (placement.encoder_microbatch >= 0).sum() == 1


def test_text_only_samples_level_the_language_model_first():
    work = work_of([1, 1, 0, 0], [1, 5, 3, 1])
    placement = place_pairwise(work, 2)
    assert np.bincount(placement.llm_microbatch, weights=[1, 5, 3, 1]).tolist() == [5, 5]


def test_tight_caps_cost_few_microbatches_more_than_the_volume_needs():
    generator = np.random.default_rng(0)
    encoder, llm = generator.lognormal(size=(2, 400))
    patches, tokens = (np.ceil(100 * values).astype(int) for values in (encoder, llm))
    shape = PipelineShape(
        encoder_stages=1, llm_stages=1, patches_in_flight=patches.max(), tokens_in_flight=tokens.max()
    )
    work = work_of(encoder, llm, shape, encoder_patches=patches, llm_tokens=tokens)
    placement = place_pairwise(work, 1)
    assert work.fewest_microbatches() <= placement.num_microbatches <= 1.2 * work.fewest_microbatches()
