"""Policies and schedules compared on the same global batches: the real assigner and the simulator, all replicas.

A combination that needs more memory than a rank has is played again under the memory caps that the planner would give
it (`planner/limits.py`), so that all are compared under the same memory.

Promise: the same seed draws the same batches for every combination, and they are the planner's own (it draws with the
same function); a combination that cannot run within the memory is kept with the reason.
Price: about 25 ms per replica of 128 samples in 32 microbatches on 8 ranks, per batch and combination.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner import assign_microbatches, sample_work
from entrain_opt.assigner.registry import find_policy
from entrain_opt.assigner.statistics import AssignmentStatistics, assignment_statistics, media_seconds
from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.cost import CostModel
from entrain_opt.errors import AssignmentError, PlanError, ScheduleError
from entrain_opt.plan import PipelineShape, Plan
from entrain_opt.planner.demand import Demand, estimate_demand
from entrain_opt.planner.limits import with_memory_caps
from entrain_opt.planner.replay import recomputed_bytes
from entrain_opt.schedule import ORDERS
from entrain_opt.simulator import Timeline, simulate
from entrain_opt.simulator.bounds import work_bound
from entrain_opt.units import format_bytes
from entrain_opt.workload.samples import SampleTable
from entrain_opt.workload.statistics import global_batch_statistics

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What became of one policy, schedule and number of microbatches. Means over batches, unless said otherwise.

    Attributes:
        policy, schedule: by name.
        num_microbatches: asked for, per replica.
        step_seconds: iteration time; the slowest replica decides.
        bubble_share: idle share of all devices.
        times_bound: pipeline time over what no schedule of the same assignment can beat.
        encoder_imbalance, llm_imbalance: largest over mean load of the microbatches of all replicas; 1 is even.
        deferred_samples: per global batch.
        peak_bytes: highest of any rank in any batch.
        samples_per_second, tokens_per_second: of the whole cluster.
        cap_bytes: memory of the caps that it needs and the plan does not have; None if it needs none.
        failure: why it cannot run; empty if it can. There may be numbers all the same: those beyond the memory.
    """

    policy: str
    schedule: str
    num_microbatches: int
    step_seconds: float = float("nan")
    bubble_share: float = float("nan")
    times_bound: float = float("nan")
    encoder_imbalance: float = float("nan")
    llm_imbalance: float = float("nan")
    deferred_samples: float = float("nan")
    peak_bytes: float = float("nan")
    samples_per_second: float = float("nan")
    tokens_per_second: float = float("nan")
    cap_bytes: int | None = None
    failure: str = ""

    @property
    def has_run(self) -> bool:
        """Whether there are numbers."""
        return bool(np.isfinite(self.step_seconds))

    @property
    def capped(self) -> bool:
        return self.cap_bytes is not None

    @property
    def can_run(self) -> bool:
        return self.has_run and not self.failure


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchLoads:
    """Seconds of forward and backward per stage that each microbatch asks for.

    Attributes:
        encoder: per replica, [K] of the unified encoder, by the microbatch that encodes.
        encoder_deferred: per replica, [K] the part of `encoder` whose samples run in a later microbatch.
        llm: per replica, [K] by the microbatch that runs the language model.
        llm_deferred: per replica, [K] the part of `llm` whose media were encoded in an earlier microbatch.
    """

    encoder: tuple[FloatArray, ...]
    encoder_deferred: tuple[FloatArray, ...]
    llm: tuple[FloatArray, ...]
    llm_deferred: tuple[FloatArray, ...]


def draw_batches(samples: SampleTable, global_batch_size: int, num_batches: int, *, seed: int) -> IntArray:
    """[num_batches, global_batch_size] rows of random global batches; the planner's own for the planner's seed."""
    statistics = global_batch_statistics({"tokens": samples.total_tokens}, global_batch_size, num_batches, seed=seed)
    return statistics.rows


