"""Which configurations are worth replaying, and the search among them by simulated time.

The closed form of `estimates.py` ranks choices well but not to the percent: it knows no schedule and no assigner. So
the solver's answer and the best of other degrees are replayed on two global batches, or one where that shows that they
are far behind; from the fastest a descent goes to neighbouring microbatch counts and borders between encoder and
language model (`neighbours.py`); the fastest few are replayed on more and more batches, as long as they are not behind,
and the fastest of those wins. The paper's plan, if it is close, then runs against the winner on more replicas. All see
the same batches, so differences show long before means do. Where memory keeps microbatches of a plan out, the same plan
is replayed with the optimizer's state shared out over the replicas. Deterministic, whatever the threads do; ties go to
the earlier candidate. Price: 20 to 60 replays of one replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from entrain_opt.errors import PlanError
from entrain_opt.plan import Plan
from entrain_opt.planner.instance import Instance
from entrain_opt.planner.neighbours import border_neighbours, count_neighbours, first_candidates
from entrain_opt.planner.options import SEARCH
from entrain_opt.planner.replay import Replay, Replayer
from entrain_opt.planner.search import Ranked

#: Candidates that are replayed on the first batches, how many may fail, and how many (of different degrees or layers)
#: get more batches.
MOST_REPLAYS, MOST_FAILURES, FINALISTS = 16, 48, 4
#: After this many replays none begins if samples on all ranks of all replayed so far are this many together.
FEW_REPLAYS, MUCH_WORK = 8, 20_000
#: Global batches that candidates are replayed on at first.
FIRST_ROUND = 2
#: Global batches that finalists are replayed on, round by round, and by which share slower than the fastest is out.
FINAL_ROUNDS: tuple[tuple[int, float], ...] = ((1, 0.06), (2, 0.03), (4, 0.02), (8, 0.0))
FINAL_BATCHES = FINAL_ROUNDS[-1][0]
#: From so many batches on, out is who is slower on every one of them; the baseline, if it is by this share in all.
SLOWER_ON_ALL, BASELINE_SLOWER = 4, 0.01
#: From so many batches on, where all finalists left are slower than the fastest by at most this share, it has won.
ALIKE_AFTER, ALIKE = 2, 0.005
#: How long the finalists' assignments are searched, by the samples of a replica times its ranks, of the largest. What
#: the least effort misses differs from plan to plan by more than plans do; deep pipelines would take seconds for more.
FINAL_EFFORTS: tuple[tuple[int, str], ...] = ((1024, "fast"), (2048, "brief"))
#: A baseline that is slower than the winner by at most this share runs against it again, on so many replicas of each
#: of at most so many batches: the heaviest need not be the slowest.
DUEL, DUEL_REPLICAS, DUEL_BATCHES = 0.04, 2, 4
#: Above so many microbatches on all ranks, each replay takes long, and finalists are not replayed in the last rounds.
FEWER_BATCHES = (1024, 4096)
#: Heaviest replicas of each batch that are replayed.
REPLICAS = 1
#: Candidates that are replayed side by side: most of a replay is compiled code, which does not hold the interpreter.
THREADS = 2
#: A candidate slower than the fastest by more than this share on the first batch is not played on the second: with as
#: many replicas, which hold the same samples, and with another number of them.
BEHIND, BEHIND_WITH_OTHER_REPLICAS = 0.03, 0.1
#: Other degrees are judged on more batches if they are slower by at most this share on the first ones.
WORTH_JUDGING = 0.5
#: The optimizer's state is shared out over replicas where that is faster by more than this share, or nothing else fits.
WORTH_SHARDING = 0.01
#: Backwards are split where that is faster, with what it costs, on so many batches: by more than this share on few.
WHOLE_ROUNDS: tuple[tuple[int, float], ...] = ((1, 0.05), (2, 0.03), (4, 0.0))


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


class Candidates:
    """Replays candidates, each once."""

    def __init__(self, instance: Instance, replayer: Replayer, draft: Plan) -> None:
        self.instance, self.replayer, self.draft = instance, replayer, draft
        self.outcomes: dict[tuple[object, ...], Outcome] = {}
        self._work = 0

    def plan_of(self, ranked: Ranked) -> Plan:
        choice = ranked.choice
        return replace(
            self.draft,
            degrees=choice.degrees,
            stages=self.instance.stages(ranked.ends, choice),
            num_microbatches=choice.num_microbatches,
            data_parallel=choice.data_parallel,
        )

    def outcome(
        self,
        ranked: Ranked,
        *,
        batches: int,
        earlier: Replay | None = None,
        effort: str = "least",
        replicas: int = REPLICAS,
    ) -> Outcome:
        """The replay of a candidate, with the memory caps of an earlier one; failures are kept as outcomes."""
        plan = self.plan_of(ranked) if earlier is None else earlier.plan
        try:
            replay = self.replayer.replay(plan, num_batches=batches, num_replicas=replicas, effort=effort)
        except PlanError as error:
            return Outcome(ranked=ranked, failure=str(error))
        return Outcome(ranked=ranked, replay=replay)

    def only(self, ranked: Ranked) -> Outcome:
        """The replay of a candidate that is compared with none."""
        return self.outcome(ranked, batches=FINAL_BATCHES, effort=final_effort([self.plan_of(ranked)]))

    def with_whole_backwards(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The first plan under `eager` if that is as fast as `eager_split`, under which the plans were compared."""
        best, others = outcomes[0], outcomes[1:]
        assert best.replay is not None
        effort, whole = final_effort([best.replay.plan]), replace(best.replay.plan, schedule="eager")
        for batches, worth in WHOLE_ROUNDS:
            batches = min(batches, len(best.replay.batch_seconds))
            try:
                split, found = (
                    self.replayer.replay(plan, num_batches=batches, num_replicas=REPLICAS, effort=effort)
                    for plan in (best.replay.plan, whole)
                )
            except PlanError:  # It only runs with split backwards.
                return outcomes
            if split.seconds * (1 + worth) < found.seconds:
                return outcomes
        scale = found.seconds / best.seconds
        return [replace(best, replay=found), *(replace(other, scale=other.scale * scale) for other in others)]

    def _outcomes(
        self,
        candidates: Sequence[tuple[Ranked, Replay | None]],
        *,
        batches: int,
        effort: str = "least",
        replicas: int = REPLICAS,
    ) -> list[Outcome]:
        """The replays of candidates with the memory caps of earlier ones, side by side.

        What they need is learned afterwards, in their order, so the answer does not depend on the threads.
        """

        def play(candidate: tuple[Ranked, Replay | None]) -> Outcome:
            ranked, earlier = candidate
            return self.outcome(ranked, batches=batches, earlier=earlier, effort=effort, replicas=replicas)

        with ThreadPoolExecutor(THREADS) as pool:
            found = list(pool.map(play, candidates))
        for outcome in found:
            if outcome.replay is not None:
                self.replayer.learn(outcome.replay)
        return found

    def _try(self, candidates: Iterable[Ranked]) -> None:
        """Replay those that are new on the first batch, and those near the fastest on `FIRST_ROUND` batches."""
        fresh: dict[tuple[object, ...], Ranked] = {}
        replayed = sum(outcome.replay is not None for outcome in self.outcomes.values())
        may_fail = len(self.outcomes) - replayed < MOST_FAILURES
        for ranked in candidates:
            count = replayed + len(fresh)
            if may_fail and count < MOST_REPLAYS and (count < FEW_REPLAYS or self._work < MUCH_WORK):
                key = _key(ranked)
                if key not in self.outcomes and key not in fresh:
                    self._work += _samples_on_ranks(self.plan_of(ranked))
                    fresh[key] = ranked
        found = dict(zip(fresh, self._outcomes([(ranked, None) for ranked in fresh.values()], batches=1), strict=True))
        runs = [one for one in (*found.values(), *([self._best()] if self.outcomes else [])) if one.replay is not None]
        if runs:
            leader = min(runs, key=lambda one: self._weight(one) * _first_seconds(one))
            near = [
                key
                for key, one in found.items()
                if one.replay is not None and one.seconds <= _tolerated(one, leader) * _first_seconds(leader)
            ]
            longer = self._outcomes([(fresh[key], found[key].replay) for key in near], batches=FIRST_ROUND)
            again = dict(zip(near, longer, strict=True))
            played_longer = again.get(_key(leader.ranked), leader)
            scale = played_longer.seconds / _first_seconds(leader) if played_longer.replay is not None else 1.0
            found = {key: again.get(key, replace(one, scale=scale)) for key, one in found.items()}
        self.outcomes |= found

    def _best(self) -> Outcome:
        return min(self.outcomes.values(), key=self._rank)

    def search(self, solved: Ranked, ranking: list[Ranked], baseline: Ranked | None) -> list[Outcome]:
        """All candidates replayed, fastest first; the first few on more batches.

        Args:
            solved: the solver's answer.
            ranking: all choices, fastest first by the closed form.
            baseline: is a finalist in any case, so that the answer is never slower.
        """
        if baseline is not None and _key(baseline) == _key(solved):
            baseline = solved
        self._try([solved])
        self._try([*([] if baseline is None else [baseline]), *first_candidates(self.instance, solved, ranking)])
        for ranked in ranking:
            if self._best().replay is not None:
                break
            self._try([ranked])
        kinds = {
            outcome.ranked.choice.kind: outcome for outcome in sorted(self.outcomes.values(), key=self._rank)[::-1]
        }
        self._try(self._twins(kinds.values()))
        if self._best().replay is None:
            return list(self.outcomes.values())
        policy = self.replayer.options.policy
        while True:
            best = self._best()
            self._try(self._twins([best]))
            assert best.replay is not None
            counts = count_neighbours(self.instance, best.ranked, policy, best.replay.most_microbatches)
            self._try([*counts, *border_neighbours(self.instance, best.ranked)])
            if self._best() is best:
                break
        ordered = sorted(self.outcomes.values(), key=self._rank)
        finalists, rest = _finalists(ordered, baseline)
        judged = self._judge(finalists, baseline)
        winner = judged[0]
        first = next(o for o in ordered if o.ranked is winner.ranked)
        scale = winner.seconds / first.seconds if winner.replay is not None else 1.0
        return judged + [replace(other, scale=other.scale * scale) for other in rest]

    def _twins(self, outcomes: Iterable[Outcome]) -> Iterator[Ranked]:
        """The same plans with or without the optimizer's state shared out over the replicas.

        With, where memory stands in the way: the plan has caps, or does not fit. Its memory is counted by the replay.
        """
        if self.replayer.options.data_parallel != SEARCH:
            return
        for outcome in outcomes:
            choice, replay = outcome.ranked.choice, outcome.replay
            free = replay is not None and (replay.plan.patches_in_flight, replay.plan.tokens_in_flight) == (None, None)
            if choice.data > 1 and (choice.sharded or not free):
                yield replace(outcome.ranked, choice=replace(choice, sharded=not choice.sharded))

    def _rank(self, outcome: Outcome) -> float:
        """What candidates are ordered by: seconds, and `WORTH_SHARDING` of them more for a plan that shards."""
        return self._weight(outcome) * outcome.seconds

    def _weight(self, outcome: Outcome) -> float:
        may_choose = self.replayer.options.data_parallel == SEARCH
        return 1 + WORTH_SHARDING * (may_choose and outcome.ranked.choice.sharded)

    def _judge(self, finalists: list[Outcome], baseline: Ranked | None) -> list[Outcome]:
        """The finalists on more and more batches, fastest first."""
        racing: list[Outcome] = finalists
        out: list[Outcome] = []
        plans = [self.plan_of(one.ranked) for one in finalists]
        effort = final_effort(plans)
        for batches, tolerated in final_rounds(plans):
            played = self._outcomes([(one.ranked, one.replay) for one in racing], batches=batches, effort=effort)
            fastest = min(played, key=self._rank)
            racing = [one for one in played if self._stays(one, fastest, tolerated, one.ranked is baseline)]
            out += [one for one in played if one not in racing]
            if batches >= ALIKE_AFTER and all(self._rank(one) <= (1 + ALIKE) * self._rank(fastest) for one in racing):
                out += [one for one in racing if one is not fastest]
                racing = [fastest]
        racing.sort(key=self._rank)
        if racing[0].replay is None:  # It does not fit on later batches.
            return sorted(out, key=self._rank) + racing
        judged = racing + sorted((_scaled(one, racing[0]) for one in out), key=self._rank)
        rival = next((one for one in judged[1:] if one.ranked is baseline), None)
        if rival is None or self._rank(rival) > (1 + DUEL) * self._rank(judged[0]):
            return judged
        return self._duel(judged, rival, effort)

    def _duel(self, judged: list[Outcome], rival: Outcome, effort: str) -> list[Outcome]:
        """The winner and the baseline, which is close, on more replicas of the same batches.

        The baseline wins a tie.
        """
        winner = judged[0]
        assert winner.replay is not None
        batches = min(len(winner.replay.batch_seconds), DUEL_BATCHES)
        pair = [(one.ranked, one.replay) for one in (winner, rival)]
        first, second = self._outcomes(pair, batches=batches, effort=effort, replicas=DUEL_REPLICAS)
        if first.replay is None and second.replay is None:
            return judged
        wins = (1 + ALIKE) * self._rank(first) < self._rank(second)
        ordered = (first, second) if wins else (second, first)
        scale = ordered[0].seconds / winner.seconds
        others = [replace(one, scale=one.scale * scale) for one in judged if one is not winner and one is not rival]
        return [ordered[0], *sorted((ordered[1], *others), key=self._rank)]

    def _stays(self, outcome: Outcome, fastest: Outcome, tolerated: float, is_baseline: bool) -> bool:
        """Whether a finalist stays in the race after a round."""
        if outcome is fastest:
            return True
        if outcome.replay is None or fastest.replay is None:
            return False
        weight = self._weight(outcome) / self._weight(fastest)
        pairs = list(zip(outcome.replay.batch_seconds, fastest.replay.batch_seconds, strict=True))
        on_all = len(pairs) >= SLOWER_ON_ALL and all(weight * mine > best for mine, best in pairs)
        if is_baseline:
            return not on_all or weight * outcome.seconds <= (1 + BASELINE_SLOWER) * fastest.seconds
        return not on_all and weight * outcome.seconds <= (1 + tolerated) * fastest.seconds


