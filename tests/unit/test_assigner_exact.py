"""`exact` against brute force on tiny cases, and never worse than its hint elsewhere."""

import itertools

import numpy as np
import pytest

from entrain_opt.assigner import POLICIES, sample_work
from entrain_opt.assigner.auto import place_auto
from entrain_opt.assigner.evaluate import Evaluator
from entrain_opt.assigner.exact import DETERMINISTIC_LIMITS, TOLERANCE, place_exact, solve_exact, work_seconds
from entrain_opt.assigner.exact_scope import choose_scope
from entrain_opt.assigner.joint import place_joint
from entrain_opt.assigner.settings import EFFORTS, SearchSettings
from entrain_opt.assigner.work import place_samples
from entrain_opt.assignment import Assignment, BatchCosts, StageCosts
from entrain_opt.plan import PipelineShape
from entrain_opt.simulator import simulate

FAST = SearchSettings(effort="fast")


def random_work(seed, num_samples, shape, *, text_share=0.2, fixed=0.0, whole=False):
    """Samples of at most one media item each, perhaps with whole seconds, transfers and seconds per unit."""
    generator = np.random.default_rng(seed)
    draw = (lambda: generator.integers(1, 9, num_samples).astype(float)) if whole else None
    encoder = draw() if draw else generator.lognormal(size=num_samples)
    llm = draw() if draw else generator.lognormal(size=num_samples)
    encoder = encoder * (generator.random(num_samples) >= text_share)
    amounts = {
        "encoder_patches": np.where(encoder > 0, generator.integers(1, 5, num_samples), 0),
        "llm_tokens": generator.integers(1, 5, num_samples),
    }
    costs = BatchCosts(encoder_seconds=encoder, llm_seconds=llm, **amounts)
    if fixed:
        stages = costs.stage_costs(shape)
        values = {name: getattr(stages, name) for name in StageCosts.__dataclass_fields__}
        values["forward_fixed_seconds"] = values["backward_fixed_seconds"] = (fixed,) * shape.num_stages
        values["send_fixed_seconds"] = fixed / 2
        costs = BatchCosts(encoder_seconds=encoder, llm_seconds=llm, **amounts, stages=StageCosts(**values))
    return sample_work(costs, shape)


def check(work, placement):
    assignment = Assignment(
        replica=np.zeros(work.num_samples, dtype=np.int64),
        encoder_microbatch=placement.encoder_microbatch,
        llm_microbatch=placement.llm_microbatch,
        num_microbatches=np.array([placement.num_microbatches]),
    )
    assignment.check(work.costs, work.shape)
    assert set(placement.llm_microbatch.tolist()) == set(range(placement.num_microbatches))
    return assignment


# Brute force.


def operations_of(work, encoder, llm):
    """(rank, seconds, predecessors with delays) of every operation of an assignment, from the definition.

    Each sample has one media item at most; an encoder unit is what shares (microbatch, consumer), or microbatch alone
    where no gradients return.
    """
    shape, stages = work.shape, work.costs.stage_costs(work.shape)
    media = work.costs.has_media
    trained = shape.num_encoders and shape.encoder_has_backward(0)
    units = {}  # (is_llm, name) -> samples
    for sample in range(work.num_samples):
        units.setdefault((True, int(llm[sample])), []).append(sample)
        if media[sample]:
            name = (int(encoder[sample]), int(llm[sample]) if trained else -1)
            units.setdefault((False, name), []).append(sample)
    operations, ranks = {}, shape.ranks_of_stages
    for (is_llm, name), samples in units.items():
        for stage in shape.stages_of_llm if is_llm else range(shape.num_encoder_stages):
            rank = ranks[stage]
            forward = stages.forward_seconds[stage][samples].sum() + stages.forward_fixed_seconds[stage]
            operations["f", stage, name] = (rank, forward, [])
            if shape.has_backward[stage]:
                backward = stages.backward_seconds[stage][samples].sum() + stages.backward_fixed_seconds[stage]
                operations["b", stage, name] = (rank, backward, [(("f", stage, name), 0.0)])
    for (is_llm, name), samples in units.items():
        for stage in shape.stages_of_llm if is_llm else range(shape.num_encoder_stages):
            targets = [name] if stage + 1 < shape.num_stages else []
            if stage + 1 == shape.num_encoder_stages:
                targets = sorted({int(llm[sample]) for sample in samples})
            sent = stages.send_fixed_seconds if targets and ranks[stage] != ranks[stage + 1] else 0.0
            for target in targets:
                operations["f", stage + 1, target][2].append((("f", stage, name), sent))
                if shape.has_backward[stage]:
                    operations["b", stage, name][2].append((("b", stage + 1, target), sent))
    return operations


