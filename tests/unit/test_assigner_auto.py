"""`auto` and `joint`: never slower than where they start, the same answer everywhere, odd batches."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrain_opt.assigner import assign_microbatches, place_replica, sample_work
from entrain_opt.assigner.auto import flow_shop_order, spread_large
from entrain_opt.assigner.evaluate import Evaluator
from entrain_opt.assigner.settings import SearchSettings
from entrain_opt.assignment import BatchCosts
from entrain_opt.errors import AssignmentError
from entrain_opt.plan import PipelineShape
from entrain_opt.simulator import simulate
from entrain_opt.simulator.bounds import work_bound

SHAPE = PipelineShape(encoder_stages=2, llm_stages=2)
STARTS = ("joint", "pairwise", "karmarkar_karp", "in_order")
NAMES = ("replica", "encoder_microbatch", "llm_microbatch", "num_microbatches")
policies = pytest.mark.parametrize("policy", ["auto", "joint"])


def heavy_tailed(seed, num_samples=40, *, text_share=0.2, num_encoders=1, several_media=False):
    """Sizes drawn from log-normal distributions, some samples without media."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 4 if several_media else 2, num_samples)
    counts[generator.random(num_samples) < text_share] = 0
    encoder, llm = generator.lognormal(sigma=1.2, size=counts.sum()), generator.lognormal(sigma=0.8, size=num_samples)
    return BatchCosts(
        encoder_seconds=encoder,
        llm_seconds=llm,
        encoder_patches=np.ceil(100 * encoder).astype(np.int64),
        llm_tokens=np.ceil(100 * llm).astype(np.int64),
        media_offsets=np.concatenate([[0], np.cumsum(counts)]),
        media_encoder=np.arange(len(encoder)) % num_encoders,
    )


def with_memory(costs, *, encoder_stages=2, llm_stages=2, trained=True, room=2.0):
    """A shape whose first stages hold the largest sample `room` times, the later ones less."""
    uncapped = PipelineShape(encoder_stages=encoder_stages, llm_stages=llm_stages, encoder_trained=trained)
    work, stages = sample_work(costs, uncapped), uncapped.num_stages

    def limits(largest, numbers):
        return tuple(int(largest * max(1.0, room * (stages - stage) / stages)) for stage in numbers)

    return replace(
        uncapped,
        patches_in_flight=limits(max(int(work.patches.max()), 1), range(uncapped.num_encoder_stages)),
        tokens_in_flight=limits(int(work.tokens.max()), uncapped.stages_of_llm),
    )


