"""Which configurations are worth replaying, and the search among them by simulated time.

The closed form of `estimates.py` ranks choices well but not to the percent: it knows no schedule and no assigner. So
the solver's answer, the best of other degrees, and other borders between encoder and language model are replayed on two
global batches, or one where that shows that they are far behind; from the fastest a descent goes to neighbouring
microbatch counts and borders; the fastest few are replayed on more batches, and the fastest of those wins.
Deterministic; ties go to the earlier candidate. Price: 30 to 60 replays of one replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from entrain_opt.errors import PlanError
from entrain_opt.plan import Plan
from entrain_opt.planner.instance import Instance
from entrain_opt.planner.replay import Replay, Replayer
from entrain_opt.planner.search import Ranked, best_partition

#: Other degrees are replayed if predicted to lose at most this share (one in any case), and at most so many.
WORTH_REPLAYING, MOST_DEGREES = 0.2, 4
#: Replays on the first batches, and how many candidates (of different degrees or layers) get more.
MOST_REPLAYS, FINALISTS = 16, 4
#: Global batches, and heaviest replicas of each, that candidates and finalists are replayed on.
FIRST_ROUND, FINAL_ROUND = (2, 1), (4, 2)
#: A candidate slower than the fastest by more than this share on the first batch is not played on the second: with as
#: many replicas, which hold the same samples, and with another number of them.
BEHIND, BEHIND_WITH_OTHER_REPLICAS = 0.05, 0.1
#: Other degrees are judged on more batches if they are slower by at most this share on the first ones.
WORTH_JUDGING = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A candidate and what became of it: a replay, or why it has none.

    Attributes:
        ranked: the candidate.
        replay: on as many batches as it was worth.
        failure: why there is none.
        scale: of its seconds to those on the batches that the fastest was played on.
    """

    ranked: Ranked
    replay: Replay | None = None
    failure: str = ""
    scale: float = 1.0

    @property
    def seconds(self) -> float:
        return self.replay.seconds * self.scale if self.replay is not None else float("inf")


def first_candidates(instance: Instance, solved: Ranked, ranking: list[Ranked]) -> Iterator[Ranked]:
    """The solver's answer, the best of other degrees, then other borders of the solver's."""
    yield solved
    kinds = {solved.choice.kind}
    for ranked in ranking:
        kind = ranked.choice.kind
        worth = ranked.ticks <= (1 + WORTH_REPLAYING) * solved.ticks or len(kinds) == 1
        if kind not in kinds and len(kinds) < MOST_DEGREES and worth:
            kinds.add(kind)
            yield ranked
    yield from border_neighbours(instance, solved)


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


def count_neighbours(instance: Instance, ranked: Ranked) -> Iterator[Ranked]:
    """Same degrees, with the next smaller and larger number of microbatches."""
    mine = ranked.choice
    same = [c for c in instance.choices if c.kind == mine.kind]
    place = next((i for i, c in enumerate(same) if c.num_microbatches == mine.num_microbatches), None)
    if place is None:  # The paper's choice, where its kind was dropped.
        return
    border = instance.module_starts[-1]
    at = [rank for rank, end in enumerate(ranked.ends[:-1]) if end == border]
    fixed = {at[0]: border} if at and len(instance.num_layers) > 1 else {}
    for index in (place + 1, place - 1, place + 2):
        if 0 <= index < len(same):
            found = best_partition(instance, same[index], fixed_ends=fixed)
            if found is not None:
                yield found


