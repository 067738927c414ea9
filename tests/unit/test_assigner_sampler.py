"""`BalancedBatchSampler`: the same global batches on every rank, level parts, exact resume."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from entrain_opt import BalancedBatchSampler, BatchCosts
from entrain_opt.errors import AssignmentError


def heavy_tailed(num_samples, seed=0):
    generator = np.random.default_rng(seed)
    tokens = np.ceil(generator.lognormal(4, 1.0, num_samples)).astype(int)
    return BatchCosts(
        encoder_seconds=generator.lognormal(0, 1.3, num_samples) * (generator.random(num_samples) < 0.7),
        llm_seconds=tokens * 1e-3,
        llm_tokens=tokens,
        label_tokens=generator.integers(1, tokens + 1),
    )


COSTS = heavy_tailed(50)


def samplers(world_size, costs=COSTS, **options):
    options = {"global_batch_size": 16, "seed": 3} | options
    return [BalancedBatchSampler(costs, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def steps_of(ranks, num_epochs=1):
    """For each step, each rank's samples."""
    passes = [[batch for _ in range(num_epochs) for batch in sampler] for sampler in ranks]
    return list(zip(*passes, strict=True))


def contents(steps):
    """Each global batch, put together again."""
    return [sorted(chain(*parts)) for parts in steps]


@settings(max_examples=25, deadline=None)
@given(
    num_samples=st.integers(8, 60),
    global_batch_size=st.integers(4, 20),
    world_size=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_every_sample_once_over_ranks_and_steps(num_samples, global_batch_size, world_size, shuffle, drop_last):
    rest = num_samples % global_batch_size
    options = {"global_batch_size": global_batch_size, "shuffle": shuffle, "drop_last": drop_last}
    if num_samples < global_batch_size and drop_last:
        return
    if 0 < rest < world_size and not drop_last:
        with pytest.raises(AssignmentError, match=f"global_batch_size: the last .* {rest} of {num_samples} samples"):
            samplers(world_size, heavy_tailed(num_samples), **options)
        return
    ranks = samplers(world_size, heavy_tailed(num_samples), **options)
    steps = steps_of(ranks)
    assert len(steps) == len(ranks[0])
    assert all(all(parts) for parts in steps)
    seen = list(chain(*contents(steps)))
    assert len(seen) == len(set(seen)) == (num_samples - rest if drop_last else num_samples)
    for step, parts in enumerate(steps):
        assert sorted(chain(*parts)) == sorted(ranks[0].global_batch(step))
        if not shuffle:
            assert ranks[0].global_batch(step)[0] == step * global_batch_size


def test_global_batches_do_not_depend_on_the_number_of_ranks():
    expected = contents(steps_of(samplers(1), num_epochs=3))
    for world_size in (2, 3, 8):
        ranks = samplers(world_size, drop_last=True)
        assert contents(steps_of(ranks))[:3] == expected[:3]
    assert contents(steps_of(samplers(2), num_epochs=3)) == expected
    assert contents(steps_of(samplers(2, seed=4))) != expected[:4]


def test_each_pass_is_the_next_epoch_and_set_epoch_chooses_one():
    sampler = samplers(2)[0]
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(sampler) == second
    # A loop that knows the length stops at the last batch.
    sampler.set_epoch(0)
    iterator = iter(sampler)
    assert [next(iterator) for _ in range(len(sampler))] == first
    assert list(sampler) == second
    assert list(samplers(2, shuffle=False)[0]) == list(samplers(2, shuffle=False)[0])


def test_a_pass_that_was_given_up_starts_again():
    sampler = samplers(2)[0]
    first = next(iter(sampler))
    assert next(iter(sampler)) == first


@pytest.mark.parametrize("steps_done", [0, 1, 3, 4, 6, 8])
@pytest.mark.parametrize("world_size", [1, 2])
def test_resuming_equals_an_uninterrupted_run_also_with_other_ranks(steps_done, world_size):
    uninterrupted = contents(steps_of(samplers(2), num_epochs=3))
    state = samplers(2)[1].state_dict(steps_done)
    ranks = samplers(world_size)
    for sampler in ranks:
        sampler.load_state_dict(state)
    num_epochs = 3 - steps_done // len(ranks[0])
    assert contents(steps_of(ranks, num_epochs)) == uninterrupted[steps_done:]


def test_the_epoch_a_state_leads_into_survives_batches_drawn_too_early():
    """Lightning starts an iterator, throws it away, sets the epoch and starts another."""
    sampler = samplers(2)[0]
    expected = list(sampler)[2:]
    sampler.load_state_dict(sampler.state_dict(2))
    assert list(sampler) == expected
    sampler.set_epoch(0)
    assert list(sampler) == expected
    sampler.set_epoch(1)
    assert len(list(sampler)) == len(sampler)
    assert sampler.sampler is sampler


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_draws_ahead_but_the_state_says_what_was_done(num_workers):
    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0, "collate_fn": list}
    expected = steps_of(samplers(2), num_epochs=3)
    sampler = samplers(2)[0]
    loader = DataLoader(range(COSTS.num_samples), batch_sampler=sampler, **options)
    assert len(loader) == len(sampler) == 4
    drawn = []
    for _ in range(2):
        for batch in loader:
            drawn.append(batch)
            if len(drawn) == 6:
                break
    assert drawn == [parts[0] for parts in expected[:6]]
    # With workers the loader has drawn the whole epoch by now; the loop counted six steps.
    resumed = samplers(2)[0]
    resumed.load_state_dict(sampler.state_dict(len(drawn)))
    loader = DataLoader(range(COSTS.num_samples), batch_sampler=resumed, **options)
    assert [batch for _ in range(2) for batch in loader] == [parts[0] for parts in expected[6:12]]


