"""The peers' policies: common promises on odd batches, and for each what makes it that policy."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner import POLICIES, assign_microbatches, sample_work
from entrain_opt.assigner.peers.common import rank_seconds
from entrain_opt.assigner.peers.dip import even_runs, parent_blocks
from entrain_opt.assigner.peers.disttrain import interval_filling_order, split_by_encoder_work
from entrain_opt.assigner.peers.dynapipe import cut_sorted, fastest_group_order
from entrain_opt.assigner.peers.length_grouped import place_length_grouped, split_by_length
from entrain_opt.assigner.peers.one_f_one_b import OneForwardOneBackward
from entrain_opt.assigner.peers.token_budget import pack_first_fit, place_token_budget, smallest_budget
from entrain_opt.assigner.replicas import split_in_order
from entrain_opt.assignment import Assignment, BatchCosts, StageCosts
from entrain_opt.plan import PipelineShape
from entrain_opt.simulator import simulate

PEERS = ("length_grouped", "token_budget", "dynapipe", "disttrain", "dip")
BLIND_TO_ORDER = ("length_grouped", "token_budget", "dynapipe")
SHAPE = PipelineShape(encoder_stages=2, llm_stages=2)
peers = pytest.mark.parametrize("policy", PEERS)


def with_fixed_seconds(costs, shape, seconds):
    stages = costs.stage_costs(shape)
    values = {name: getattr(stages, name) for name in StageCosts.__dataclass_fields__}
    values["forward_fixed_seconds"] = values["backward_fixed_seconds"] = (seconds,) * shape.num_stages
    fields = ("encoder_seconds", "llm_seconds", "encoder_patches", "llm_tokens", "media_offsets")
    return BatchCosts(**{name: getattr(costs, name) for name in fields}, stages=StageCosts(**values))


@st.composite
def odd_batches(draw, max_samples=20):
    """One of each odd kind: some text-only, all text-only, all equal, one giant, an encoder that costs nothing."""
    num_samples = draw(st.integers(1, max_samples))
    amounts = st.integers(1, 50)
    encoder = np.array(draw(st.lists(amounts, min_size=num_samples, max_size=num_samples)), dtype=float)
    llm = np.array(draw(st.lists(amounts, min_size=num_samples, max_size=num_samples)), dtype=float)
    patches, tokens = encoder.astype(int) * 4, llm.astype(int) * 3
    kind = draw(st.sampled_from(["mixed", "text", "equal", "giant", "free encoder"]))
    if kind == "mixed":
        text = np.array(draw(st.lists(st.booleans(), min_size=num_samples, max_size=num_samples)))
        encoder[text], patches[text] = 0, 0
    elif kind == "text":
        encoder[:], patches[:] = 0, 0
    elif kind == "equal":
        encoder[:], llm[:], patches[:], tokens[:] = 2, 3, 8, 9
    elif kind == "giant":
        encoder[0], llm[-1], patches[0], tokens[-1] = 1000, 2000, 4000, 6000
    else:
        encoder[:] = 0
    costs = BatchCosts(encoder_seconds=encoder, llm_seconds=llm, encoder_patches=patches, llm_tokens=tokens)
    room = draw(st.sampled_from([None, 1.0, 1.7]))
    shape = PipelineShape(
        encoder_stages=draw(st.integers(1, 2)),
        llm_stages=draw(st.integers(1, 3)),
        encoder_trained=draw(st.booleans()),
        patches_in_flight=None if room is None else max(int(patches.max() * room), 1),
        tokens_in_flight=None if room is None else int(tokens.max() * room),
    )
    return with_fixed_seconds(costs, shape, draw(st.sampled_from([0.0, 2.0]))), shape


@peers
@settings(max_examples=50, deadline=None)
@given(batch=odd_batches(), num_replicas=st.integers(1, 3), requested=st.one_of(st.none(), st.integers(1, 24)))
def test_every_item_once_under_the_caps_and_the_same_every_time(policy, batch, num_replicas, requested):
    costs, shape = batch
    options = {"num_replicas": num_replicas, "num_microbatches": requested, "policy": policy}
    found, again = (assign_microbatches(costs, shape, **options) for _ in range(2))
    found.check(costs, shape)
    for name in ("replica", "encoder_microbatch", "llm_microbatch", "num_microbatches"):
        assert getattr(found, name).tobytes() == getattr(again, name).tobytes()
    capped = shape.tokens_in_flight is not None
    for replica, count in enumerate(found.num_microbatches.tolist()):
        rows = found.replica == replica
        assert set(found.llm_microbatch[rows].tolist()) == set(range(count))
        if requested is not None and not capped:
            assert count <= requested
    if policy != "dip":
        assert not len(found.deferred_samples(costs))


@pytest.mark.parametrize("policy", BLIND_TO_ORDER)
@pytest.mark.parametrize("requested", [None, 6])
@pytest.mark.parametrize("fixed_seconds", [0.0, 0.5])
def test_the_order_of_the_batch_does_not_matter(policy, requested, fixed_seconds):
    costs, generator = random_costs(48, seed=0), np.random.default_rng(1)
    costs = with_fixed_seconds(costs, SHAPE, fixed_seconds)
    order = generator.permutation(48)
    options = {"num_replicas": 3, "num_microbatches": requested, "policy": policy}
    found = assign_microbatches(costs, SHAPE, **options)
    permuted = assign_microbatches(costs.take(order), SHAPE, **options)
    for name in ("replica", "encoder_microbatch", "llm_microbatch"):
        assert getattr(permuted, name).tolist() == getattr(found, name)[order].tolist()


def random_costs(num_samples, *, seed, text_share=0.2):
    generator = np.random.default_rng(seed)
    encoder = generator.lognormal(sigma=1.0, size=num_samples) * (generator.random(num_samples) >= text_share)
    llm = generator.lognormal(sigma=0.8, size=num_samples)
    patches = np.where(encoder > 0, np.ceil(encoder * 100), 0).astype(int)
    return BatchCosts(
        encoder_seconds=encoder, llm_seconds=llm, encoder_patches=patches, llm_tokens=np.ceil(llm * 100).astype(int)
    )


@peers
def test_all_are_registered(policy):
    assert policy in POLICIES


# length_grouped


def test_length_groups_do_not_overlap_and_the_longest_come_first():
    work = sample_work(random_costs(50, seed=2), SHAPE)
    found = place_length_grouped(work, 8)
    lengths = [work.tokens[found.llm_microbatch == m] for m in range(8)]
    assert sorted(len(group) for group in lengths) == [6] * 6 + [7] * 2
    assert all(longer.min() >= shorter.max() for longer, shorter in pairwise(lengths))


def test_dealing_by_length_gives_replicas_the_same_lengths():
    work = sample_work(random_costs(60, seed=3), SHAPE)
    replica = split_by_length(work, 4)
    ranked = np.array([np.sort(work.tokens[replica == r])[::-1] for r in range(4)])
    assert ranked.shape == (4, 15)
    assert (ranked[:, :-1].min(axis=0) >= ranked[:, 1:].max(axis=0)).all()


# token_budget


@settings(max_examples=60, deadline=None)
@given(batch=odd_batches(), requested=st.integers(1, 24))
def test_no_microbatch_exceeds_the_token_budget(batch, requested):
    costs, shape = batch
    work = sample_work(costs, shape)
    budget = smallest_budget(work, requested)
    found = place_token_budget(work, requested)
    assert np.bincount(found.llm_microbatch, weights=work.tokens).max() <= budget
    assert budget >= max(work.tokens.max(), work.tokens.sum() / requested)
    if shape.tokens_in_flight is None:
        assert found.num_microbatches <= requested


def test_first_fit_decreasing_by_hand():
    tokens = [2, 5, 4, 7, 1, 3, 8]
    costs = BatchCosts(encoder_seconds=np.zeros(7), llm_seconds=np.ones(7), llm_tokens=tokens)
    work = sample_work(costs, SHAPE)
    # 8+2, 7+3, 5+4+1
    assert pack_first_fit(work, 10).tolist() == [0, 2, 2, 1, 2, 1, 0]
    assert smallest_budget(work, 3) == 10


def test_the_budget_grows_where_packing_at_the_mean_fails():
    costs = BatchCosts(encoder_seconds=np.zeros(3), llm_seconds=np.ones(3), llm_tokens=[6, 6, 6])
    work = sample_work(costs, SHAPE)
    assert smallest_budget(work, 2) == 12
    assert place_token_budget(work, 2).num_microbatches == 2


# dynapipe


def best_by_enumeration(work, seconds, order, fixed, most):
    """The least objective over all ways to cut into at most `most` consecutive microbatches under the caps."""
    count, found = len(seconds), []
    for pieces in range(1, count + 1):
        for inner in combinations(range(1, count), pieces - 1):
            ends = [0, *inner, count]
            runs = [order[a:b] for a, b in pairwise(ends)]
            if any(
                work.tokens[run].sum() > work.tokens_limit or work.patches[run].sum() > work.patches_limit
                for run in runs
            ):
                continue
            times = [seconds[a:b].sum() + fixed for a, b in pairwise(ends)]
            found.append((pieces, (work.shape.num_ranks - 1) * max(times) + sum(times)))
    allowed = max(most, min(pieces for pieces, _ in found))
    return min(value for pieces, value in found if pieces <= allowed)


@settings(max_examples=100, deadline=None)
@given(batch=odd_batches(max_samples=7), most=st.integers(1, 8), fixed=st.sampled_from([0.0, 0.7, 5.0, 40.0]))
def test_cuts_are_as_good_as_the_best_of_all_consecutive_ones(batch, most, fixed):
    costs, shape = batch
    shape = PipelineShape(encoder_stages=shape.encoder_stages, llm_stages=shape.llm_stages)  # without caps
    work = sample_work(costs, shape)
    seconds = rank_seconds(work)
    per_sample = (seconds.forward + seconds.backward).mean(axis=0)
    order = np.argsort(per_sample, kind="stable")
    ends = cut_sorted(work, order, per_sample[order], fixed, most)
    assert ends[-1] == work.num_samples
    assert len(ends) <= most
    assert np.diff(ends, prepend=0).min() >= 1
    times = [run.sum() + fixed for run in np.split(per_sample[order], ends[:-1])]
    found = (shape.num_ranks - 1) * max(times) + sum(times)
    assert found == pytest.approx(best_by_enumeration(work, per_sample[order], order, fixed, most))


@settings(max_examples=60, deadline=None)
@given(batch=odd_batches(max_samples=7), most=st.integers(1, 8), fixed=st.sampled_from([0.0, 0.7, 5.0]))
def test_cuts_are_the_best_within_the_caps_on_a_single_rank(batch, most, fixed):
    # On one rank the careful attempt at a share of the memory is the attempt at all of it.
    costs, shape = batch
    caps = {"patches_in_flight": shape.patches_in_flight, "tokens_in_flight": shape.tokens_in_flight}
    shape = PipelineShape(encoder_stages=1, llm_stages=1, stage_ranks=(0, 0), **caps)
    plain = BatchCosts(
        encoder_seconds=costs.encoder_seconds,
        llm_seconds=costs.llm_seconds,
        encoder_patches=costs.patches,
        llm_tokens=costs.tokens,
    )
    work = sample_work(plain, shape)
    seconds = rank_seconds(work)
    per_sample = (seconds.forward + seconds.backward).mean(axis=0)
    order = np.argsort(per_sample, kind="stable")
    ends = cut_sorted(work, order, per_sample[order], fixed, most)
    found = per_sample.sum() + len(ends) * fixed
    assert found == pytest.approx(best_by_enumeration(work, per_sample[order], order, fixed, most))


def test_fixed_seconds_ask_for_fewer_microbatches():
    costs = random_costs(40, seed=4)
    counts = [
        assign_microbatches(
            with_fixed_seconds(costs, SHAPE, fixed), SHAPE, num_microbatches=30, policy="dynapipe"
        ).num_microbatches[0]
        for fixed in (0.0, 0.3, 30.0)
    ]
    assert counts[0] == 30 > counts[1] > counts[2]


def test_the_order_of_groups_is_never_slower_than_the_order_of_the_cuts():
    work = sample_work(random_costs(32, seed=5), SHAPE)
    seconds = rank_seconds(work)
    microbatch = np.argsort(np.argsort(work.llm_seconds)) // 4
    forward, backward = seconds.of_microbatches(microbatch, 8)

    def finish(order):
        pipeline = OneForwardOneBackward(len(forward))
        for m in order:
            pipeline.append(forward[:, m].tolist(), backward[:, m].tolist())
        return pipeline.finish()

    order = fastest_group_order(seconds, microbatch, 8)
    assert sorted(order.tolist()) == list(range(8))
    assert finish(order) <= finish(range(8))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_the_growing_1f1b_is_the_simulated_one(num_ranks, count):
    generator = np.random.default_rng(count)
    shape = (
        PipelineShape(encoder_stages=1, llm_stages=3, stage_ranks=None)
        if num_ranks == 4
        else PipelineShape(encoder_stages=0, llm_stages=num_ranks)
    )
    encoder = generator.lognormal(size=count) * (shape.num_encoder_stages > 0)
    costs = BatchCosts(encoder_seconds=encoder, llm_seconds=generator.lognormal(size=count))
    one_each = np.arange(count)
    assignment = Assignment(
        replica=np.zeros(count, dtype=np.int64),
        encoder_microbatch=one_each if shape.num_encoder_stages else np.full(count, -1),
        llm_microbatch=one_each,
        num_microbatches=np.array([count]),
    )
    seconds = rank_seconds(sample_work(costs, shape))
    pipeline = OneForwardOneBackward(num_ranks)
    for sample in range(count):
        pipeline.append(seconds.forward[:, sample].tolist(), seconds.backward[:, sample].tolist())
    expected = simulate(costs, assignment, shape, schedule="1f1b").makespan_seconds
    assert pipeline.finish() == pytest.approx(expected, rel=1e-6)


# disttrain


def test_encoder_work_is_more_even_over_replicas_than_in_order():
    for seed in range(5):
        work = sample_work(random_costs(64, seed=seed), SHAPE)
        loads = [
            np.bincount(split(work, 4), weights=work.encoder_seconds, minlength=4)
            for split in (split_by_encoder_work, split_in_order)
        ]
        assert np.ptp(loads[0]) < np.ptp(loads[1])
        assert np.bincount(split_by_encoder_work(work, 4)).tolist() == [16] * 4


def test_microbatches_are_blocks_of_the_batch():
    costs = random_costs(40, seed=6)
    found = assign_microbatches(costs, SHAPE, num_microbatches=8, policy="disttrain")
    blocks = found.llm_microbatch.reshape(8, 5)
    assert (blocks == blocks[:, :1]).all()
    assert sorted(blocks[:, 0].tolist()) == list(range(8))


@settings(max_examples=60, deadline=None)
@given(num_ranks=st.integers(2, 5), count=st.integers(1, 16), seed=st.integers(0, 100))
def test_the_smallest_is_first_and_the_next_smallest_are_last(num_ranks, count, seed):
    generator = np.random.default_rng(seed)
    forward = generator.lognormal(size=(num_ranks, count))
    order = interval_filling_order(forward, 2 * forward)
    assert sorted(order) == list(range(count))
    by_size = np.argsort(forward.sum(axis=0)).tolist()
    assert order[0] == by_size[0]
    kept = len(by_size[1:num_ranks])
    assert order[len(order) - kept :] == by_size[1:num_ranks][::-1]


def test_waits_take_the_forward_that_fits_best():
    # Two ranks, the second takes 1 s forward and 1 s back: the first one's wait is 2 s after a short first forward, so
    # of 5, 2 and 4 s the 2 s come next; 0.1 s runs first, and 1 s is kept for the end.
    forward = np.array([[5.0, 2.0, 0.1, 4.0, 1.0], [1.0] * 5])
    backward = np.array([[0.0] * 5, [1.0] * 5])
    order = interval_filling_order(forward, backward)
    assert order[:2] == [2, 1]
    assert order[-1] == 4


def test_filled_waits_shorten_the_iteration_where_only_the_encoder_varies():
    shape, gains = PipelineShape(encoder_stages=1, llm_stages=3), []
    for seed in range(8):
        generator = np.random.default_rng(seed)
        costs = BatchCosts(encoder_seconds=generator.lognormal(sigma=0.7, size=24), llm_seconds=np.full(24, 4.0))
        seconds = [
            simulate(
                costs, assign_microbatches(costs, shape, num_microbatches=24, policy=policy), shape
            ).makespan_seconds
            for policy in ("disttrain", "in_order")
        ]
        gains.append(seconds[1] / seconds[0])
    assert np.mean(gains) > 1.0


# dip


@settings(max_examples=80, deadline=None)
@given(batch=odd_batches(), requested=st.integers(1, 24))
def test_nothing_crosses_its_parent(batch, requested):
    costs, shape = batch
    found = assign_microbatches(costs, shape, num_microbatches=requested, policy="dip")
    parents = parent_blocks(sample_work(costs, shape), requested)
    media = found.encoder_microbatch >= 0
    for m in range(found.num_microbatches[0]):
        inside = parents[found.llm_microbatch == m].tolist() + parents[media & (found.encoder_microbatch == m)].tolist()
        assert len(set(inside)) == 1
    assert (np.diff(parents) >= 0).all()


def test_each_modality_is_cut_by_its_own_size():
    # One parent of four samples in two microbatches: the patches are all in the first two samples, the tokens even.
    costs = BatchCosts(
        encoder_seconds=np.array([4.0, 4, 0, 0]), llm_seconds=np.array([1.0, 1, 3, 1]),
        encoder_patches=[40, 40, 0, 0], llm_tokens=[10, 10, 10, 10],
    )  # fmt: skip
    found = assign_microbatches(costs, SHAPE, num_microbatches=2, policy="dip")
    assert found.encoder_microbatch.tolist() == [0, 1, -1, -1]
    assert found.llm_microbatch.tolist() == [0, 1, 1, 1]  # the second sample waits for its image


def test_heavy_parents_get_more_sub_microbatches():
    tokens = np.array([10] * 8 + [100] * 8)
    costs = BatchCosts(encoder_seconds=np.zeros(16), llm_seconds=tokens / 10, llm_tokens=tokens)
    found = assign_microbatches(costs, SHAPE, num_microbatches=4, policy="dip")
    light, heavy = found.llm_microbatch[:8], found.llm_microbatch[8:]
    assert len(set(light.tolist())) == 1
    assert sorted(np.bincount(heavy)[1:].tolist()) == [2, 3, 3]


def test_no_sub_microbatch_is_smaller_than_pays_off():
    costs = random_costs(32, seed=7, text_share=0.0)
    counts = [
        assign_microbatches(
            with_fixed_seconds(costs, SHAPE, fixed), SHAPE, num_microbatches=16, policy="dip"
        ).num_microbatches[0]
        for fixed in (0.0, 1e6)
    ]
    assert counts == [16, 8]


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=20), data=st.data())
def test_even_runs_are_consecutive_and_never_empty(sizes, data):
    count = data.draw(st.integers(1, len(sizes)))
    runs = even_runs(np.array(sizes), count)
    assert (np.diff(runs) >= 0).all()
    assert set(runs.tolist()) == set(range(count))
