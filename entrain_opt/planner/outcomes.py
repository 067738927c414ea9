"""What became of the candidates, in words: the chosen one, and why each runner-up lost."""

from __future__ import annotations

from typing import Any

from entrain_opt.planner.candidates import WORTH_SHARDING, Outcome
from entrain_opt.planner.instance import Instance
from entrain_opt.planner.search import Ranked
from entrain_opt.units import format_seconds

#: Entries of a plan file.
LISTED = 10


def describe_outcomes(outcomes: list[Outcome], ranking: list[Ranked], instance: Instance) -> tuple[dict[str, Any], ...]:
    """The chosen candidate, then runners-up: the best of every kind first, then others, then what was not replayed.

    Args:
        outcomes: fastest first; the first is the chosen one.
        ranking: the solver's candidates, fastest first by the closed form.
        instance: of both.
    """
    best = outcomes[0]
    seen: set[tuple[Any, ...]] = set()
    first: list[Outcome] = []
    rest: list[Outcome] = []
    for outcome in outcomes:
        key = (outcome.ranked.choice.kind, outcome.ranked.ends)
        (rest if key in seen else first).append(outcome)
        seen.add(key)
    kinds = {outcome.ranked.choice.kind for outcome in outcomes}
    unplayed = [next(r for r in ranking if r.choice.kind == kind) for kind in _kinds(ranking) if kind not in kinds]
    entries = [_describe(outcome, best, instance) for outcome in first]
    entries += [_unplayed(ranked, best, instance) for ranked in unplayed]
    entries += [_describe(outcome, best, instance) for outcome in rest]
    return tuple(entries[:LISTED])


def _kinds(ranking: list[Ranked]) -> list[tuple[object, ...]]:
    return list(dict.fromkeys(ranked.choice.kind for ranked in ranking))


def _entry(ranked: Ranked, instance: Instance) -> dict[str, Any]:
    choice = ranked.choice
    entry: dict[str, Any] = {"data": choice.data, "pipeline": choice.pipeline}
    for name, degrees in (("tensor", choice.tensor), ("context", choice.context)):
        if degrees:
            entry[name] = dict(zip(instance.modules, degrees, strict=True))
    if choice.recompute:
        entry["recompute"] = [name for name, does in zip(instance.modules, choice.recompute, strict=True) if does]
    if choice.sharded:
        entry["data_parallel"] = choice.data_parallel
    return entry | {
        "num_microbatches": choice.num_microbatches,
        "stages": " ".join(stage.label for stage in instance.stages(ranked.ends)),
        "closed_form_seconds": ranked.ticks * instance.tick_seconds,
    }


def _describe(outcome: Outcome, best: Outcome, instance: Instance) -> dict[str, Any]:
    entry = _entry(outcome.ranked, instance)
    if outcome.replay is None:
        return {**entry, "predicted_seconds": None, "outcome": f"cannot run: {outcome.failure}"}
    entry["predicted_seconds"] = outcome.seconds
    if outcome is best:
        return {**entry, "outcome": "chosen", "busy_share": list(outcome.replay.busy_share)}
    return {**entry, "outcome": _why(outcome, best)}


def _unplayed(ranked: Ranked, best: Outcome, instance: Instance) -> dict[str, Any]:
    slower = ranked.ticks / best.ranked.ticks - 1
    words = f"not replayed: {slower:.1%} slower by the closed form" if slower > 0 else "not replayed: others are closer"
    return {**_entry(ranked, instance), "predicted_seconds": None, "outcome": words}


def _why(outcome: Outcome, best: Outcome) -> str:
    """By how much a candidate is slower, and whether its slowest rank computes more or waits more."""
    assert outcome.replay is not None
    assert best.replay is not None
    seconds, fastest = outcome.seconds, best.seconds
    if seconds <= fastest and outcome.ranked.choice.sharded and not best.ranked.choice.sharded:
        return (
            f"no faster by more than {WORTH_SHARDING:.0%} ({format_seconds(seconds)} replayed), so nothing is sharded"
        )
    if abs(seconds - fastest) <= 1e-6 * fastest:
        return f"as fast ({format_seconds(seconds)} replayed): the first found is taken"
    if seconds < fastest:
        return f"not slower on the first batches only ({format_seconds(seconds)} replayed)"
    said = f"{seconds / fastest - 1:.1%} slower ({format_seconds(seconds)} replayed): its busiest rank"
    busy, other = max(outcome.replay.busy_share) * seconds, max(best.replay.busy_share) * fastest
    if busy - other >= (seconds - busy) - (fastest - other):
        return f"{said} computes {format_seconds(busy)} (chosen: {format_seconds(other)})"
    return f"{said} waits {format_seconds(seconds - busy)} (chosen: {format_seconds(fastest - other)})"