def test_loss_factors_weigh_ranks_by_their_label_tokens():
    ranks = samplers(3, global_batch_size=20)
    for step, parts in enumerate(steps_of(ranks, num_epochs=2)):
        factors = [sampler.loss_factor(step) for sampler in ranks]
        assert np.mean(factors) == pytest.approx(1.0)
        labels = [COSTS.label_tokens[part].sum() for part in parts]
        assert factors == pytest.approx(3 * np.array(labels) / sum(labels))
    # A sampler that has not drawn the step, or forgot it, says the same.
    assert samplers(3, global_batch_size=20)[1].loss_factor(4) == ranks[1].loss_factor(4)


def test_forgotten_steps_are_split_again(monkeypatch):
    monkeypatch.setattr("entrain_opt.assigner.sampler._REMEMBERED", 2)
    sampler = samplers(2)[0]
    drawn = [batch for _ in range(3) for batch in sampler]
    expected = samplers(2)[0]
    assert [sampler.loss_factor(step) for step in range(12)] == [expected.loss_factor(step) for step in range(12)]
    assert drawn == [part[0] for part in steps_of(samplers(2), num_epochs=3)]


def test_label_tokens_default_to_tokens_then_to_samples():
    tokens = BatchCosts(encoder_seconds=[1, 1], llm_seconds=[1, 1], llm_tokens=[1, 3])
    assert sorted(s.loss_factor(0) for s in samplers(2, tokens, global_batch_size=2)) == [0.5, 1.5]
    bare = BatchCosts(encoder_seconds=[1, 1, 2], llm_seconds=[1, 1, 2])
    assert sorted(s.loss_factor(0) for s in samplers(2, bare, global_batch_size=3)) == pytest.approx([2 / 3, 4 / 3])


def test_ranks_are_far_more_level_than_by_striding():
    costs = heavy_tailed(1024)
    ranks = samplers(8, costs, global_batch_size=256)
    for step, parts in enumerate(steps_of(ranks)):
        rows = ranks[0].global_batch(step)
        for seconds in (costs.encoder_seconds, costs.llm_seconds):

            def excess(split, seconds=seconds):
                sums = np.array([seconds[part].sum() for part in split])
                return sums.max() / sums.mean() - 1

            assert excess(parts) < 0.1 * excess([rows[rank::8] for rank in range(8)])


