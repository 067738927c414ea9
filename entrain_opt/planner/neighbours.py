"""Which candidates are worth a replay: other degrees, other borders between modules, other numbers of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from entrain_opt.assigner.registry import find_policy
from entrain_opt.planner.instance import Instance
from entrain_opt.planner.search import Ranked, best_partition

#: Other degrees are replayed if predicted to lose at most this share (one in any case), and at most so many.
WORTH_REPLAYING, MOST_DEGREES = 0.2, 4


def first_candidates(instance: Instance, solved: Ranked, ranking: list[Ranked]) -> Iterator[Ranked]:
    """The solver's answer, and the best of other degrees."""
    yield solved
    kinds = {solved.choice.kind}
    for ranked in ranking:
        kind = ranked.choice.kind
        worth = ranked.ticks <= (1 + WORTH_REPLAYING) * solved.ticks or len(kinds) == 1
        if kind not in kinds and len(kinds) < MOST_DEGREES and worth:
            kinds.add(kind)
            yield ranked


def border_neighbours(instance: Instance, ranked: Ranked) -> Iterator[Ranked]:
    """Same degrees and microbatches, with the language model's first layer on another rank, or sharing one."""
    if len(instance.num_layers) == 1 or ranked.choice.pipeline == 1 or ranked.choice.ranks:
        return
    border = instance.module_starts[-1]
    before = sum(end <= border for end in ranked.ends)
    for ranks in (before, before + 1, before - 1, before + 2):
        if 1 <= ranks < ranked.choice.pipeline:
            found = best_partition(instance, ranked.choice, fixed_ends={ranks - 1: border})
            if found is not None:
                yield found
    unconstrained = best_partition(instance, ranked.choice, shares=True)
    if unconstrained is not None:
        yield unconstrained


def count_neighbours(instance: Instance, ranked: Ranked, policy: str, used: int) -> Iterator[Ranked]:
    """Same degrees, with the next smaller and larger number of microbatches.

    Args:
        instance: the problem.
        ranked: whose neighbours.
        policy: of the assigner. Where it chooses how many it uses, more are of use only if it used all.
        used: microbatches that it used at most.
    """
    mine = ranked.choice
    steps: tuple[int, ...] = (1, -1, 2)
    if find_policy(policy).search is not None:
        steps = (1, -1) if used >= mine.num_microbatches else (-1,)
    same = [c for c in instance.choices if c.kind == mine.kind]
    if not same:  # A twin of what the closed form found to fit, which holds less.
        twin = replace(mine, sharded=not mine.sharded).kind
        same = [replace(c, sharded=mine.sharded) for c in instance.choices if c.kind == twin]
    place = next((i for i, c in enumerate(same) if c.num_microbatches == mine.num_microbatches), None)
    if place is None:  # The paper's choice, where its kind was dropped.
        return
    border = instance.module_starts[-1]
    at = [rank for rank, end in enumerate(ranked.ends[:-1]) if end == border]
    fixed = {at[0]: border} if at and len(instance.num_layers) > 1 else {}
    for index in (place + step for step in steps):
        if 0 <= index < len(same):
            found = best_partition(instance, same[index], fixed_ends=fixed)
            if found is not None:
                yield found
