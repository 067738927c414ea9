"""`assign_microbatches`: every policy keeps every promise on odd batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner import POLICIES, assign_microbatches, assign_replica, sample_work
from entrain_opt.assigner.settings import SearchSettings
from entrain_opt.assignment import BatchCosts
from entrain_opt.errors import AssignmentError
from entrain_opt.plan import PipelineShape

SHAPE = PipelineShape(encoder_stages=2, llm_stages=2)
#: Policies that may encode the media items of a sample in different microbatches, or choose their own number of them.
SEARCHING = {name for name, policy in POLICIES.items() if policy.search}
policies = pytest.mark.parametrize("policy", sorted(POLICIES))


@st.composite
def batches(draw):
    """Batches with 0 to 3 media items per sample in one or two encoders, zero costs included."""
    num_samples = draw(st.integers(1, 24))
    counts = draw(st.lists(st.integers(0, 3), min_size=num_samples, max_size=num_samples))
    num_media, num_encoders = sum(counts), draw(st.integers(1, 2))
    amounts = st.one_of(st.just(0.0), st.floats(0.01, 20.0))
    encoder = np.array(draw(st.lists(amounts, min_size=num_media, max_size=num_media)))
    llm = np.array(draw(st.lists(amounts, min_size=num_samples, max_size=num_samples)))
    costs = BatchCosts(
        encoder_seconds=encoder,
        llm_seconds=llm,
        encoder_patches=np.ceil(encoder * 10).astype(int) + 1,
        llm_tokens=np.ceil(llm * 10).astype(int) + 1,
        media_offsets=np.concatenate([[0], np.cumsum(counts)]),
        media_encoder=np.arange(num_media) % num_encoders,
    )
    uncapped = PipelineShape(encoder_stages=(2, 1)[:num_encoders], llm_stages=3)
    work = sample_work(costs, uncapped)
    patches_room, tokens_room = draw(st.tuples(*[st.sampled_from([None, 1.0, 1.3, 2.5])] * 2))
    shape = PipelineShape(
        encoder_stages=uncapped.encoder_stages,
        llm_stages=3,
        encoder_trained=draw(st.booleans()),
        patches_in_flight=None if patches_room is None else int(max(work.patches.max(), 1) * patches_room),
        tokens_in_flight=None if tokens_room is None else int(work.tokens.max() * tokens_room),
    )
    return costs, shape


@policies
@settings(max_examples=40, deadline=None)
@given(batch=batches(), num_replicas=st.integers(1, 4), requested=st.one_of(st.none(), st.integers(1, 12)))
def test_promises(policy, batch, num_replicas, requested):
    costs, shape = batch
    options = {"num_replicas": num_replicas, "num_microbatches": requested, "policy": policy, "effort": "fast"}
    found = assign_microbatches(costs, shape, **options)
    found.check(costs, shape)
    assert found.policy == policy
    assert found.num_microbatches.shape == (num_replicas,)
    for replica in range(num_replicas):
        used = found.llm_microbatch[found.replica == replica]
        assert set(used.tolist()) == set(range(found.num_microbatches[replica]))
    if policy not in SEARCHING:
        for sample in range(costs.num_samples):
            assert len(set(found.encoder_microbatch[costs.media_sample == sample].tolist())) <= 1
    again = assign_microbatches(costs, shape, **options)
    for name in ("replica", "encoder_microbatch", "llm_microbatch", "num_microbatches"):
        assert getattr(found, name).tobytes() == getattr(again, name).tobytes()


@pytest.mark.parametrize("policy", ["pairwise", "karmarkar_karp"])
@pytest.mark.parametrize("requested", [None, 6])
def test_permuting_samples_permutes_the_answer(policy, requested):
    generator = np.random.default_rng(0)
    for text_share in (0.0, 0.4):
        encoder = generator.lognormal(size=48) * (generator.random(48) >= text_share)
        costs = BatchCosts(encoder_seconds=encoder, llm_seconds=generator.lognormal(size=48))
        options = {"num_replicas": 3, "num_microbatches": requested, "policy": policy}
        found = assign_microbatches(costs, SHAPE, **options)
        order = generator.permutation(48)
        permuted = assign_microbatches(costs.take(order), SHAPE, **options)
        for name in ("replica", "encoder_microbatch", "llm_microbatch"):
            assert getattr(permuted, name).tolist() == getattr(found, name)[order].tolist()


@policies
def test_work_is_conserved_and_peers_defer_nothing(policy):
    generator = np.random.default_rng(1)
    costs = BatchCosts(encoder_seconds=generator.lognormal(size=40), llm_seconds=generator.lognormal(size=40))
    found = assign_microbatches(costs, SHAPE, num_microbatches=5, policy=policy)
    for microbatch, values in (
        (found.encoder_microbatch, costs.encoder_seconds),
        (found.llm_microbatch, costs.llm_seconds),
    ):
        assert np.bincount(microbatch, weights=values).sum() == pytest.approx(values.sum())
    if policy not in {"pairwise", "joint"} | SEARCHING:
        assert len(found.deferred_samples(costs)) == 0


@policies
@pytest.mark.parametrize("requested", [None, 1, 4])
def test_odd_batches(policy, requested):
    def assign(encoder, llm, shape=SHAPE, num_replicas=1):
        costs = BatchCosts(encoder_seconds=np.array(encoder, float), llm_seconds=np.array(llm, float))
        return assign_microbatches(costs, shape, num_replicas=num_replicas, num_microbatches=requested, policy=policy)

    assert assign([1], [1]).num_microbatches.tolist() == [1]
    fewer_than_replicas = assign([1, 2], [2, 1], num_replicas=4)
    assert sorted(fewer_than_replicas.num_microbatches.tolist()) == [0, 0, 1, 1]
    text_only = assign([0] * 6, [1, 2, 3, 1, 2, 3])
    assert text_only.encoder_microbatch.tolist() == [-1] * 6
    no_encoder = assign([0] * 6, [1, 2, 3, 1, 2, 3], shape=PipelineShape(encoder_stages=0, llm_stages=3))
    free = assign([0] * 5, [0] * 5)
    if policy == "token_budget" and requested != 1:  # 4 budgets of whole samples: two of one token fit in each
        assert [no_encoder.num_microbatches[0], free.num_microbatches[0]] == [6 if requested is None else 3, 3]
    elif policy in SEARCHING:
        for found in (no_encoder, free):
            assert 1 <= found.num_microbatches[0] <= (6 if requested is None else requested)
    elif policy == "joint" and requested is None:
        assert free.num_microbatches[0] in (4, 5)
    else:
        assert no_encoder.num_microbatches[0] == (6 if requested is None else requested)
        assert free.num_microbatches[0] == (4 if requested is None else requested)  # ties: fewest
    assert assign([], [], num_replicas=2).num_microbatches.tolist() == [0, 0]


def test_in_order_takes_any_number_of_samples():
    costs = BatchCosts(encoder_seconds=np.ones(7), llm_seconds=np.ones(7))
    found = assign_microbatches(costs, SHAPE, num_microbatches=3, policy="in_order")
    assert found.llm_microbatch.tolist() == [0, 0, 0, 1, 1, 2, 2]


@policies
def test_memory_caps_outrank_the_requested_number_of_microbatches(policy):
    costs = BatchCosts(encoder_seconds=np.ones(8), llm_seconds=np.ones(8), llm_tokens=np.full(8, 10))
    shape = PipelineShape(encoder_stages=1, llm_stages=1, tokens_in_flight=25)
    found = assign_microbatches(costs, shape, num_microbatches=2, policy=policy)
    assert found.num_microbatches[0] == 4
    assert np.bincount(found.llm_microbatch).tolist() == [2, 2, 2, 2]


@policies
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"patches_in_flight": 100}, "sample 1: expected at most 100 patches .* found 120"),
        ({"tokens_in_flight": 30}, "sample 2: expected at most 30 tokens .* found 31"),
    ],
)
def test_a_sample_above_a_cap_is_named(policy, limits, expected):
    # Two items of 60 patches exceed the cap together: the media of one sample share a microbatch.
    costs = BatchCosts(
        encoder_seconds=np.ones(4),
        llm_seconds=np.ones(3),
        encoder_patches=[50, 60, 60, 50],
        llm_tokens=[10, 20, 31],
        media_offsets=[0, 1, 3, 4],
    )
    shape = PipelineShape(encoder_stages=1, llm_stages=1, **limits)
    with pytest.raises(AssignmentError, match=expected):
        assign_microbatches(costs, shape, num_replicas=2, policy=policy)


def test_loads_are_per_stage_of_each_encoder():
    costs = BatchCosts(
        encoder_seconds=[8.0, 6.0, 4.0], llm_seconds=[10.0, 5.0], media_offsets=[0, 2, 3], media_encoder=[0, 1, 0]
    )
    work = sample_work(costs, PipelineShape(encoder_stages=(4, 2), llm_stages=5))
    assert work.encoder_seconds.tolist() == [3 * (8 / 4 + 6 / 2), 3 * 4 / 4]
    assert work.llm_seconds.tolist() == [6.0, 3.0]
    frozen = sample_work(costs, PipelineShape(encoder_stages=(4, 2), llm_stages=5, encoder_trained=False))
    assert frozen.encoder_seconds.tolist() == [8 / 4 + 6 / 2, 4 / 4]


def test_errors_say_what_is_wrong():
    costs = BatchCosts(encoder_seconds=[1.0, 1.0], llm_seconds=[1.0, 1.0])
    with pytest.raises(AssignmentError, match=r"in_order.*karmarkar_karp.*pairwise.*found 'best'"):
        assign_microbatches(costs, SHAPE, policy="best")
    for name in ("num_replicas", "num_microbatches"):
        for value in (0, -1, 1.5, True):
            with pytest.raises(AssignmentError, match=f"{name}: expected a whole number of at least 1"):
                assign_microbatches(costs, SHAPE, **{name: value})
    with pytest.raises(AssignmentError, match="sample 0: expected media for one of 0 encoders"):
        assign_microbatches(costs, PipelineShape(encoder_stages=0, llm_stages=1))
    staged = BatchCosts(encoder_seconds=[1.0], llm_seconds=[1.0], stages=costs.stage_costs(SHAPE))
    with pytest.raises(AssignmentError, match="expected 1 encoder stages of 3"):
        assign_microbatches(staged, PipelineShape(encoder_stages=1, llm_stages=2))


@pytest.mark.parametrize("policy", ["auto", "pairwise", "in_order"])
@pytest.mark.parametrize("num_samples", [2, 9])
def test_a_replica_alone_gets_the_same_as_in_the_whole(policy, num_samples):
    """Also a replica without samples: there are three replicas."""
    rng = np.random.default_rng(5)
    costs = BatchCosts(encoder_seconds=rng.random(num_samples), llm_seconds=rng.random(num_samples))
    whole = assign_microbatches(
        costs, SHAPE, num_replicas=3, num_microbatches=4, policy=policy, effort="fast", schedule="1f1b"
    )
    chosen = SearchSettings(schedule="1f1b", effort="fast")
    for replica in range(3):
        mine = assign_replica(
            costs, SHAPE, replica=replica, num_replicas=3, num_microbatches=4, policy=policy, settings=chosen
        )
        assert (mine.replica == whole.replica).all()
        assert (mine.samples == np.flatnonzero(whole.replica == replica)).all()
        assert (mine.assignment.llm_microbatch == whole.llm_microbatch[mine.samples]).all()
        assert (mine.assignment.encoder_microbatch == whole.encoder_microbatch[mine.samples]).all()
        assert mine.assignment.num_microbatches[0] == whole.num_microbatches[replica]
