"""Whether the data that training sees has drifted so far from the planned one that another plan would be better.

1. The newest samples are kept (their rows, at most 4,096), and every module's share of their work is compared with the
   share that the plan was made for. Chance alone moves it: a share counts as moved only if it differs by two hundredths
   and by more than 4.5 of its own standard errors (ratio of sums, errors from the samples at hand).
2. Only then the planner solves for the newest samples, with the run's own options. The running plan and the new one are
   replayed on batches drawn from them with another seed, so that the new plan is not judged on what it was chosen by.
3. A gain above the tolerance is a `Drift`. Either way the same shares are not judged again; they must move on first.

Promise: data in a stable mixture is not judged but by an accident of probability 1e-5 per look, and even then a warning
needs a plan that is faster on fresh batches. Price: a list append per step; per look a few milliseconds; a second to a
minute of one core for a judgement, which drifting data causes once and steady data never. Torch-free.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from entrain_opt.cost import CostModel
from entrain_opt.errors import PlanError
from entrain_opt.plan import Plan
from entrain_opt.planner.candidates import FINAL_BATCHES, REPLICAS
from entrain_opt.planner.demand import estimate_demand, module_seconds, work_shares
from entrain_opt.planner.options import PlanOptions
from entrain_opt.planner.replay import Replayer
from entrain_opt.planner.solve import solve_plan
from entrain_opt.units import format_seconds
from entrain_opt.workload.samples import SampleTable

FloatArray = NDArray[np.float64]
#: Newest samples that are looked at, and samples of the data set that stand for all where a plan does not say its own.
NEWEST, REFERENCE = 4096, 4096
#: A share has moved if it differs by so much, and by so many of its standard errors.
LEAST_MOVE, STANDARD_ERRORS = 0.02, 4.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """A better plan for what training sees now.

    Attributes:
        plan: the better one.
        seconds: of an iteration under it, on the newest samples.
        running_seconds: the same under the running plan; None if it cannot run them.
        failure: why it cannot.
        planned_shares, shares: module -> its share of the work, as planned and of the newest samples.
        num_samples: newest samples looked at.
    """

    plan: Plan
    seconds: float
    running_seconds: float | None
    failure: str = ""
    planned_shares: dict[str, float]
    shares: dict[str, float]
    num_samples: int

    @property
    def gain(self) -> float:
        """Share of an iteration's time that the better plan saves; 1 if the running plan cannot run such data."""
        return 1.0 if self.running_seconds is None else 1 - self.seconds / self.running_seconds

    def sentence(self) -> str:
        """What it means, in words."""
        moved = max(self.shares, key=lambda name: abs(self.shares[name] - self.planned_shares[name]))
        said = (
            f"the data has drifted: of the last {self.num_samples:,} samples' work {self.shares[moved]:.0%} is the "
            f"{moved} module's; the plan was made for {self.planned_shares[moved]:.0%}. "
        )
        better = f"{_words(self.plan)}: {format_seconds(self.seconds)}"
        if self.running_seconds is None:
            return f"{said}It can no longer run such batches ({self.failure}); this plan can: {better} per step."
        return (
            f"{said}A better plan for them is {better} per step instead of {format_seconds(self.running_seconds)} "
            f"({self.gain:.1%} less, both simulated)."
        )