def microbatch_loads(costs: BatchCosts, assignment: Assignment, plan: Plan) -> MicrobatchLoads:
    """The loads of every microbatch of every replica."""
    work = sample_work(costs, plan.pipeline_shape)
    encoder_seconds = media_seconds(work)
    media_replica = assignment.replica[costs.media_sample]
    media_waits = assignment.encoder_microbatch < assignment.llm_microbatch[costs.media_sample]
    sample_waits = np.zeros(costs.num_samples, dtype=bool)
    sample_waits[assignment.deferred_samples(costs)] = True

    def sums(replica_of: IntArray, microbatch: IntArray, seconds: FloatArray) -> tuple[FloatArray, ...]:
        placed = microbatch >= 0
        return tuple(
            np.bincount(microbatch[mine], weights=seconds[mine], minlength=int(count)).astype(np.float64)
            for replica, count in enumerate(assignment.num_microbatches)
            for mine in (placed & (replica_of == replica),)
        )

    return MicrobatchLoads(
        encoder=sums(media_replica, assignment.encoder_microbatch, encoder_seconds),
        encoder_deferred=sums(media_replica, assignment.encoder_microbatch, encoder_seconds * media_waits),
        llm=sums(assignment.replica, assignment.llm_microbatch, work.llm_seconds),
        llm_deferred=sums(assignment.replica, assignment.llm_microbatch, work.llm_seconds * sample_waits),
    )


#: Plays under memory caps until one fits.
_TIGHTENINGS = 4


