"""Splits over replicas that level both modules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner.replica_split import split_jointly
from entrain_opt.assigner.replicas import split_by_llm_work, split_karmarkar_karp
from entrain_opt.assigner.work import sample_work
from entrain_opt.assignment import BatchCosts
from entrain_opt.plan import PipelineShape

SHAPE = PipelineShape(encoder_stages=1, llm_stages=1)


def work_of(encoder, llm, shape=SHAPE, **amounts):
    return sample_work(
        BatchCosts(encoder_seconds=np.array(encoder, float), llm_seconds=np.array(llm, float), **amounts), shape
    )


def heavy_tailed(generator, num_samples, text_share=0.0):
    encoder = generator.lognormal(sigma=1.3, size=num_samples) * (generator.random(num_samples) >= text_share)
    return encoder, generator.lognormal(sigma=1.0, size=num_samples)


def imbalances(replica, work, num_replicas):
    """Largest over mean of both modules' loads."""
    sums = [np.bincount(replica, amounts, num_replicas) for amounts in (work.encoder_seconds, work.llm_seconds)]
    return [s.max() / s.mean() if s.any() else 1.0 for s in sums]


def least_imbalances(work, num_replicas):
    """What no split can beat: the average, and the largest sample."""
    loads = (work.encoder_seconds, work.llm_seconds)
    return [max(1.0, s.max() * num_replicas / s.sum()) if s.any() else 1.0 for s in loads]


amounts = st.one_of(st.just(0.0), st.floats(0.01, 10.0))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(amounts, amounts), min_size=1, max_size=40), num_replicas=st.integers(1, 9))
def test_promises(rows, num_replicas):
    work = work_of(*np.array(rows).T)
    replica = split_jointly(work, num_replicas)
    assert replica.dtype == np.int64
    assert replica.shape == (len(rows),)
    assert replica.tobytes() == split_jointly(work, num_replicas).tobytes()
    counts = np.bincount(replica, minlength=num_replicas)
    assert len(counts) == num_replicas
    assert counts.min() > 0 or counts.max() == 1
    for found, least in zip(imbalances(replica, work, num_replicas), least_imbalances(work, num_replicas), strict=True):
        assert found >= least * (1 - 1e-12)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(amounts, amounts), min_size=1, max_size=30), seed=st.integers(0, 99))
def test_the_order_of_the_batch_does_not_matter(rows, seed):
    """Identical samples may trade places; what each replica holds stays the same."""
    rows = np.array(rows)
    order = np.random.default_rng(seed).permutation(len(rows))

    def contents(listed):
        replica = split_jointly(work_of(*listed.T), 4)
        return [sorted(listed[replica == index].tolist()) for index in range(4)]

    assert contents(rows[order]) == contents(rows)


@pytest.mark.parametrize(("num_samples", "num_replicas"), [(12, 4), (64, 8), (256, 8), (1024, 32)])
@pytest.mark.parametrize("text_share", [0.0, 0.4])
def test_never_less_level_than_splits_by_one_load(num_samples, num_replicas, text_share):
    for seed in range(5):
        work = work_of(*heavy_tailed(np.random.default_rng(seed), num_samples, text_share))
        found = max(imbalances(split_jointly(work, num_replicas), work, num_replicas))
        for other in (split_by_llm_work, split_karmarkar_karp):
            assert found <= max(imbalances(other(work, num_replicas), work, num_replicas)) * (1 + 1e-9)


def test_both_loads_come_as_near_to_even_as_the_largest_sample_allows():
    for seed in range(5):
        work = work_of(*heavy_tailed(np.random.default_rng(seed), 512))
        found = imbalances(split_jointly(work, 8), work, 8)
        assert (np.array(found) <= 1.005 * np.array(least_imbalances(work, 8))).all()


def test_a_giant_image_does_not_leave_the_language_model_uneven():
    generator = np.random.default_rng(0)
    encoder, llm = heavy_tailed(generator, 256, text_share=0.4)
    encoder[17] = encoder.sum()
    work = work_of(encoder, llm)
    replica = split_jointly(work, 8)
    # The giant's replica gets no other image, but its full share of language-model work from text-only samples.
    alone = encoder[17] * 8 / encoder.sum()
    found = imbalances(replica, work, 8)
    assert found[0] == pytest.approx(alone)
    assert found[1] < 1.01


def test_small_batches_are_solved():
    # Splits by total work put (4, 0) with (0, 4) or not, as they please; only one split is even in both loads.
    work = work_of([4, 4, 0, 0], [0, 0, 4, 4])
    replica = split_jointly(work, 2)
    assert imbalances(replica, work, 2) == [1.0, 1.0]
    assert split_jointly(work_of([1, 2], [2, 1]), 4).tolist() == [1, 0]
    assert split_jointly(work_of([], []), 3).tolist() == []
    assert sorted(np.bincount(split_jointly(work_of([0] * 6, [0] * 6), 3))) == [2, 2, 2]


def test_memory_counts_where_the_shape_limits_it():
    generator = np.random.default_rng(1)
    encoder, llm = heavy_tailed(generator, 256)
    tokens, patches = generator.integers(1, 100, 256), generator.integers(1, 100, 256)
    costs = {"llm_tokens": tokens, "encoder_patches": patches}
    capped = PipelineShape(encoder_stages=1, llm_stages=1, tokens_in_flight=4096, patches_in_flight=4096)
    work = work_of(encoder, llm, capped, **costs)
    replica = split_jointly(work, 8)
    assert max(imbalances(replica, work, 8)) < 1.01
    for column in (tokens, patches):
        sums = np.bincount(replica, column, 8)
        assert sums.max() / sums.mean() < 1.12


def test_a_token_limit_per_replica_is_kept():
    generator = np.random.default_rng(2)
    encoder, llm = heavy_tailed(generator, 64)
    tokens = generator.integers(1, 100, 64)
    # Where time is even, tokens are not: the fewer tokens a sample has, the longer it takes here.
    work = work_of(encoder, llm * 100 / tokens, llm_tokens=tokens)
    loose = np.bincount(split_jointly(work, 8), tokens)
    limit = int(np.ceil(tokens.sum() / 8 * 1.02))
    assert loose.max() > limit
    assert np.bincount(split_jointly(work, 8, token_limit=limit), tokens).max() <= limit