def _key(ranked: Ranked) -> tuple[object, ...]:
    """Candidates with the same one are the same plan."""
    return (ranked.choice.kind, ranked.choice.num_microbatches, ranked.ends)


def _first_seconds(outcome: Outcome) -> float:
    """Of a replayed candidate on the first batch."""
    assert outcome.replay is not None
    return outcome.replay.batch_seconds[0]


def final_effort(plans: Sequence[Plan]) -> str:
    """How long the assignments of plans that are compared with each other are searched."""
    largest = max(map(_samples_on_ranks, plans))
    return next((effort for most, effort in FINAL_EFFORTS if largest <= most), "least")


def final_rounds(plans: Sequence[Plan]) -> tuple[tuple[int, float], ...]:
    """Batches and tolerance of each round of finalists."""
    most = max(plan.degrees.pipeline * plan.num_microbatches for plan in plans)
    return FINAL_ROUNDS[: len(FINAL_ROUNDS) - sum(most > many for many in FEWER_BATCHES)]


def _samples_on_ranks(plan: Plan) -> int:
    """Samples of a replica times its pipeline ranks: what one replay costs."""
    return plan.global_batch_size // plan.degrees.data * plan.degrees.pipeline


def _scaled(outcome: Outcome, winner: Outcome) -> Outcome:
    """An outcome whose seconds compare with those of a winner that was played on more batches."""
    if outcome.replay is None or winner.replay is None:
        return outcome
    same = winner.replay.batch_seconds[: len(outcome.replay.batch_seconds)]
    return replace(outcome, scale=winner.seconds * len(same) / sum(same))


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
