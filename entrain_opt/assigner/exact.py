"""The exact policy: constraint programming (CP-SAT) continues from the best placement that the search found.

1. `auto` searches. Within `TOLERANCE` of the lower bound its answer stands.
2. Otherwise the pipeline becomes a CP-SAT model (`exact_model.py`) with that answer, and the times of its schedule, as
   a hint. Few samples in few microbatches are solved to proven optimality; larger problems are searched in a
   neighbourhood of the hint (`exact_scope.py`); above `MAX_INTERVALS` the hint stands.
3. Every better solution that the solver meets is scored by the schedule that will run it, as the search scores its
   own, after swaps of its microbatches. That schedule may be slower than the solver's, which picks orders freely.

Promise: never slower than the hint under `settings.schedule`; memory caps kept; one worker, a seed and a limit in
deterministic time, so every rank gets the same answer, unless a wall-clock limit stops it earlier. Price: the limit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import Any

import numpy as np

from entrain_opt.assigner.auto import place_auto
from entrain_opt.assigner.evaluate import Evaluator
from entrain_opt.assigner.exact_scope import MAX_INTERVALS, Scope, choose_scope, hint_times, to_ticks
from entrain_opt.assigner.layout import Layout
from entrain_opt.assigner.settings import SearchSettings
from entrain_opt.assigner.work import Placement, SampleWork
from entrain_opt.errors import SolverError
from entrain_opt.schedule.orders import SPLITTING_ORDERS

#: How far above the lower bound an answer is good enough, as a part of it.
TOLERANCE = 0.03
#: Deterministic seconds of the solver, by effort; one is 5 to 15 seconds of one core for these models.
DETERMINISTIC_LIMITS: Mapping[str, float] = MappingProxyType(
    {"least": 0.005, "brief": 0.005, "fast": 0.01, "default": 0.02, "thorough": 1.0}
)
#: Swaps of microbatches that are tried on each solution.
MAX_SWAPS = 100
#: Wall-clock seconds kept back for reading the answer, and below which no solver is started.
_MARGIN_SECONDS = 0.05
#: What building a model and loading the solver's library may take on a busy machine, where a wall-clock limit is given.
_INTERVALS_PER_SECOND, _LOADING_SECONDS = 2000, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactResult:
    """What the solver found.

    Attributes:
        placement: the best under the schedule that will run it.
        seconds: of the placement under that schedule.
        model_seconds: the makespan of the best solution if every rank may choose its order; infinite if the solver
            found none (the hint's schedule is one, so this takes a limit).
        bound_seconds: no placement is faster in the schedule that placements are scored by.
        gap: (seconds - bound_seconds) / seconds; 0 for no work.
        status: `optimal` (model_seconds is proven least over all placements and orders), `neighbourhood` (least in a
            neighbourhood of the hint), `feasible` (a limit came first) or `hint` (no solver was run, or it found none).
    """

    placement: Placement
    seconds: float
    model_seconds: float
    bound_seconds: float
    gap: float
    status: str


def place_exact(work: SampleWork, num_microbatches: int | None, settings: SearchSettings) -> Placement:
    """The placement of one replica, from `auto` and then the solver.

    Args:
        work: N >= 1 samples.
        num_microbatches: the most to use, unless the memory caps need more; None leaves the number open.
        settings: schedule, effort and seed, of both.
    """
    hint = place_auto(work, num_microbatches, settings)
    if work.num_samples == 1:
        return hint
    seconds = Evaluator(work, settings.schedule).seconds(hint)
    if seconds <= (1 + TOLERANCE) * work_seconds(work) or not np.isfinite(seconds):
        return hint
    limit = DETERMINISTIC_LIMITS[settings.effort]
    return solve_exact(work, num_microbatches, settings, hint=hint, deterministic_limit=limit).placement


def work_seconds(work: SampleWork) -> float:
    """The work of the busiest rank, which no placement or schedule can avoid, with one unit's fixed part per stage."""
    shape, stages = work.shape, work.costs.stage_costs(work.shape)
    media = work.costs.has_media
    busy = np.zeros(shape.num_ranks)
    for stage, rank in enumerate(shape.ranks_of_stages):
        encoder = shape.encoder_of_stage(stage)
        rows = slice(None) if encoder is None else media & (work.costs.encoder_index == encoder)
        kinds = [(stages.forward_seconds, stages.forward_fixed_seconds)]
        if shape.has_backward[stage]:
            kinds.append((stages.backward_seconds, stages.backward_fixed_seconds))
        for seconds, fixed in kinds:
            values = seconds[stage][rows]
            busy[rank] += values.sum() + (fixed[stage] if len(values) else 0.0)
    return float(busy.max())


def solve_exact(
    work: SampleWork,
    num_microbatches: int | None,
    settings: SearchSettings,
    *,
    hint: Placement,
    deterministic_limit: float,
    time_limit_seconds: float | None = None,
) -> ExactResult:
    """Improve a placement with CP-SAT, and bound what is possible.

    Args:
        work: N >= 1 samples.
        num_microbatches: the most to use, unless the hint has more.
        settings: the schedule that scores placements, and the seed.
        hint: a placement that keeps the memory limits.
        deterministic_limit: deterministic seconds of the solver.
        time_limit_seconds: wall-clock seconds of all of this; with it, the answer may differ between runs.

    Raises:
        SolverError: the solver calls the model invalid or infeasible, though the hint is feasible.
    """
    stop = None if time_limit_seconds is None else time.monotonic() + time_limit_seconds
    best = _Best(work, settings, hint)
    bound = work_seconds(work)
    scope = choose_scope(work, num_microbatches, hint)
    if best.seconds <= 0 or not np.isfinite(best.seconds) or _num_intervals(work, scope) > _most_intervals(stop):
        return best.result(bound, np.inf, "hint")

    from entrain_opt.assigner.exact_model import PipelineModel

    split = settings.schedule in SPLITTING_ORDERS
    most_units = scope.count * (scope.count + 1) // 2 if work.shape.num_encoders else scope.count
    ticks = to_ticks(work, split=split, longest_seconds=best.seconds, most_units=most_units)
    order = "eager" if settings.schedule in ("interleaved", "search") else settings.schedule
    starts, makespan = hint_times(work, hint, order, ticks)
    built = PipelineModel(work, scope, ticks, split=split, hint=hint, hint_starts=starts, hint_makespan=makespan)
    return _solve(built, scope, best, bound, settings, ticks, deterministic_limit, stop)


def _most_intervals(stop: float | None) -> float:
    """How many intervals there is time to build."""
    if stop is None:
        return MAX_INTERVALS
    loading = 0.0 if "ortools.sat.python.cp_model" in sys.modules else _LOADING_SECONDS
    left = stop - time.monotonic() - loading - _MARGIN_SECONDS
    return min(MAX_INTERVALS, left * _INTERVALS_PER_SECOND)


class _Best:
    """The best placement so far, under the schedule that will run it."""

    def __init__(self, work: SampleWork, settings: SearchSettings, hint: Placement) -> None:
        self._work, self._evaluator = work, Evaluator(work, settings.schedule)
        self.placement, self.seconds = hint, self._evaluator.seconds(hint)

    def offer(self, placement: Placement) -> None:
        """Take it if it is better, after swaps of its microbatches: the solver's order on the ranks is not an index."""
        layout, seconds = Layout.of(placement), self._evaluator.seconds(placement)
        swaps = list(combinations(range(layout.count), 2))
        # Swaps go round and round until none of the last round helped.
        since, turn = 0, 0
        while since < len(swaps) and turn < MAX_SWAPS:
            swapped = _swapped(self._work, layout, *swaps[turn % len(swaps)])
            swapped_seconds = self._evaluator.seconds(swapped.placement(self._work))
            since, turn = since + 1, turn + 1
            if swapped_seconds < seconds:
                layout, seconds, since = swapped, swapped_seconds, 0
        if seconds < self.seconds:
            self.placement, self.seconds = layout.placement(self._work), seconds

    def result(self, bound_seconds: float, model_seconds: float, status: str) -> ExactResult:
        bound_seconds = min(bound_seconds, self.seconds)
        gap = (self.seconds - bound_seconds) / self.seconds if 0 < self.seconds < np.inf else 0.0
        return ExactResult(
            placement=self.placement, seconds=self.seconds, model_seconds=model_seconds, bound_seconds=bound_seconds,
            gap=gap, status=status,
        )  # fmt: skip


def _swapped(work: SampleWork, layout: Layout, first: int, second: int) -> Layout:
    place = np.arange(layout.count)
    place[first], place[second] = second, first
    llm = place[layout.llm]
    media = np.minimum(place[layout.media], llm[work.costs.media_sample])
    return Layout(media=media, llm=llm, count=layout.count)


def _num_intervals(work: SampleWork, scope: Scope) -> int:
    units = sum(len(set(pairs)) for pairs in _pairs_by_encoder(work, scope))
    return 2 * (units * max(work.shape.encoder_stage_counts, default=0) + scope.count * work.shape.llm_stages)


def _pairs_by_encoder(work: SampleWork, scope: Scope) -> list[set[tuple[int, int]]]:
    found: list[set[tuple[int, int]]] = [set() for _ in range(work.shape.num_encoders)]
    for piece, pairs in zip(scope.pieces, scope.pairs, strict=True):
        found[piece.encoder].update(pairs)
    return found


def _solve(
    built: Any, scope: Scope, best: _Best, bound: float, settings: SearchSettings, ticks: Any, limit: float,
    stop: float | None,
) -> ExactResult:  # fmt: skip
    from ortools.sat.python import cp_model

    class Scored(cp_model.CpSolverSolutionCallback):
        """Scores every better solution."""

        def on_solution_callback(self) -> None:
            for placement in placements(built, scope, self):
                best.offer(placement)

    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1
    parameters.random_seed = settings.seed
    parameters.max_deterministic_time = limit
    if not scope.complete:
        parameters.linearization_level = 0  # A proof is out of reach: more solutions are worth more than better bounds.
    if stop is not None:
        left = stop - time.monotonic() - _MARGIN_SECONDS
        if left <= 0:
            return best.result(bound, np.inf, "hint")
        parameters.max_time_in_seconds = left
    status = solver.solve(built.model, Scored())
    if status in (cp_model.MODEL_INVALID, cp_model.INFEASIBLE):
        raise SolverError(
            f"CP-SAT: expected a solution, as the hint is one, found {solver.status_name(status)} "
            f"({built.model.validate() or 'no reason given'})."
        )
    if status == cp_model.UNKNOWN:
        return best.result(bound, np.inf, "hint")
    tick = ticks.seconds_per_tick
    if scope.complete:
        bound = max(bound, solver.best_objective_bound * tick - ticks.rounding_seconds)
    proven = "optimal" if scope.complete else "neighbourhood"
    return best.result(bound, solver.objective_value * tick, proven if status == cp_model.OPTIMAL else "feasible")


def placements(built: Any, scope: Scope, values: Any) -> list[Placement]:
    """The placement of a solution, and the same with microbatches in the order in which they reach the model.

    Args:
        built: the model.
        scope: its choices.
        values: a solver or callback that knows the values of its variables.
    """
    llm = np.array([next(m for m, v in row.items() if values.value(v)) for row in built.llm], dtype=np.int64)
    media = np.full(len(built.has_media), -1, dtype=np.int64)
    for piece, row in zip(scope.pieces, built.pair, strict=True):
        media[piece.media] = next(pair[0] for pair, v in row.items() if values.value(v))
    count = int(llm.max()) + 1
    found = [Placement(encoder_microbatch=media, llm_microbatch=llm, num_microbatches=count)]
    starts = [values.value(built.start[0, (built.first_llm_stage, -1, m)]) for m in range(count)]
    place = np.argsort(np.argsort(starts, kind="stable"), kind="stable")
    if (place != np.arange(count)).any():
        moved = place[llm]
        encoder = np.where(media >= 0, np.minimum(place[media], moved[built.media_sample]), -1)
        found.append(Placement(encoder_microbatch=encoder, llm_microbatch=moved, num_microbatches=count))
    return found