def shortest(operations, best):
    """The least makespan below `best` over all orders on all ranks: depth-first over which operation starts next.

    Active schedules suffice: of the operations that may come next, only those that can start before the earliest
    possible end on that rank.
    """
    names = list(operations)

    def tail_of(name, known):
        if name not in known:
            following = [n for n in names if any(p == name for p, _ in operations[n][2])]
            known[name] = max((tail_of(n, known) + operations[n][1] for n in following), default=0.0)
        return known[name]

    tails = {}
    for name in names:
        tail_of(name, tails)

    def visit(ends, free, least):
        ready = [
            (max(free[rank], max((ends[p] + delay for p, delay in before), default=0.0)), seconds, rank, name)
            for name, (rank, seconds, before) in operations.items()
            if name not in ends and all(p in ends for p, _ in before)
        ]
        if not ready:
            return min(least, max(ends.values()))
        if max(start + seconds + tails[name] for start, seconds, _, name in ready) >= least - 1e-9:
            return least
        for rank in free:  # what the rank has left to do
            left = sum(s for n, (r, s, _) in operations.items() if r == rank and n not in ends)
            if left and free[rank] + left >= least - 1e-9:
                return least
        first_end, on_rank = min((start + seconds, rank) for start, seconds, rank, _ in ready)
        for start, seconds, rank, name in sorted(ready):
            if rank == on_rank and (start < first_end - 1e-12 or seconds == 0):
                least = visit({**ends, name: start + seconds}, {**free, rank: start + seconds}, least)
        return least

    return visit({}, {rank: 0.0 for rank, _, _ in operations.values()}, best)


def brute_force(work, count):
    """The least makespan over all assignments to at most `count` microbatches and all orders."""
    best = np.inf
    media = work.costs.has_media
    for llm in itertools.product(range(count), repeat=work.num_samples):
        if set(llm) != set(range(max(llm) + 1)):
            continue
        choices = [range(m + 1) if has else (0,) for m, has in zip(llm, media, strict=True)]
        for encoder in itertools.product(*choices):
            if _fits(work, encoder, llm):
                best = shortest(operations_of(work, encoder, llm), best)
    return best


def _fits(work, encoder, llm):
    tokens, patches = np.bincount(llm, work.tokens), np.bincount(encoder, work.patches)
    return tokens.max() <= work.tokens_limit and patches.max() <= work.patches_limit


TINY = [
    (PipelineShape(encoder_stages=1, llm_stages=1), 4, 2, 0.0),
    (PipelineShape(encoder_stages=1, llm_stages=1), 3, 3, 0.5),
    (PipelineShape(encoder_stages=1, llm_stages=1, encoder_trained=False), 3, 3, 0.0),
    (PipelineShape(encoder_stages=1, llm_stages=1, stage_ranks=(0, 0)), 3, 2, 0.5),
    (PipelineShape(encoder_stages=1, llm_stages=2), 3, 2, 0.25),
    (PipelineShape(encoder_stages=2, llm_stages=2), 3, 2, 0.0),
    (PipelineShape(encoder_stages=0, llm_stages=2), 3, 3, 0.0),
]