class Bench:
    """Plays a plan's batches under other policies, schedules and numbers of microbatches.

    Args:
        plan: whose stages and memory caps every combination uses.
        samples: the data set.
        costs: of the model.
        rows: [batches, global_batch_size] from `draw_batches`.
        limit_bytes: what one rank may use.
    """

    def __init__(self, plan: Plan, samples: SampleTable, costs: CostModel, rows: IntArray, *, limit_bytes: int) -> None:
        self.plan, self.costs, self.rows, self.limit_bytes = plan, costs, rows, limit_bytes
        self.batches = [costs.batch_costs(samples.take(row), plan) for row in rows]
        modules = [costs.model.module(stage.module) for stage in plan.stages]
        self.trained_stages = [module.anything_trained for module in modules]
        self._samples = samples
        self._assigned: dict[tuple[str, int, int, int | None], Assignment] = {}
        #: What schedules of an assignment share: lower bound and statistics.
        self._judged: dict[tuple[str, int, int, int | None], tuple[float, AssignmentStatistics]] = {}
        self._demand: Demand | None = None

    def shape(self, num_microbatches: int, cap_bytes: int | None) -> PipelineShape:
        """The stages of a replica, with the planner's memory caps for so many bytes; None keeps those of the plan.

        Raises:
            PlanError: a single sample does not fit.
        """
        if cap_bytes is None:
            return self.plan.pipeline_shape
        if self._demand is None:
            self._demand = estimate_demand(self._samples, self.costs, self.rows.shape[1])
        plan = replace(self.plan, num_microbatches=num_microbatches)
        return with_memory_caps(plan, self.costs, self._demand, cap_bytes).pipeline_shape

    def assignment(
        self, batch: int, policy: str, num_microbatches: int | None = None, *, cap_bytes: int | None = None
    ) -> Assignment:
        """Of one batch; kept, because schedules share it."""
        count = num_microbatches or self.plan.num_microbatches
        key = (policy, count, batch, cap_bytes)
        if key not in self._assigned:
            self._assigned[key] = assign_microbatches(
                self.batches[batch],
                self.shape(count, cap_bytes),
                num_replicas=self.plan.degrees.data,
                num_microbatches=count,
                policy=policy,
                schedule=self.plan.schedule,
            )
        return self._assigned[key]

    def timeline(
        self,
        batch: int,
        policy: str,
        schedule: str,
        num_microbatches: int | None = None,
        *,
        cap_bytes: int | None = None,
    ) -> Timeline:
        """One batch played through.

        Raises:
            AssignmentError, ScheduleError: unknown names, or memory caps that cannot be kept.
            PlanError: with caps, a single sample does not fit.
        """
        count = num_microbatches or self.plan.num_microbatches
        return simulate(
            self.batches[batch],
            self.assignment(batch, policy, count, cap_bytes=cap_bytes),
            self.shape(count, cap_bytes),
            schedule=schedule,
            trained_stages=self.trained_stages,
        )

    def recomputed_bytes(
        self, batch: int, policy: str, num_microbatches: int | None = None, *, cap_bytes: int | None = None
    ) -> FloatArray:
        """[replicas, ranks] what recompute adds to the peaks of the timeline, as the planner counts it."""
        assignment = self.assignment(batch, policy, num_microbatches, cap_bytes=cap_bytes)
        return recomputed_bytes(self.costs, self.plan, self.batches[batch], assignment)

    def trial(self, policy: str, schedule: str, num_microbatches: int | None = None) -> Trial:
        """All batches played through. A combination that cannot run says why instead of raising.

        Raises:
            AssignmentError, ScheduleError: an unknown policy or schedule.
        """
        find_policy(policy)
        if schedule not in ORDERS:
            raise ScheduleError(f"schedule: expected one of {list(ORDERS)}, found {schedule!r}.")
        count = num_microbatches or self.plan.num_microbatches
        trial = uncapped = self._trial(policy, schedule, count, cap_bytes=None)
        cap_bytes = self.limit_bytes
        for _ in range(_TIGHTENINGS):
            if not trial.failure or (trial.capped and not trial.has_run):
                break
            trial = self._trial(policy, schedule, count, cap_bytes=cap_bytes)
            if trial.has_run:
                # The caps count the logits of a typical microbatch; a larger one overshoots by as much.
                cap_bytes -= max(int(trial.peak_bytes) - self.limit_bytes, 0) + self.limit_bytes // 100
        return uncapped if uncapped.has_run and not trial.has_run else trial

    def _trial(self, policy: str, schedule: str, count: int, *, cap_bytes: int | None) -> Trial:
        batches = range(len(self.batches))
        try:
            results = [self._measure(batch, policy, schedule, count, cap_bytes) for batch in batches]
        except (AssignmentError, ScheduleError, PlanError) as error:
            return Trial(
                policy=policy, schedule=schedule, num_microbatches=count, cap_bytes=cap_bytes, failure=str(error)
            )
        mean = {name: float(np.mean([result[name] for result in results])) for name in results[0]}
        peak = max(result["peak_bytes"] for result in results)
        tokens = float(np.mean([batch.tokens.sum() for batch in self.batches]))
        too_big = f"needs {format_bytes(peak)}, a rank has {format_bytes(self.limit_bytes)}"
        return Trial(
            policy=policy,
            schedule=schedule,
            num_microbatches=count,
            **{**mean, "peak_bytes": peak},
            samples_per_second=self.rows.shape[1] / mean["step_seconds"],
            tokens_per_second=tokens / mean["step_seconds"],
            cap_bytes=cap_bytes,
            failure=too_big if peak > self.limit_bytes else "",
        )

    def _measure(self, batch: int, policy: str, schedule: str, count: int, cap_bytes: int | None) -> dict[str, float]:
        bound, statistics = self._judgement(batch, policy, count, cap_bytes)
        timeline = self.timeline(batch, policy, schedule, count, cap_bytes=cap_bytes)
        peaks = timeline.peak_bytes + self.recomputed_bytes(batch, policy, count, cap_bytes=cap_bytes)
        return {
            "step_seconds": timeline.makespan_seconds,
            "bubble_share": timeline.bubble_share_of_devices(self.plan.degrees.widths),
            "times_bound": timeline.pipeline_seconds / bound if bound > 0 else 1.0,
            "encoder_imbalance": statistics.encoder.max_over_mean,
            "llm_imbalance": statistics.llm.max_over_mean,
            "deferred_samples": float(statistics.deferred_samples),
            "peak_bytes": float(peaks.max(initial=0.0)),
        }

    def _judgement(
        self, batch: int, policy: str, count: int, cap_bytes: int | None
    ) -> tuple[float, AssignmentStatistics]:
        key = (policy, count, batch, cap_bytes)
        if key not in self._judged:
            costs, shape = self.batches[batch], self.plan.pipeline_shape
            assignment = self.assignment(batch, policy, count, cap_bytes=cap_bytes)
            statistics = assignment_statistics(costs, assignment, shape)
            self._judged[key] = (work_bound(costs, assignment, shape), statistics)
        return self._judged[key]


def best_trial(trials: list[Trial]) -> int | None:
    """Index of the fastest trial that can run; the first of equals; None if none can."""
    runnable = [i for i, trial in enumerate(trials) if trial.can_run]
    return min(runnable, key=lambda i: trials[i].step_seconds, default=None)
