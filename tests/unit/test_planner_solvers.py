"""The solvers agree with enumeration and with each other, and say how sure they are."""

import random
import subprocess
import sys
from itertools import combinations

import pytest

from entrain_opt.errors import SolverError
from entrain_opt.planner.cp_sat import promising_choices, solve_cp_sat
from entrain_opt.planner.ilp import solve_ilp
from entrain_opt.planner.instance import Choice, Instance, PartTicks
from entrain_opt.planner.search import lower_bound_ticks, rank_choices, solve_by_search
from entrain_opt.planner.solution import Solution, checked


def random_instance(seed: int, *, large: bool = False) -> Instance:
    """Two modules, a handful of choices, sometimes tight memory; `large`: bytes and ticks of real size."""
    draw = random.Random(seed)
    ticks, mib = (9_000, 90_000) if large else (20, 30)

    def pair(limit: int, least: int = 0) -> tuple[int, int]:
        return draw.randint(least, limit), draw.randint(least, limit)

    def part(limit: int) -> PartTicks:
        return PartTicks(layer=pair(limit, 1), first=pair(limit), last=pair(limit), stage=pair(limit))

    choices = [
        Choice(
            data=12 // pipeline,
            pipeline=pipeline,
            num_microbatches=count,
            shares=pipeline == 1 or draw.random() < 0.5,
            constant_ticks=draw.randint(0, 6 * ticks),
            ticks=part(ticks),
            mib=tuple(part(mib) for _ in range(pipeline)),
        )
        for pipeline in (1, 2, 3, 4)
        for count in (1, 4)
    ]
    return Instance(
        modules=("a-b", "a b"), num_layers=(draw.randint(2, 4), draw.randint(2, 4)), choices=tuple(choices),
        limit_mib=draw.randint(mib, 6 * mib), tick_seconds=1e-3,
    )  # fmt: skip


def brute_force(instance: Instance) -> int | None:
    best = None
    border = instance.num_layers[0]
    for choice in instance.choices:
        for cuts in combinations(range(1, instance.chain_length), choice.pipeline - 1):
            ends = (*cuts, instance.chain_length)
            shared = any(i < border < j for i, j in zip((0, *cuts), ends, strict=True))
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


@pytest.mark.parametrize("hint", [False, True])
@pytest.mark.parametrize("seed", [*range(8), 100, 101, 102])
def test_cp_sat_and_ilp_find_the_same_optimum(seed, hint):
    instance = random_instance(seed, large=seed >= 100)
    ranked = rank_choices(instance)
    incumbent = ranked[0] if hint and ranked else None
    expected = ranked[0].ticks if ranked else None
    for solve in (solve_cp_sat, solve_ilp):
        found = solve(instance, incumbent=incumbent)
        assert (found.ticks if found else None) == expected, solve.__name__
        if found:
            assert (found.status, found.gap) == ("optimal", 0.0)


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
