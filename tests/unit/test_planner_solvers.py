"""The solvers agree with enumeration and with each other, and say how sure they are."""

import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest

from entrain_opt.errors import SolverError
from entrain_opt.planner.cp_sat import promising_choices, solve_cp_sat
from entrain_opt.planner.ilp import solve_ilp
from entrain_opt.planner.instance import Choice, Instance, PartTicks
from entrain_opt.planner.search import least_memory, lower_bound_ticks, memory_binds, rank_choices, solve_by_search
from entrain_opt.planner.solution import Solution, checked


def random_instance(seed: int, *, large: bool = False, small: bool = False) -> Instance:
    """Two modules, a handful of choices, sometimes tight memory; `large`: bytes and ticks of real size."""
    draw = random.Random(seed)
    ticks, mib = (9_000, 90_000) if large else (20, 30)
    num_layers = (draw.randint(2, 4), draw.randint(2, 4))

    def pair(limit: int, least: int = 0) -> tuple[int, int]:
        return draw.randint(least, limit), draw.randint(least, limit)

    def part(limit: int) -> PartTicks:
        return PartTicks(layer=pair(limit, 1), first=pair(limit), last=pair(limit), stage=pair(limit))

    def choice(pipeline: int, count: int) -> Choice:
        apart = pipeline >= 2 and draw.random() < 0.4  # Different degrees: the modules' ranks are given.
        first = draw.randint(max(1, pipeline - num_layers[1]), min(pipeline - 1, num_layers[0])) if apart else 0
        return Choice(
            data=12 // pipeline,
            pipeline=pipeline,
            num_microbatches=count,
            shares=not apart and (pipeline == 1 or draw.random() < 0.5),
            constant_ticks=draw.randint(0, 6 * ticks),
            ticks=part(ticks),
            mib=tuple(part(mib) for _ in range(pipeline)),
            tensor=(2, 1) if apart else (),
            context=(1, 2) if apart and count > 1 else (),
            recompute=(draw.random() < 0.5, draw.random() < 0.5),
            ranks=(first, pipeline - first) if apart else (),
        )

    def twin(one: Choice) -> Choice:
        """Replicas share out the optimizer's state: as fast, for less memory."""
        lighter = tuple(replace(part, layer=(part.layer[0] // 2, part.layer[1] // 2)) for part in one.mib)
        return replace(one, sharded=True, mib=lighter)

    choices = [choice(pipeline, count) for pipeline in ((1, 2, 3) if small else (1, 2, 3, 4)) for count in (1, 4)]
    if seed % 3 == 2:
        choices += [twin(one) for one in choices if one.data > 1]
    return Instance(
        modules=("a-b", "a b"), num_layers=num_layers, choices=tuple(choices),
        limit_mib=draw.randint(mib, 6 * mib), tick_seconds=1e-3,
    )  # fmt: skip


def brute_force(instance: Instance) -> int | None:
    best = None
    border = instance.num_layers[0]
    for choice in instance.choices:
        for cuts in combinations(range(1, instance.chain_length), choice.pipeline - 1):
            ends = (*cuts, instance.chain_length)
            shared = any(i < border < j for i, j in zip((0, *cuts), ends, strict=True))
            if choice.ranks and (choice.ranks[0] > len(ends) or ends[choice.ranks[0] - 1] != border):
                continue
            if (shared and not choice.shares) or max(instance.memory_mib(choice, ends)) > instance.limit_mib:
                continue
            ticks = instance.objective_ticks(choice, ends)
            best = ticks if best is None else min(best, ticks)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_search_finds_the_optimum_and_bounds_hold(seed):
    instance = random_instance(seed)
    found, expected = solve_by_search(instance), brute_force(instance)
    assert (found.ticks if found else None) == expected
    for ranked in rank_choices(instance):
        assert lower_bound_ticks(instance, ranked.choice) <= ranked.ticks


def test_memory_binds_where_more_of_it_would_be_faster():
    slower = loose = 0
    for seed in range(60):
        instance = random_instance(seed)
        free = {ranked.choice: ranked.ticks for ranked in rank_choices(replace(instance, limit_mib=10**6))}
        for ranked in rank_choices(instance):
            gain = ranked.ticks - free[ranked.choice]
            assert memory_binds(instance, ranked) or gain == 0
            slower += gain > 0
            loose += not memory_binds(instance, ranked)
    assert slower
    assert loose


@pytest.mark.parametrize("part", range(4))
def test_all_solvers_and_enumeration_agree_on_200_random_problems(part):
    """Both tight and loose memory, some coefficients of real size, with and without a hint."""
    infeasible = 0
    for seed in range(50 * part, 50 * part + 50):
        instance = random_instance(seed, large=seed % 10 == 9, small=True)
        expected = brute_force(instance)
        infeasible += expected is None
        ranked = rank_choices(instance)
        incumbent = ranked[0] if seed % 2 and ranked else None
        solvers = [solve_cp_sat, partial(solve_ilp, solver="highs"), partial(solve_ilp, solver="cbc")]
        answers = [solve_by_search(instance), *(solve(instance, incumbent=incumbent) for solve in solvers)]
        for found in answers:
            assert (found.ticks if found else None) == expected, seed
            if found:
                assert (found.status, found.gap) == ("optimal", 0.0)
                assert checked(instance, found, "test") is found
    assert 0 < infeasible < 25


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("seed", [100, 101, 102, 103])
def test_real_sizes_of_coefficients_do_not_lead_solvers_astray(seed, solver):
    instance = random_instance(seed, large=True)
    expected = brute_force(instance)
    for found in (solve_cp_sat(instance), solve_ilp(instance, solver=solver)):
        assert (found.ticks if found else None) == expected


def test_without_time_the_hint_comes_back_with_an_honest_gap():
    instance = random_instance(100, large=True)
    best, *others = rank_choices(instance)
    worse = others[-1]
    for solve in (solve_cp_sat, partial(solve_ilp, solver="highs"), partial(solve_ilp, solver="cbc")):
        found = solve(instance, incumbent=worse, time_limit_seconds=1e-9)
        assert found is not None
        assert best.ticks <= found.ticks <= worse.ticks
        assert found.bound_ticks <= best.ticks
        assert (found.gap == 0) == (found.status == "optimal")


def test_two_workers_give_the_answer_of_one():
    for seed in range(5):
        instance = random_instance(seed)
        ranked = rank_choices(instance)
        if ranked:
            one, two = (solve_cp_sat(instance, incumbent=ranked[0], workers=workers) for workers in (1, 2))
            assert one == two


def test_the_least_memory_is_that_of_a_partition_that_the_choice_allows():
    parts = PartTicks(layer=(1, 10), first=(0, 0), last=(0, 0), stage=(0, 0))
    alone = Choice(
        data=1, pipeline=2, num_microbatches=1, shares=False, constant_ticks=0, ticks=parts, mib=(parts, parts)
    )
    choices = (alone, replace(alone, shares=True))
    instance = Instance(modules=("a", "b"), num_layers=(2, 3), choices=choices, limit_mib=25, tick_seconds=1.0)
    apart, shared = (least_memory(instance, choice) for choice in choices)
    assert apart is not None
    assert shared is not None
    assert (apart.ends, apart.ticks) == ((2, 5), 30)
    assert (shared.ends, shared.ticks) == ((3, 5), 20)


def test_infeasible_is_no_answer():
    instance = random_instance(3)
    impossible = Instance(
        modules=instance.modules,
        num_layers=instance.num_layers,
        choices=instance.choices,
        limit_mib=0,
        tick_seconds=1.0,
    )
    assert solve_by_search(impossible) is solve_cp_sat(impossible) is solve_ilp(impossible) is None


def test_hopeless_choices_are_left_out_and_the_incumbent_stays():
    instance = random_instance(1)
    best = rank_choices(instance)[0]
    kept = promising_choices(instance, best)
    assert best.choice in kept
    assert all(lower_bound_ticks(instance, c) < best.ticks or c is best.choice for c in kept)


def test_the_same_question_gets_the_same_answer():
    instance = random_instance(5)
    first, second = (solve_cp_sat(instance, seed=3) for _ in range(2))
    assert first == second


def test_answers_that_do_not_hold_are_refused():
    instance = random_instance(1)
    best = solve_by_search(instance)
    assert best is not None
    wrong = Solution(choice=best.choice, ends=best.ends, ticks=best.ticks - 1, bound_ticks=0)
    with pytest.raises(SolverError, match="counted"):
        checked(instance, wrong, "test")
    with pytest.raises(SolverError, match="layers each"):
        checked(instance, Solution(choice=best.choice, ends=(), ticks=0, bound_ticks=0), "test")


@pytest.mark.parametrize(
    "order", ["import torch; import ortools.sat.python.cp_model", "import ortools.sat.python.cp_model; import torch"]
)
def test_solver_and_torch_live_in_one_process_in_either_order(order):
    code = (
        f"{order}\nimport sys; sys.path.insert(0, 'tests/unit')\n"
        "from test_planner_solvers import random_instance\n"
        "from entrain_opt.planner.cp_sat import solve_cp_sat\n"
        "assert solve_cp_sat(random_instance(1)).status == 'optimal'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_is_left_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    solve_ilp(random_instance(2))
    assert not list(tmp_path.iterdir())


def test_solvers_leave_standard_output_alone():
    """`entrain plan --json` is read by programs."""
    code = (
        "from test_planner_solvers import random_instance, solve_ilp\n"
        "for name in ('highs', 'cbc'): print(name, solve_ilp(random_instance(3), solver=name) is not None)"
    )
    folder = Path(__file__).parent
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert run.stdout == "highs True\ncbc True\n"
