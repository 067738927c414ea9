"""Random changes keep layouts valid, and annealing never returns a worse one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner.annealing import dense
from entrain_opt.assigner.evaluate import Evaluator
from entrain_opt.assigner.layout import Layout
from entrain_opt.assigner.moves import change
from entrain_opt.assigner.random_numbers import random_below, random_state, random_unit
from entrain_opt.assigner.work import place_media, sample_work
from entrain_opt.assignment import BatchCosts
from entrain_opt.plan import PipelineShape


def random_layout(seed, num_samples):
    """Microbatches of samples and their media, which are never later; some microbatches are empty."""
    generator = np.random.default_rng(seed)
    media_counts = generator.integers(0, 4, num_samples)
    count = int(generator.integers(1, num_samples + 3))
    llm = generator.integers(0, count, num_samples)
    sample_of_media = np.repeat(np.arange(num_samples), media_counts)
    media = (llm[sample_of_media] * generator.random(len(sample_of_media))).astype(np.int64)
    return media, llm, count, sample_of_media, np.concatenate([[0], np.cumsum(media_counts)])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_samples=st.integers(2, 12))
def test_changes_keep_media_in_time_and_the_number_of_microbatches(seed, num_samples):
    media, llm, count, sample_of_media, media_first = random_layout(seed, num_samples)
    most, state = max(count, num_samples), random_state(seed)
    cumulated = np.cumsum(np.random.default_rng(seed).random(num_samples))
    costs = BatchCosts(encoder_seconds=np.ones(len(media)), llm_seconds=np.ones(num_samples), media_offsets=media_first)
    work = sample_work(costs, PipelineShape())
    for _ in range(200):
        count = change(media, llm, count, most, sample_of_media, media_first, cumulated, state)
        assert count <= most
        assert llm.min() >= 0
        assert llm.max() < count
        assert np.all(media >= 0)
        assert np.all(media <= llm[sample_of_media])
        dense_media, dense_llm, used = dense(media, llm, count)
        assert set(dense_llm.tolist()) == set(range(used))
        assert np.all(dense_media >= 0)
        assert np.all(dense_media <= dense_llm[sample_of_media])
        expected = place_media(work, media, llm)
        assert expected.num_microbatches == used
        assert np.array_equal(expected.llm_microbatch, dense_llm)
        assert np.array_equal(expected.encoder_microbatch[work.costs.has_media], dense_media)


def test_changes_reach_everything():
    """Order, sizes, numbers of microbatches and places of media all change."""
    media, llm, count, sample_of_media, media_first = random_layout(1, 8)
    state, cumulated, seen = random_state(0), np.arange(1.0, 9.0), set()
    for _ in range(500):
        before_media, before_llm, before_count = media.copy(), llm.copy(), count
        count = change(media, llm, count, 8, sample_of_media, media_first, cumulated, state)
        moved = not np.array_equal(llm, before_llm)
        seen.add("samples" if moved else "media" if not np.array_equal(media, before_media) else "nothing")
        if count > before_count:
            seen.add("split")
        if len(set(llm.tolist())) < len(set(before_llm.tolist())):
            seen.add("merge")
        if moved and sorted(np.bincount(llm)) == sorted(np.bincount(before_llm)):
            seen.add("order")
    assert seen >= {"samples", "media", "split", "merge", "order"}


@pytest.mark.parametrize("schedule", ["eager", "1f1b"])
@pytest.mark.parametrize("trained", [True, False])
def test_never_worse_than_the_start_and_repeatable(schedule, trained):
    generator = np.random.default_rng(3)
    counts = generator.integers(0, 3, 24)
    costs = BatchCosts(
        encoder_seconds=generator.lognormal(size=counts.sum()),
        llm_seconds=generator.lognormal(size=24),
        encoder_patches=generator.integers(1, 50, counts.sum()),
        llm_tokens=generator.integers(1, 50, 24),
        media_offsets=np.concatenate([[0], np.cumsum(counts)]),
    )
    shape = PipelineShape(encoder_stages=2, llm_stages=2, encoder_trained=trained, patches_in_flight=300)
    work = sample_work(costs, shape)
    start = Layout.together(work, np.arange(24) // 2)
    evaluator = Evaluator(work, schedule)
    seconds = evaluator.seconds(start.placement(work))
    found = [
        evaluator.anneal(
            start, seconds, most=16, temperature_seconds=0.01 * seconds, budget=100.0, state=random_state(5)
        )
        for _ in range(2)
    ]
    best_seconds, best, spent = found[0]
    assert best_seconds < seconds
    assert evaluator.seconds(best.placement(work)) == best_seconds
    assert best.count <= 16
    assert 100 <= spent < 101
    assert found[1][0] == best_seconds
    assert np.array_equal(found[1][1].llm, best.llm)
    assert np.array_equal(found[1][1].media, best.media)


def test_random_numbers_are_even_and_follow_the_seed():
    state, other, same = random_state(0), random_state(1), random_state(0)
    numbers = [random_unit(state) for _ in range(4000)]
    assert numbers[:5] == [random_unit(same) for _ in range(5)]
    assert numbers[:5] != [random_unit(other) for _ in range(5)]
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert abs(np.mean(numbers) - 0.5) < 0.02
    assert set(np.bincount([random_below(state, 3) for _ in range(300)]) > 70) == {True}