class Candidates:
    """Replays candidates, each once."""

    def __init__(self, instance: Instance, replayer: Replayer, draft: Plan) -> None:
        self.instance, self.replayer, self.draft = instance, replayer, draft
        self.outcomes: dict[tuple[object, ...], Outcome] = {}

    def plan_of(self, ranked: Ranked) -> Plan:
        choice = ranked.choice
        return replace(
            self.draft,
            degrees=choice.degrees,
            stages=self.instance.stages(ranked.ends, choice),
            num_microbatches=choice.num_microbatches,
        )

    def outcome(self, ranked: Ranked, *, batches: int, replicas: int, earlier: Replay | None = None) -> Outcome:
        """The replay of a candidate, with the memory caps of an earlier one; failures are kept as outcomes."""
        plan = self.plan_of(ranked) if earlier is None else earlier.plan
        try:
            replay = self.replayer.replay(plan, num_batches=batches, num_replicas=replicas)
        except PlanError as error:
            return Outcome(ranked=ranked, failure=str(error))
        return Outcome(ranked=ranked, replay=replay)

    def final_outcome(self, ranked: Ranked, earlier: Replay | None = None) -> Outcome:
        """The replay of a candidate on all that finalists are judged by."""
        batches, replicas = FINAL_ROUND
        return self.outcome(ranked, batches=batches, replicas=replicas, earlier=earlier)

    def _try(self, ranked: Ranked) -> None:
        key = (ranked.choice.kind, ranked.choice.num_microbatches, ranked.ends)
        if key in self.outcomes or len(self.outcomes) >= MOST_REPLAYS:
            return
        batches, replicas = FIRST_ROUND
        found = self.outcome(ranked, batches=1, replicas=replicas)
        fastest = self._best() if self.outcomes else found
        if found.replay is not None:
            first = fastest.replay.batch_seconds[0] if fastest.replay is not None else found.seconds
            if found.seconds > _tolerated(found, fastest) * first:
                found = replace(found, scale=fastest.seconds / first)
            else:
                found = self.outcome(ranked, batches=batches, replicas=replicas, earlier=found.replay)
        self.outcomes[key] = found

    def _best(self) -> Outcome:
        return min(self.outcomes.values(), key=lambda outcome: outcome.seconds)

    def search(self, solved: Ranked, ranking: list[Ranked], baseline: Ranked | None) -> list[Outcome]:
        """All candidates replayed, fastest first; the first few on more batches.

        Args:
            solved: the solver's answer.
            ranking: all choices, fastest first by the closed form.
            baseline: is a finalist in any case, so that the answer is never slower.
        """
        if baseline is not None:
            self._try(baseline)
        for ranked in first_candidates(self.instance, solved, ranking):
            self._try(ranked)
        if self._best().replay is None:
            for ranked in ranking:
                self._try(ranked)
                if self._best().replay is not None:
                    break
        while True:
            best = self._best()
            for neighbours in (count_neighbours, border_neighbours):
                for ranked in neighbours(self.instance, best.ranked):
                    self._try(ranked)
            if self._best() is best:
                break
        ordered = sorted(self.outcomes.values(), key=lambda outcome: outcome.seconds)
        finalists, rest = _finalists(ordered, baseline)
        judged = self._judge(finalists)
        winner = judged[0]
        first = next(o for o in ordered if o.ranked is winner.ranked)
        scale = winner.seconds / first.seconds if winner.replay is not None else 1.0
        return judged + [replace(other, scale=other.scale * scale) for other in rest]

    def _judge(self, finalists: list[Outcome]) -> list[Outcome]:
        """The finalists on more batches, fastest first.

        The slowest replica of a batch decides, so the heaviest one alone shows what a finalist takes at least; where
        that is not below the fastest, its other replicas are not played.
        """
        judged: list[Outcome] = []
        fastest = float("inf")
        for finalist in finalists:
            found = self.outcome(finalist.ranked, batches=FINAL_ROUND[0], replicas=1, earlier=finalist.replay)
            if found.replay is not None and found.seconds < fastest:
                found = self.final_outcome(finalist.ranked, found.replay)
                fastest = min(fastest, found.seconds)
            judged.append(found)
        return sorted(judged, key=lambda outcome: outcome.seconds)


def _tolerated(outcome: Outcome, fastest: Outcome) -> float:
    """How many times the fastest's seconds a candidate may take to be played on."""
    alike = outcome.ranked.choice.data == fastest.ranked.choice.data
    return 1 + (BEHIND if alike else BEHIND_WITH_OTHER_REPLICAS)


def _finalists(ordered: list[Outcome], baseline: Ranked | None) -> tuple[list[Outcome], list[Outcome]]:
    """The candidates to judge, and all others, each fastest first.

    Judged are the fastest of other degrees, then those of other layers, and the baseline. Where samples are giant, two
    batches say little, and degrees differ more on others than layers do.
    """
    played = [outcome for outcome in ordered if outcome.replay is not None]
    seen: dict[tuple[object, ...], Outcome] = {}
    for outcome in played:
        seen.setdefault(outcome.ranked.choice.kind, outcome)
    close = [outcome for outcome in seen.values() if outcome.seconds <= (1 + WORTH_JUDGING) * ordered[0].seconds]
    chosen = close[: FINALISTS - 1]
    for outcome in played:
        layers = {(one.ranked.choice.kind, one.ranked.ends) for one in chosen}
        if len(chosen) < FINALISTS and (outcome.ranked.choice.kind, outcome.ranked.ends) not in layers:
            chosen.append(outcome)
    chosen += [outcome for outcome in played if outcome.ranked is baseline and outcome not in chosen]
    judged = [outcome for outcome in ordered if outcome in chosen]
    return judged, [outcome for outcome in ordered if outcome not in chosen]
