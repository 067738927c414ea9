"""Candidates judged by the parts that will run them: the assigner and the simulator, on sampled global batches.

Of each global batch the heaviest replicas are played through, because the slowest replica decides; which they are
follows from the assigner's own split. Price: about 25 ms per replica of 128 samples in 32 microbatches on 8 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner import assign_microbatches, sample_work, split_replicas
from entrain_opt.assignment import BatchCosts
from entrain_opt.cost import CostModel
from entrain_opt.errors import AssignmentError, PlanError, ScheduleError
from entrain_opt.plan import Plan
from entrain_opt.planner.demand import Demand
from entrain_opt.planner.limits import memory_limit, with_memory_caps
from entrain_opt.planner.options import PlanOptions
from entrain_opt.simulator import Timeline, simulate
from entrain_opt.simulator.memory import PARTS
from entrain_opt.units import format_bytes

_CAP_ATTEMPTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What the simulator says of a plan.

    Attributes:
        plan: with memory caps, where they are needed.
        seconds: mean over batches of the slowest replica's iteration.
        bubble_share: mean idle share of the ranks.
        busy_share: per pipeline rank, share of the iteration spent computing.
        peak_bytes: per pipeline rank, the highest over batches.
        peak_parts: what makes it up.
        microbatches: most that any replica used.
    """

    plan: Plan
    seconds: float
    bubble_share: float
    busy_share: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    peak_parts: tuple[dict[str, int], ...]
    microbatches: int


class Replayer:
    """Plays plans through; keeps nothing but its inputs."""

    def __init__(self, costs: CostModel, demand: Demand, options: PlanOptions) -> None:
        self.costs, self.demand, self.options = costs, demand, options
        self.limit_bytes = memory_limit(costs, options.memory_bytes)

    def replay(self, plan: Plan, *, num_batches: int, num_replicas: int) -> Replay:
        """One plan on the first global batches drawn.

        Args:
            plan: without memory caps; they are added if it needs them.
            num_batches: global batches.
            num_replicas: of each batch, the heaviest ones.

        Raises:
            PlanError: it does not fit in memory, or cannot be scheduled.
        """
        result = self._play(plan, num_batches, num_replicas)
        allowance = self.limit_bytes
        for _ in range(_CAP_ATTEMPTS):
            excess = max(result.peak_bytes) - self.limit_bytes
            if excess <= 0:
                return result
            capped = with_memory_caps(plan, self.costs, self.demand, allowance)
            # Caps bound the activations only; what else the peak held comes out of the allowance the next time.
            result = self._play(capped, num_batches, num_replicas)
            allowance -= max(max(result.peak_bytes) - self.limit_bytes, 0) + self.limit_bytes // 50
        worst = int(np.argmax(result.peak_bytes))
        if result.peak_bytes[worst] > self.limit_bytes:
            raise PlanError(
                f"memory: rank {worst} needs {format_bytes(result.peak_bytes[worst])}, the device has "
                f"{format_bytes(self.limit_bytes)}."
            )
        return result

    def _play(self, plan: Plan, num_batches: int, num_replicas: int) -> Replay:
        timelines = []
        microbatches = 0
        for rows in self.demand.rows[:num_batches]:
            costs = self.costs.batch_costs(self.demand.samples.take(rows), plan)
            mine = heaviest_replicas(costs, plan, num_replicas)
            try:
                played = [self._replica(costs.take(samples), plan) for samples in mine]
            except (AssignmentError, ScheduleError) as error:
                raise PlanError(f"memory: {error}") from error
            slowest = max(played, key=lambda pair: pair[0].makespan_seconds)
            timelines.append(slowest[0])
            microbatches = max(microbatches, *(pair[1] for pair in played))
        busy = np.mean([t.busy_seconds[0] / max(t.makespan_seconds, 1e-12) for t in timelines], axis=0)
        peak, parts = self._peak(plan, timelines)
        return Replay(
            plan=plan,
            seconds=float(np.mean([t.makespan_seconds for t in timelines])),
            bubble_share=float(np.mean([t.bubble_share for t in timelines])),
            busy_share=tuple(float(share) for share in busy),
            peak_bytes=peak,
            peak_parts=parts,
            microbatches=microbatches,
        )

    def _replica(self, costs: BatchCosts, plan: Plan) -> tuple[Timeline, int]:
        shape = plan.pipeline_shape
        assignment = assign_microbatches(
            costs,
            shape,
            num_replicas=1,
            num_microbatches=plan.num_microbatches,
            policy=plan.policy,
            schedule=plan.schedule,
            effort="fast",  # Many plans are compared; training itself searches longer.
        )
        trained = [
            self.costs.model.module(stage.module).trained or self.costs.model.module(stage.module).output_trained
            for stage in plan.stages
        ]
        timeline = simulate(costs, assignment, shape, schedule=plan.schedule, trained_stages=trained)
        return timeline, int(assignment.num_microbatches.max())

    def _peak(self, plan: Plan, timelines: list[Timeline]) -> tuple[tuple[int, ...], tuple[dict[str, int], ...]]:
        peaks, all_parts = [], []
        for rank in range(plan.degrees.pipeline):
            curve = max((t.memory[0][rank] for t in timelines), key=lambda curve: curve.peak_bytes)
            sums = curve.parts.sum(axis=1)
            at_peak = curve.parts[int(sums.argmax())] if len(sums) else np.zeros(len(PARTS))
            held = [stage for stage in plan.stages if stage.rank == rank]
            parts = dict.fromkeys(("weights", "gradients", "optimizer", "buffers"), 0)
            for stage in held:
                static = self.costs.static_bytes(stage, plan.degrees)
                for name in parts:
                    parts[name] += int(getattr(static, name))
            parts |= {name: int(value) for name, value in zip(PARTS, at_peak, strict=True)}
            peaks.append(sum(parts.values()))
            all_parts.append({name: value for name, value in parts.items() if value})
        return tuple(peaks), tuple(all_parts)


def heaviest_replicas(costs: BatchCosts, plan: Plan, count: int) -> list[NDArray[np.int64]]:
    """Rows of the replicas of a global batch that may be the slowest, heaviest first."""
    data = plan.degrees.data
    if data == 1:
        return [np.arange(costs.num_samples)]
    uncapped = replace(plan.pipeline_shape, patches_in_flight=None, tokens_in_flight=None)
    work = sample_work(costs, uncapped)
    replica = split_replicas(work, num_replicas=data, policy=plan.policy)
    loads = np.array([np.bincount(replica, w, data) for w in (work.encoder_seconds, work.llm_seconds)])
    order = np.argsort(-loads.max(axis=0), kind="stable")[:count]
    return [rows for index in order if len(rows := np.flatnonzero(replica == index))]