class DriftWatch:
    """Watches the samples of one run. `note` and `look` may be called from different threads.

    Args:
        plan: what runs; if the planner made it from the same kind of costs, it says the shares it was made for.
        samples: the run's data, whose shares are taken otherwise.
        costs: of the model.
        options: of the run's planner.
        tolerance: a better plan is named if it saves more than this share of the time.
    """

    def __init__(
        self, plan: Plan, samples: SampleTable, costs: CostModel, options: PlanOptions, *, tolerance: float = 0.03
    ) -> None:
        self.plan, self.costs, self.tolerance = plan, costs, tolerance
        # A plan to go on with must be one that can be trained.
        self.options = replace(options, context_degrees=(1,))
        self._samples = samples
        self._recent: deque[NDArray[np.int64]] = deque()
        self._lock = Lock()
        self._names = [module.name for module in costs.model.modules]
        self._judged: FloatArray | None = None
        self.planned_shares = self._planned_shares()

    def note(self, rows: NDArray[np.int64]) -> None:
        """A global batch has run; `rows` are its samples."""
        with self._lock:
            self._recent.append(rows)
            while len(self._recent) > 1 and sum(map(len, self._recent)) - len(self._recent[0]) >= NEWEST:
                self._recent.popleft()

    def look(self) -> Drift | None:
        """A better plan, if the newest samples have moved and there is one."""
        with self._lock:
            recent = list(self._recent)
        if not recent:
            return None
        rows = _some(np.concatenate(recent), NEWEST)
        newest = self._samples.take(np.sort(rows))
        work = module_seconds(newest, self.costs)
        shares = work_shares(work)
        if not self._has_moved(work, shares):
            return None
        if self._judged is not None and np.abs(shares - self._judged).max() < LEAST_MOVE:
            return None
        self._judged = shares
        return self._judge(newest, shares)

    def _has_moved(self, work: FloatArray, shares: FloatArray) -> bool:
        planned = np.array([self.planned_shares[name] for name in self._names])
        # Sums to zero where the shares of the sums are the planned ones; its terms are independent.
        differences = work - planned * work.sum(axis=1, keepdims=True)
        error = np.sqrt((differences**2).sum(axis=0))
        beyond = np.abs(differences.sum(axis=0)) > STANDARD_ERRORS * error
        return bool((beyond & (np.abs(shares - planned) >= LEAST_MOVE)).any())

    def _judge(self, newest: SampleTable, shares: FloatArray) -> Drift | None:
        costs, options, size = self.costs, self.options, self.plan.global_batch_size
        better = solve_plan(costs.model, newest, costs.cluster, global_batch_size=size, options=options, costs=costs)
        demand = estimate_demand(newest, costs, size, seed=options.seed + 1)
        replayer = Replayer(costs, demand, options)
        running: float | None = None
        failure = ""
        try:
            running = replayer.replay(self.plan, num_batches=FINAL_BATCHES, num_replicas=REPLICAS).seconds
        except PlanError as error:
            failure = str(error)
        try:
            found = replayer.replay(better, num_batches=FINAL_BATCHES, num_replicas=REPLICAS)
        except PlanError:
            return None  # A sample that it was not planned with does not fit: no plan to recommend.
        drift = Drift(
            plan=better,
            seconds=found.seconds,
            running_seconds=running,
            failure=failure,
            planned_shares=self.planned_shares,
            shares=dict(zip(self._names, shares.tolist(), strict=True)),
            num_samples=len(newest),
        )
        return drift if drift.gain > self.tolerance else None

    def _planned_shares(self) -> dict[str, float]:
        provenance = self.plan.provenance
        if provenance.cost_source == self.costs.source and provenance.stability is not None:
            said = provenance.stability.get("work_shares")
            if said is not None and set(said) == set(self._names):
                return {name: float(said[name]) for name in self._names}
        rows = _some(np.arange(len(self._samples)), REFERENCE)
        shares = work_shares(module_seconds(self._samples.take(rows), self.costs))
        return dict(zip(self._names, shares.tolist(), strict=True))


def _some(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Evenly spaced ones, at most `count`."""
    if len(rows) <= count:
        return rows
    return rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]


def _words(plan: Plan) -> str:
    degrees = plan.degrees
    stages = " ".join(stage.label for stage in plan.stages)
    tensor = "" if degrees.tensor == 1 else f" x tensor {degrees.tensor}"
    tensor += "" if degrees.context == 1 else f" x context {degrees.context}"
    recompute = sorted({stage.module for stage in plan.stages if stage.recompute})
    return (
        f"data {degrees.data} x pipeline {degrees.pipeline}{tensor}, {plan.num_microbatches} microbatches, {stages}"
        + (f", recompute in {' and '.join(recompute)}" if recompute else "")
        + (", optimizer state sharded" if plan.shards_state else "")
    )