@pytest.mark.parametrize("schedule", ["eager", "1f1b", "eager_split", "zero_bubble"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("requested", [None, 8])
def test_never_slower_than_the_policies_it_starts_from(schedule, trained, requested):
    settings = SearchSettings(schedule=schedule)
    for seed in range(3):
        costs = heavy_tailed(seed)
        work = sample_work(costs, with_memory(costs, trained=trained, room=3.0))
        evaluator = Evaluator(work, schedule)
        options = {"num_microbatches": requested, "settings": settings}
        found = evaluator.seconds(place_replica(work, policy="auto", **options))
        assert np.isfinite(found)
        for policy in STARTS:
            # With an open number the starts are those with the most microbatches.
            start = place_replica(work, policy=policy, num_microbatches=requested or work.num_samples)
            assert found <= evaluator.seconds(start) * (1 + 1e-9)


def test_the_search_finds_more_than_its_starts():
    """Heavy tails leave something to find: it is not only the best start that is returned."""
    gains = []
    for seed in range(3):
        costs = heavy_tailed(seed)
        work = sample_work(costs, with_memory(costs, room=3.0))
        evaluator = Evaluator(work, "eager")
        fast, default = (
            evaluator.seconds(
                place_replica(work, num_microbatches=None, policy="auto", settings=SearchSettings(effort=effort))
            )
            for effort in ("fast", "default")
        )
        gains.append(fast / default)
    assert np.prod(gains) > 1.0


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_samples=st.integers(1, 20),
    num_encoders=st.integers(1, 2),
    trained=st.booleans(),
    room=st.sampled_from([1.0, 1.5, 4.0]),
    requested=st.one_of(st.none(), st.integers(1, 24)),
    schedule=st.sampled_from(["eager", "1f1b", "gpipe", "eager_split", "zero_bubble"]),
)
@policies
def test_promises(policy, seed, num_samples, num_encoders, trained, room, requested, schedule):
    costs = heavy_tailed(seed, num_samples, num_encoders=num_encoders, several_media=True)
    shape = with_memory(costs, encoder_stages=(1, 2)[:num_encoders], trained=trained, room=room)
    found = assign_microbatches(
        costs, shape, num_microbatches=requested, policy=policy, schedule=schedule, effort="fast"
    )
    found.check(costs, shape)
    assert set(found.llm_microbatch.tolist()) == set(range(found.num_microbatches[0]))
    # A cap may make it impossible to run what each microbatch alone allows, so the bound is asked without caps.
    free = replace(shape, patches_in_flight=None, tokens_in_flight=None)
    seconds = simulate(costs, found, free, schedule=schedule).pipeline_seconds
    assert seconds >= work_bound(costs, found, free) * (1 - 1e-9)


def test_bounds_hold_under_memory_too():
    for seed in range(3):
        costs = heavy_tailed(seed)
        shape = with_memory(costs, room=3.0)
        found = assign_microbatches(costs, shape, effort="fast")
        work = sample_work(costs, shape)
        placement = place_replica(work, num_microbatches=None, policy="auto", settings=SearchSettings(effort="fast"))
        assert Evaluator(work, "eager").seconds(placement) >= work_bound(costs, found, shape) * (1 - 1e-6)
        assert found.llm_microbatch.tolist() == placement.llm_microbatch.tolist()


def digest():
    """Of both policies' answers to some batches."""
    content = hashlib.sha256()
    for policy in ("auto", "joint"):
        for seed in range(2):
            costs = heavy_tailed(seed, 60, several_media=True)
            found = assign_microbatches(costs, with_memory(costs), num_replicas=2, policy=policy)
            for name in NAMES:
                content.update(np.ascontiguousarray(getattr(found, name), dtype=np.int64).tobytes())
    return content.hexdigest()


def test_other_processes_find_the_same_bytes():
    code = "import test_assigner_auto as t; print(t.digest())"
    running = []
    for threads in ("1", "4"):
        variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
        environment = os.environ | dict.fromkeys(variables, threads) | {"PYTHONHASHSEED": threads}
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=Path(__file__).parent,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    answers = [process.communicate(timeout=300)[0].strip() for process in running]
    assert answers == [digest()] * 2


def test_the_seed_matters_and_the_global_generators_do_not():
    import random

    costs = heavy_tailed(0, 60)
    shape = with_memory(costs)
    answers = []
    for seed, state in ((0, 1), (0, 2), (1, 1)):
        random.seed(state)
        np.random.seed(state)
        answers.append(assign_microbatches(costs, shape, seed=seed).llm_microbatch.tolist())
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def with_a_giant(seed=0, num_samples=24, num_items=12):
    """Small samples of one media item, and one sample whose many items are a third of all encoder work."""
    small = heavy_tailed(seed, num_samples, text_share=0.0)
    encoder = np.concatenate([small.encoder_seconds, np.full(num_items, small.encoder_seconds.sum() / 2 / num_items)])
    return BatchCosts(
        encoder_seconds=encoder,
        llm_seconds=np.append(small.llm_seconds, small.llm_seconds.mean()),
        encoder_patches=np.ceil(100 * encoder).astype(np.int64),
        llm_tokens=np.append(small.tokens, 100),
        media_offsets=np.append(small.media_offsets, len(encoder)),
    )


@pytest.mark.parametrize("trained", [False, True])
def test_media_of_a_giant_are_spread_before_any_search(trained):
    costs = with_a_giant()
    shape = PipelineShape(encoder_stages=3, llm_stages=3, encoder_trained=trained)
    work = sample_work(costs, shape)
    found = place_replica(work, num_microbatches=None, policy="auto", settings=SearchSettings(effort="least"))
    giant = costs.media_sample == costs.num_samples - 1
    used = np.unique(found.encoder_microbatch[giant])
    assert len(used) > 4
    assert used.max() <= found.llm_microbatch[-1]
    together = replace(found, encoder_microbatch=np.where(giant, found.llm_microbatch[-1], found.encoder_microbatch))
    evaluator = Evaluator(work, "eager")
    assert evaluator.seconds(found) < 0.95 * evaluator.seconds(together)


def test_media_of_a_giant_stay_together_where_other_microbatches_are_full():
    # Four microbatches of 90 patches each; no two items fit beside the 90.
    costs = BatchCosts(
        encoder_seconds=np.concatenate([np.ones(27), np.full(8, 2.0)]),
        llm_seconds=np.ones(28),
        encoder_patches=np.concatenate([np.full(27, 10), np.full(7, 11), [13]]),
        llm_tokens=np.full(28, 10),
        media_offsets=np.append(np.arange(28), 35),
    )
    shape = PipelineShape(encoder_stages=2, llm_stages=2, patches_in_flight=100)
    work = sample_work(costs, shape)
    found = place_replica(work, num_microbatches=4, policy="auto", settings=SearchSettings(effort="least"))
    assert np.isfinite(Evaluator(work, "eager").seconds(found))
    assert len(np.unique(found.encoder_microbatch[27:])) == 1


@pytest.mark.parametrize("requested", [None, 6])
@pytest.mark.parametrize("trained", [True, False])
def test_joint_finds_the_same_groups_in_any_order(requested, trained):
    generator = np.random.default_rng(0)
    for text_share in (0.0, 0.4):
        costs = heavy_tailed(3, 48, text_share=text_share)
        shape = replace(SHAPE, encoder_trained=trained)
        options = {"num_replicas": 2, "num_microbatches": requested, "policy": "joint"}
        found = assign_microbatches(costs, shape, **options)
        order = generator.permutation(48)
        permuted = assign_microbatches(costs.take(order), shape, **options)
        assert permuted.replica.tolist() == found.replica[order].tolist()
        assert permuted.llm_microbatch.tolist() == found.llm_microbatch[order].tolist()


@policies
@pytest.mark.parametrize("requested", [None, 1, 4])
@pytest.mark.parametrize("trained", [True, False])
def test_odd_batches(policy, requested, trained):
    def assign(encoder, llm, *, encoder_stages=2, **columns):
        costs = BatchCosts(encoder_seconds=np.array(encoder, float), llm_seconds=np.array(llm, float), **columns)
        shape = PipelineShape(encoder_stages=encoder_stages, llm_stages=2, encoder_trained=trained)
        found = assign_microbatches(costs, shape, num_microbatches=requested, policy=policy)
        found.check(costs, shape)
        assert 1 <= found.num_microbatches[0] <= min(requested or len(llm), len(llm))
        return found

    one = assign([1], [1])
    assert (one.llm_microbatch.tolist(), one.num_microbatches.tolist()) == ([0], [1])
    assign([1, 2], [2, 1])  # fewer samples than microbatches
    text_only = assign([0] * 6, [1, 2, 3, 1, 2, 3])
    assert text_only.encoder_microbatch.tolist() == [-1] * 6
    equal = assign([1] * 8, [2] * 8)
    sizes = np.bincount(equal.llm_microbatch)
    assert sizes.max() - sizes.min() <= (0 if policy == "joint" else 7)
    assign([100, 1, 1, 1, 1, 1, 1, 1], [100, 1, 1, 1, 1, 1, 1, 1])  # one giant
    assign([0] * 5, [1] * 5, encoder_patches=np.full(5, 3))  # an encoder that costs nothing
    assign([], [1, 2, 3], media_offsets=np.zeros(4, dtype=int))  # no media at all
    assign([0] * 4, [1, 2, 3, 4], encoder_stages=0)
    assign([1, 2, 3, 4], [1, 2, 3, 4], encoder_stages=(1, 1), media_encoder=np.array([0, 1, 0, 1]))
    assign([0] * 4, [0] * 4)


@policies
def test_a_sample_that_fits_nowhere_is_named(policy):
    costs = heavy_tailed(0)
    shape = replace(SHAPE, tokens_in_flight=int(costs.tokens.max()) - 1)
    with pytest.raises(AssignmentError, match=f"sample {costs.tokens.argmax()}: .*tokens_in_flight"):
        assign_microbatches(costs, shape, policy=policy)


def test_frozen_encoders_defer_more():
    """A trained encoder would get its gradients later; a frozen one loses nothing."""
    waits = []
    for trained in (True, False):
        shape = replace(SHAPE, encoder_trained=trained)
        waits.append(
            sum(
                len(assign_microbatches(costs, shape, num_microbatches=8, policy="joint").deferred_samples(costs))
                for costs in (heavy_tailed(seed, 24) for seed in range(5))
            )
        )
    assert waits[0] < waits[1]


@pytest.mark.parametrize(("name", "message"), [("effort", "fast.*thorough"), ("schedule", "1f1b.*zero_bubble")])
def test_unknown_settings(name, message):
    costs = heavy_tailed(0, 4)
    with pytest.raises(AssignmentError, match=f"{name}: expected one of .*{message}.*found 'nonesuch'"):
        assign_microbatches(costs, SHAPE, **{name: "nonesuch"})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_flow_shop_order_is_the_best_of_two_machines(jobs):
    def makespan(order):
        first = second = 0
        for job in order:
            first += jobs[job][0]
            second = max(first, second) + jobs[job][1]
        return second

    order = flow_shop_order(*np.array(jobs, dtype=np.float64).T)
    assert sorted(order.tolist()) == list(range(len(jobs)))
    assert makespan(order) == min(map(makespan, permutations(range(len(jobs)))))


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(12)), st.integers(1, 5), st.sampled_from([(0.3, 0.7), (0.0, 0.6), (0.5, 1.0)]))
def test_large_ones_are_spread_and_keep_their_order(order, num_large, between):
    order, is_large = np.array(order), np.arange(12) < num_large
    size = np.where(is_large, 50.0, 1.0)
    found = spread_large(order, size, is_large, *between)
    assert found[is_large[found]].tolist() == order[is_large[order]].tolist()
    assert found[~is_large[found]].tolist() == order[~is_large[order]].tolist()
    # Parts of the others' work that stand before each large one: evenly spaced, up to one of the others.
    before = np.cumsum(~is_large[found])[is_large[found]] / (12 - num_large)
    wanted = between[0] + (between[1] - between[0]) * (np.arange(num_large) + 0.5) / num_large
    assert np.abs(before - wanted).max() <= 1 / (12 - num_large)


def test_a_frozen_encoder_is_ordered_as_a_flow_shop():
    """Encoder-heavy samples last: in the order given, the language model waits for the encoder."""
    encoder, llm = np.linspace(2.0, 0.1, 16), np.linspace(0.1, 2.0, 16)
    costs = BatchCosts(encoder_seconds=encoder, llm_seconds=llm / 3)
    shape = PipelineShape(encoder_stages=1, llm_stages=1, encoder_trained=False)
    found = assign_microbatches(costs, shape, effort="least")
    in_order = assign_microbatches(costs, shape, num_microbatches=16, policy="in_order")
    spans = [simulate(costs, assignment, shape).makespan_seconds for assignment in (found, in_order)]
    assert spans[0] < 0.75 * spans[1]
    assert found.llm_microbatch[-1] == 0