def test_several_media_items_and_encoders_add_up():
    costs = BatchCosts(
        encoder_seconds=[1.0, 1.0, 1.0, 3.0, 2.0],
        llm_seconds=[1.0, 1.0, 1.0, 1.0],
        media_offsets=[0, 3, 4, 5, 5],
        media_encoder=[0, 1, 0, 0, 1],
    )
    # Encoder work 3, 3, 2 and 0 per sample, whatever the encoder: the two 3s are apart, and each has one other sample.
    for parts in steps_of(samplers(2, costs, global_batch_size=4)):
        assert sorted(sorted(part) for part in parts) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])


def test_a_token_limit_per_rank_holds_or_is_refused_by_name():
    costs = heavy_tailed(256)
    (whole,) = samplers(1, costs, global_batch_size=64)
    limit = int(max(costs.tokens[whole.global_batch(step)].sum() for step in range(4)) / 4 * 1.1)
    for parts in steps_of(samplers(4, costs, global_batch_size=64, max_tokens_per_rank=limit)):
        assert max(costs.tokens[part].sum() for part in parts) <= limit
    with pytest.raises(AssignmentError, match=r"max_tokens_per_rank: step 0 needs .* Lower global_batch_size"):
        steps_of(samplers(4, costs, global_batch_size=64, max_tokens_per_rank=int(costs.tokens.max())))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rank": 2}, r"rank: expected 0 to 1 .* found 2"),
        ({"rank": -1}, "rank: expected a whole number of at least 0, found -1"),
        ({"world_size": 0}, "world_size: expected a whole number of at least 1, found 0"),
        ({"seed": 1.5}, "seed: expected a whole number"),
        ({"global_batch_size": True}, "global_batch_size: expected a whole number"),
        ({"global_batch_size": 1}, "global_batch_size: expected at least one sample for each of 2 ranks, found 1"),
        ({"global_batch_size": 7}, "global_batch_size: the last global batch .* 1 of 50 samples.*drop_last=True"),
        ({"global_batch_size": 51, "drop_last": True}, "costs: expected samples for at least one global batch of 51"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank: expected a whole number"),
        ({"max_tokens_per_rank": 9}, rf"sample {COSTS.tokens.argmax()}: expected at most 9 tokens"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options, expected):
    with pytest.raises(AssignmentError, match=expected):
        BalancedBatchSampler(COSTS, **{"global_batch_size": 16, "rank": 0, "world_size": 2} | options)


def test_costs_that_cannot_work_are_refused_by_name():
    ones = {"encoder_seconds": [1, 1], "llm_seconds": [1, 1]}
    options = {"global_batch_size": 2, "rank": 0, "world_size": 1}
    with pytest.raises(AssignmentError, match=r"label_tokens: .* found 0 for sample 1"):
        BalancedBatchSampler(BatchCosts(**ones, label_tokens=[3, 0]), **options)
    with pytest.raises(AssignmentError, match="max_tokens_per_rank: expected costs with llm_tokens"):
        BalancedBatchSampler(BatchCosts(**ones), **options, max_tokens_per_rank=8)
    with pytest.raises(AssignmentError, match="costs: expected samples"):
        BalancedBatchSampler(BatchCosts(encoder_seconds=[], llm_seconds=[]), **options)


@pytest.mark.parametrize("changed", [{"seed": 4}, {"global_batch_size": 10}, {"shuffle": False}, {"drop_last": True}])
def test_a_state_of_other_global_batches_is_refused(changed):
    sampler = samplers(1)[0]
    name = next(iter(changed))
    with pytest.raises(AssignmentError, match=rf"state_dict\['{name}'\]: expected .* found"):
        sampler.load_state_dict(samplers(1, **changed)[0].state_dict(1))
    with pytest.raises(AssignmentError, match="epoch: expected a whole number"):
        sampler.set_epoch(-1)
    with pytest.raises(AssignmentError, match="steps_done: expected a whole number"):
        sampler.state_dict(1.0)