@pytest.mark.parametrize(("shape", "num_samples", "count", "fixed"), TINY)
@pytest.mark.parametrize("seed", range(2))
def test_the_optimum_is_that_of_brute_force(shape, num_samples, count, fixed, seed):
    text_share = 1.0 if not shape.num_encoders else 0.2
    work = random_work(seed, num_samples, shape, fixed=fixed, whole=True, text_share=text_share)
    hint = place_joint(work, count)
    found = solve_exact(work, count, FAST, hint=hint, deterministic_limit=60.0)
    expected = brute_force(work, count)
    assert found.status == "optimal"
    assert found.model_seconds == pytest.approx(expected, rel=1e-4)
    assert found.bound_seconds <= expected * (1 + 1e-9)
    assert found.bound_seconds == pytest.approx(expected, rel=1e-3)
    check(work, found.placement)


@pytest.mark.parametrize("seed", range(3))
def test_caps_of_a_microbatch_are_part_of_the_optimum(seed):
    free = random_work(seed, 4, PipelineShape(encoder_stages=1, llm_stages=1), whole=True)
    stage_seconds = free.costs.stage_costs(free.shape).backward_seconds
    assert stage_seconds[0].sum() > 0
    shape = PipelineShape(encoder_stages=1, llm_stages=1, encoder_trained=False, patches_in_flight=5)
    work = sample_work(free.costs, shape)
    hint = place_joint(work, 3)
    found = solve_exact(work, 3, FAST, hint=hint, deterministic_limit=60.0)
    count = max(3, hint.num_microbatches)
    assert found.status == "optimal"
    assert found.model_seconds == pytest.approx(brute_force(work, count), rel=1e-4)


