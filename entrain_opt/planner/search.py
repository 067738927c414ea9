"""Every choice, each with its best partition by dynamic programming: exact, and the reference for the solvers.

Price: one dynamic program per choice, 1 to 4 ms; `shortlist.py` leaves a few dozen choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from entrain_opt.planner.instance import Choice, Instance
from entrain_opt.planner.partition import IMPOSSIBLE, IntArray, Partition, partition_chain
from entrain_opt.planner.solution import Solution, checked


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """The best partition of one choice."""

    choice: Choice
    ends: tuple[int, ...]
    ticks: int


def best_partition(
    instance: Instance,
    choice: Choice,
    *,
    fixed_ends: Mapping[int, int] | None = None,
    shares: bool | None = None,
) -> Ranked | None:
    """The partition with the least predicted ticks that fits in memory, None if none does.

    Args:
        instance: the problem.
        choice: one of its choices.
        fixed_ends: rank -> chain position where it must end.
        shares: whether modules may share a rank; None takes what the choice says.
    """
    if least_mib(instance, choice) > instance.limit_mib * choice.pipeline:
        return None
    seconds = instance.segments(choice.ticks)
    sharing = choice.shares if shares is None else shares
    fixed = {**(fixed_ends or {}), **choice.borders(instance.module_starts)}
    costs = instance.all_rank_costs(choice, seconds, shares=sharing)
    found = partition_chain(costs.__getitem__, choice.pipeline, fixed_ends=fixed)
    if found is None:
        return None
    return Ranked(choice=choice, ends=found.ends, ticks=choice.constant_ticks + found.ticks)


def rank_choices(instance: Instance) -> list[Ranked]:
    """All feasible choices with their best partitions, fastest first; ties in the order of the choices."""
    ranked = [found for choice in instance.choices if (found := best_partition(instance, choice)) is not None]
    return sorted(ranked, key=lambda found: found.ticks)


def solve_by_search(instance: Instance, ranking: list[Ranked] | None = None) -> Solution | None:
    """The optimum, None if nothing fits in memory; `ranking` saves ranking the choices again."""
    ranked = rank_choices(instance) if ranking is None else ranking
    if not ranked:
        return None
    best = ranked[0]
    solution = Solution(choice=best.choice, ends=best.ends, ticks=best.ticks, bound_ticks=best.ticks)
    return checked(instance, solution, "search")


def least_memory(instance: Instance, choice: Choice) -> Partition | None:
    """The partition whose fullest rank holds the least, among those the choice allows; its `ticks` are MiB."""

    def held(rank: int) -> IntArray:
        mib = instance.segments(choice.mib[rank])
        return mib if choice.shares else instance.apart(mib)

    return partition_chain(held, choice.pipeline, fixed_ends=choice.borders(instance.module_starts))


def least_mib(instance: Instance, choice: Choice) -> int:
    """All ranks together hold at least this much: every layer where it takes least."""
    held = 0
    for module, count in enumerate(instance.num_layers):
        layer = min(part.layer[module] for part in choice.mib)
        held += count * layer + min(part.first[module] + part.last[module] for part in choice.mib)
    return held


def memory_binds(instance: Instance, ranked: Ranked) -> bool:
    """Whether more memory could make a choice's best partition faster: a rank with less to do would not fit."""
    choice = ranked.choice
    faster = instance.segments(choice.ticks) < ranked.ticks - choice.constant_ticks
    return any(bool((faster & (instance.segments(part) > instance.limit_mib)).any()) for part in set(choice.mib))


def lower_bound_ticks(instance: Instance, choice: Choice) -> int:
    """No partition of a choice takes fewer ticks: the mean over ranks, or the largest single layer."""
    seconds = instance.segments(choice.ticks)
    parts = choice.ticks
    work = [
        (count * layer + first + last, stage)
        for count, layer, first, last, stage in zip(
            instance.num_layers, parts.layer, parts.first, parts.last, parts.stage, strict=True
        )
    ]
    if choice.ranks:
        mean = max(-(-own // ranks) + stage for (own, stage), ranks in zip(work, choice.ranks, strict=True))
    else:
        mean = -(-sum(own + stage for own, stage in work) // choice.pipeline)
    single = max(int(seconds[layer, layer + 1]) for layer in range(instance.chain_length))
    assert single < IMPOSSIBLE
    return choice.constant_ticks + max(mean, single)