SHAPES = [
    PipelineShape(encoder_stages=2, llm_stages=2),
    PipelineShape(encoder_stages=1, llm_stages=3, encoder_trained=False),
    PipelineShape(encoder_stages=2, llm_stages=2, tokens_in_flight=6, patches_in_flight=6),
    PipelineShape(encoder_stages=2, llm_stages=2, stage_ranks=(0, 1, 0, 1)),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("schedule", ["eager", "1f1b", "gpipe", "eager_split", "zero_bubble", "search"])
def test_never_worse_than_the_hint_and_within_the_bound(shape, schedule):
    settings = SearchSettings(schedule=schedule, effort="fast")
    for seed, num_samples, count in ((0, 4, 3), (1, 10, 5)):
        work = random_work(seed, num_samples, shape, fixed=0.05)
        hint = place_joint(work, count)
        before = Evaluator(work, schedule).seconds(hint)
        found = solve_exact(work, count, settings, hint=hint, deterministic_limit=0.02)
        check(work, found.placement)
        assert found.seconds == Evaluator(work, schedule).seconds(found.placement) <= before
        assert found.bound_seconds <= min(found.seconds, found.model_seconds) * (1 + 1e-9)
        assert found.gap == pytest.approx(1 - found.bound_seconds / found.seconds)
        assert work_seconds(work) <= found.bound_seconds * (1 + 1e-9)
        again = solve_exact(work, count, settings, hint=hint, deterministic_limit=0.02)
        assert again.placement.llm_microbatch.tolist() == found.placement.llm_microbatch.tolist()
        assert again.placement.encoder_microbatch.tolist() == found.placement.encoder_microbatch.tolist()


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_the_bound_holds_for_every_placement_and_order(shape):
    work = random_work(5, 4, shape, fixed=0.02)
    found = solve_exact(work, 3, FAST, hint=place_joint(work, 3), deterministic_limit=5.0)
    generator = np.random.default_rng(0)
    for _ in range(60):
        llm = generator.integers(0, 3, 4)
        placement = place_samples(work, generator.integers(0, llm + 1), llm)
        for schedule in ("eager", "1f1b", "gpipe"):
            assert found.bound_seconds <= Evaluator(work, schedule).seconds(placement) * (1 + 1e-9)


def test_seconds_are_those_of_the_simulator():
    work = random_work(2, 9, SHAPES[0])
    found = solve_exact(work, 4, FAST, hint=place_joint(work, 4), deterministic_limit=0.2)
    assignment = check(work, found.placement)
    timeline = simulate(work.costs, assignment, work.shape, schedule="eager")
    assert timeline.makespan_seconds == pytest.approx(found.seconds, rel=1e-6)


def test_improves_a_poor_hint():
    work = random_work(0, 5, SHAPES[0])
    hint = place_samples(work, np.zeros(5, dtype=np.int64), np.zeros(5, dtype=np.int64))
    found = solve_exact(work, 3, FAST, hint=hint, deterministic_limit=20.0)
    assert found.seconds < 0.8 * Evaluator(work, "eager").seconds(hint)


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_six_samples_in_three_microbatches_are_proven(shape):
    work = random_work(4, 6, shape)
    found = solve_exact(work, 3, FAST, hint=place_joint(work, 3), deterministic_limit=60.0)
    assert found.status == "optimal"
    assert found.bound_seconds == pytest.approx(found.model_seconds, rel=1e-3)
    assert found.model_seconds <= found.seconds * (1 + 1e-4)


def test_split_media_and_several_encoders_are_modelled():
    costs = BatchCosts(
        encoder_seconds=[3.0, 1.0, 2.0, 4.0, 1.0],
        llm_seconds=[2.0, 5.0, 3.0, 1.0],
        media_offsets=[0, 3, 3, 4, 5],
        media_encoder=[0, 1, 0, 1, 0],
    )
    for trained in (True, False):
        work = sample_work(costs, PipelineShape(encoder_stages=(1, 2), llm_stages=2, encoder_trained=trained))
        for effort in ("fast", "default"):
            hint = place_auto(work, 3, SearchSettings(effort=effort))
            found = solve_exact(work, 3, FAST, hint=hint, deterministic_limit=0.5)
            check(work, found.placement)
            assert found.seconds <= Evaluator(work, "eager").seconds(hint)


def test_large_problems_are_narrowed_around_the_hint():
    work = random_work(3, 200, PipelineShape(encoder_stages=1, llm_stages=2))
    hint = place_joint(work, 40)
    scope = choose_scope(work, 40, hint)
    assert not scope.complete
    free = [len(choices) > 1 for choices in scope.llm]
    assert 0 < sum(free) < 200
    for sample, choices in enumerate(scope.llm):
        assert hint.llm_microbatch[sample] in choices
    found = solve_exact(work, 40, FAST, hint=hint, deterministic_limit=0.05)
    check(work, found.placement)
    assert found.status in ("feasible", "neighbourhood", "hint")
    assert found.seconds <= Evaluator(work, "eager").seconds(hint)


def test_a_time_limit_too_short_for_a_solver_returns_the_hint():
    work = random_work(0, 6, SHAPES[0])
    hint = place_joint(work, 3)
    found = solve_exact(work, 3, FAST, hint=hint, deterministic_limit=60.0, time_limit_seconds=0.0)
    assert found.status == "hint"
    assert found.placement == hint
    assert np.isinf(found.model_seconds)
    assert found.bound_seconds == work_seconds(work)


def test_the_policy_leaves_a_good_answer_alone_and_never_makes_it_worse():
    assert POLICIES["exact"].search is place_exact
    even = sample_work(
        BatchCosts(encoder_seconds=np.zeros(8), llm_seconds=np.ones(8)), PipelineShape(encoder_stages=0, llm_stages=1)
    )
    hint = place_auto(even, 4, FAST)
    assert Evaluator(even, "eager").seconds(hint) <= (1 + TOLERANCE) * work_seconds(even)
    assert place_exact(even, 4, FAST).llm_microbatch.tolist() == hint.llm_microbatch.tolist()
    for seed in range(3):
        work = random_work(seed, 8, SHAPES[seed])
        evaluator = Evaluator(work, "eager")
        found = place_exact(work, None, FAST)
        check(work, found)
        assert evaluator.seconds(found) <= evaluator.seconds(place_auto(work, None, FAST))


def test_every_effort_has_a_limit():
    assert DETERMINISTIC_LIMITS.keys() == EFFORTS.keys()
