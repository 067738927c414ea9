"""Candidates judged by the parts that will run them: the assigner and the simulator, on sampled global batches.

Of each global batch the heaviest replicas are played through, because the slowest replica decides; which they are
follows from the assigner's own split, which is kept for all plans of the same stages. What was played of a plan is kept
as well, so that more batches cost only what is new. Price: about 10 ms per replica of 128 samples in 32 microbatches on
8 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from entrain_opt.assigner import assign_microbatches, sample_work, split_replicas
from entrain_opt.assigner.work import SampleWork
from entrain_opt.assignment import Assignment, BatchCosts
from entrain_opt.cost import CostModel
from entrain_opt.errors import AssignmentError, PlanError, ScheduleError
from entrain_opt.plan import ParallelDegrees, PipelineShape, Plan
from entrain_opt.planner.demand import Demand
from entrain_opt.planner.limits import memory_limit, with_memory_caps
from entrain_opt.planner.options import PlanOptions
from entrain_opt.simulator import Timeline, simulate
from entrain_opt.simulator.memory import PARTS
from entrain_opt.units import format_bytes
from entrain_opt.workload.samples import SampleTable

_CAP_ATTEMPTS = 4
#: Replicas of a batch that may be asked for.
_MOST_REPLICAS = 2
#: Names of what a peak is made up of, besides those of the simulator's `PARTS`.
STATIC_PARTS, RECOMPUTED = ("weights", "gradients", "optimizer", "buffers"), "recomputed layer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What the simulator says of a plan.

    Attributes:
        plan: with memory caps, where they are needed.
        batch_seconds: of each batch, the slowest replica's iteration.
        bubble_share: mean idle share of the devices.
        busy_share: per pipeline rank, share of the iteration spent computing.
        peak_bytes: per pipeline rank, the highest over batches.
        peak_parts: what makes it up.
        most_microbatches: that a replica was assigned.
        allowance_bytes: that the caps were made for; None if the plan did not need others than it had.
    """

    plan: Plan
    batch_seconds: tuple[float, ...]
    bubble_share: float
    busy_share: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    peak_parts: tuple[dict[str, int], ...]
    most_microbatches: int
    allowance_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """Mean over the batches."""
        return float(np.mean(self.batch_seconds))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Played:
    """One replica of one batch: what is kept of its timeline. `parts` is [ranks, parts] at each rank's peak."""

    seconds: float
    bubble_share: float
    busy_share: NDArray[np.float64]
    parts: NDArray[np.float64]
    recomputed: NDArray[np.float64]
    num_microbatches: int


class Replayer:
    """Plays plans through and keeps what it played."""

    def __init__(self, costs: CostModel, demand: Demand, options: PlanOptions) -> None:
        self.costs, self.demand, self.options = costs, demand, options
        self.limit_bytes = memory_limit(costs, options.memory_bytes)
        self._static: dict[tuple[object, ...], dict[str, float]] = {}
        #: Kinds of plans that did not fit without caps, and the bytes that caps were last made for. Once there are any,
        #: plans of other kinds get caps for all bytes at once, which bind only where they must.
        self._allowances: dict[tuple[object, ...], int] = {}
        self._heaviest: dict[tuple[object, ...], list[SampleTable]] = {}
        self._costs: dict[tuple[object, ...], BatchCosts] = {}
        self._played: dict[tuple[object, ...], _Played] = {}

    def replay(self, plan: Plan, *, num_batches: int, num_replicas: int, effort: str = "least") -> Replay:
        """One plan on the first global batches drawn. Threads may replay plans at once.

        Args:
            plan: without memory caps, which are added if it needs them, or with those of an earlier replay.
            num_batches: global batches.
            num_replicas: of each batch, the heaviest ones; at most 2.
            effort: of policies that search. Many plans are compared; training itself searches longer.

        Raises:
            PlanError: it does not fit in memory, or cannot be scheduled.
        """
        assert 1 <= num_replicas <= _MOST_REPLICAS, (
            f"num_replicas: expected 1 to {_MOST_REPLICAS}, found {num_replicas}"
        )
        kind = _memory_kind(plan)
        allowance = self._allowances.get(kind, self.limit_bytes)
        if self._allowances and plan.patches_in_flight is None and plan.tokens_in_flight is None:
            try:
                plan = with_memory_caps(plan, self.costs, self.demand, allowance)
            except PlanError:  # A sample needs more than what is left; all there is may do.
                allowance = self.limit_bytes
                if kind in self._allowances:
                    plan = with_memory_caps(plan, self.costs, self.demand, allowance)
        result, made_for = self._play(plan, num_batches, num_replicas, effort), None
        for _ in range(_CAP_ATTEMPTS):
            if max(result.peak_bytes) <= self.limit_bytes:
                break
            made_for = allowance
            capped = with_memory_caps(plan, self.costs, self.demand, allowance)
            # Caps bound the activations only; what else the peak held comes out of the allowance the next time.
            result = self._play(capped, num_batches, num_replicas, effort)
            allowance -= max(max(result.peak_bytes) - self.limit_bytes, 0) + self.limit_bytes // 30
        worst = int(np.argmax(result.peak_bytes))
        if result.peak_bytes[worst] > self.limit_bytes:
            raise PlanError(
                f"memory: rank {worst} needs {format_bytes(result.peak_bytes[worst])}, the device has "
                f"{format_bytes(self.limit_bytes)}."
            )
        return replace(result, allowance_bytes=made_for)

    def learn(self, replay: Replay) -> None:
        """Plans of the same kind get caps for as many bytes as this one's at once, others for all bytes."""
        if replay.allowance_bytes is not None:
            self._allowances[_memory_kind(replay.plan)] = replay.allowance_bytes

    def _play(self, plan: Plan, num_batches: int, num_replicas: int, effort: str) -> Replay:
        """The batches, up to the first one that does not fit in memory."""
        slowest: list[_Played] = []
        for batch in range(num_batches):
            mine = self._heaviest_replicas(plan, batch, num_replicas)
            try:
                played = [self._replica(plan, batch, index, samples, effort) for index, samples in enumerate(mine)]
            except (AssignmentError, ScheduleError) as error:
                raise PlanError(f"memory: {error}") from error
            slowest.append(max(played, key=lambda one: one.seconds))
            peak, parts = self._peak(plan, slowest)
            if max(peak) > self.limit_bytes:
                break
        return Replay(
            plan=plan,
            batch_seconds=tuple(one.seconds for one in slowest),
            bubble_share=float(np.mean([one.bubble_share for one in slowest])),
            busy_share=tuple(float(share) for share in np.mean([one.busy_share for one in slowest], axis=0)),
            peak_bytes=peak,
            peak_parts=parts,
            most_microbatches=max(one.num_microbatches for one in slowest),
        )

    def _heaviest_replicas(self, plan: Plan, batch: int, count: int) -> list[SampleTable]:
        data = plan.degrees.data
        degrees = plan.degrees
        stages = tuple(
            (stage.module, degrees.tensor_of(stage.rank), degrees.context_of(stage.rank), stage.recompute)
            for stage in plan.stages
        )
        key = (batch, data, plan.policy, stages)
        if key not in self._heaviest:
            samples = self.demand.samples.take(self.demand.rows[batch])
            rows = [np.arange(len(samples))]
            if data > 1:
                work = split_work(self.costs, samples, plan)
                rows = heaviest_replicas(work, plan.pipeline_shape, data, plan.policy, _MOST_REPLICAS)
            self._heaviest[key] = [samples.take(some) for some in rows]
        return self._heaviest[key][:count]

    def _replica(self, plan: Plan, batch: int, index: int, samples: SampleTable, effort: str) -> _Played:
        key = (
            batch, index, plan.degrees, plan.num_shares, plan.stages, plan.num_microbatches, plan.patches_in_flight,
            plan.tokens_in_flight, plan.policy, plan.schedule, effort,
        )  # fmt: skip
        if key not in self._played:
            same_costs = (batch, index, plan.policy, plan.degrees, plan.num_shares, plan.stages)
            if same_costs not in self._costs:
                self._costs[same_costs] = self.costs.batch_costs(samples, plan)
            costs = self._costs[same_costs]
            timeline, assignment = self._simulate(costs, plan, effort)
            self._played[key] = _Played(
                seconds=timeline.makespan_seconds,
                bubble_share=timeline.bubble_share_of_devices(plan.degrees.widths),
                busy_share=timeline.busy_seconds[0] / max(timeline.makespan_seconds, 1e-12),
                parts=np.stack([parts_at_peak(curve.parts) for curve in timeline.memory[0]]),
                recomputed=recomputed_bytes(self.costs, plan, costs, assignment)[0],
                num_microbatches=int(assignment.num_microbatches[0]),
            )
        return self._played[key]

    def _simulate(self, costs: BatchCosts, plan: Plan, effort: str) -> tuple[Timeline, Assignment]:
        shape = plan.pipeline_shape
        assignment = assign_microbatches(
            costs,
            shape,
            num_replicas=1,
            num_microbatches=plan.num_microbatches,
            policy=plan.policy,
            schedule=plan.schedule,
            effort=effort,
        )
        trained = [self.costs.model.module(stage.module).anything_trained for stage in plan.stages]
        return simulate(costs, assignment, shape, schedule=plan.schedule, trained_stages=trained), assignment

    def _peak(self, plan: Plan, played: list[_Played]) -> tuple[tuple[int, ...], tuple[dict[str, int], ...]]:
        peaks, all_parts = [], []
        for rank in range(plan.degrees.pipeline):
            highest = max(played, key=lambda one: one.parts[rank].sum() + one.recomputed[rank])
            key = (plan.degrees, plan.num_shares, tuple(stage for stage in plan.stages if stage.rank == rank))
            if key not in self._static:
                self._static[key] = static_parts(self.costs, plan, rank)
            found = self._static[key] | moving_parts(highest.parts[rank], float(highest.recomputed[rank]))
            parts = {name: int(value) for name, value in found.items()}
            peaks.append(sum(parts.values()))
            all_parts.append({name: value for name, value in parts.items() if value})
        return tuple(peaks), tuple(all_parts)


def _memory_kind(plan: Plan) -> tuple[object, ...]:
    """Plans with the same need about as much memory besides activations."""
    return (plan.degrees, plan.num_shares, frozenset((stage.module, stage.recompute) for stage in plan.stages))


def parts_at_peak(parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """[parts] of the instant at which their sum is highest.

    Args:
        parts: [T, parts] of a rank's memory curve.
    """
    return parts[int(parts.sum(axis=1).argmax())] if len(parts) else np.zeros(len(PARTS))


def recomputed_bytes(costs: CostModel, plan: Plan, batch: BatchCosts, assignment: Assignment) -> NDArray[np.float64]:
    """[replicas, ranks] the layer that a stage with recompute holds whole while its largest microbatch runs backward.

    Args:
        costs: of the model.
        plan: whose stages they are.
        batch: the samples, of all replicas.
        assignment: of them.
    """
    held = np.zeros((assignment.num_replicas, plan.degrees.pipeline))
    encoders = [encoder.name for encoder in costs.model.encoders]
    media_replica = assignment.replica[batch.media_sample]
    for stage in plan.stages:
        if not stage.recompute:
            continue
        replica, microbatch, amounts = assignment.replica, assignment.llm_microbatch, batch.tokens
        if stage.module in encoders:
            mine = (batch.encoder_index == encoders.index(stage.module)) & (assignment.encoder_microbatch >= 0)
            replica, microbatch = media_replica[mine], assignment.encoder_microbatch[mine]
            amounts = batch.patches[mine]
        sums = np.zeros((len(held), int(assignment.num_microbatches.max(initial=0))))
        np.add.at(sums, (replica, microbatch), amounts)
        largest = sums.max(axis=1, initial=0.0)
        per_unit = costs.layer_bytes(stage, plan.degrees)
        held[:, stage.rank] = np.maximum(held[:, stage.rank], per_unit * largest)
    return held


def peak_parts(
    costs: CostModel, plan: Plan, rank: int, moving: NDArray[np.float64], recomputed: float
) -> dict[str, float]:
    """What makes up the peak of a pipeline rank: bytes by name.

    Args:
        costs: of the model.
        plan: whose rank it is.
        rank: pipeline rank.
        moving: [parts] in the order of `PARTS`, from `parts_at_peak`.
        recomputed: of the rank, from `recomputed_bytes`.
    """
    return static_parts(costs, plan, rank) | moving_parts(moving, recomputed)


def static_parts(costs: CostModel, plan: Plan, rank: int) -> dict[str, float]:
    """What a pipeline rank holds all the time: bytes by name."""
    static = [costs.static_bytes(stage, plan.degrees, plan.num_shares) for stage in plan.stages if stage.rank == rank]
    return {name: sum(getattr(one, name) for one in static) for name in STATIC_PARTS}


def moving_parts(moving: NDArray[np.float64], recomputed: float) -> dict[str, float]:
    """The rest of `peak_parts`."""
    return dict(zip(PARTS, moving.tolist(), strict=True)) | {RECOMPUTED: recomputed}


def split_work(costs: CostModel, samples: SampleTable, plan: Plan) -> SampleWork:
    """What the replicas of a global batch are split by.

    Only means over a module's stages matter, so with one encoder each module is costed as one stage: a sixth of the
    price for a pipeline of twelve.
    """
    shape = replace(plan.pipeline_shape, patches_in_flight=None, tokens_in_flight=None)
    modules = costs.model.modules
    if len(modules) > 2 or len(plan.stages) == len(modules):
        return sample_work(costs.batch_costs(samples, plan), shape)
    whole = {stage.module: stage for stage in reversed(plan.stages)}
    merged = replace(
        plan,
        degrees=ParallelDegrees.of_modules(
            data=plan.degrees.data,
            ranks=(1,) * len(modules),
            tensor=tuple(plan.degrees.tensor_of(whole[module.name].rank) for module in modules),
            context=tuple(plan.degrees.context_of(whole[module.name].rank) for module in modules),
        ),
        stages=tuple(
            replace(whole[module.name], layers=(0, module.num_layers), rank=rank) for rank, module in enumerate(modules)
        ),
        patches_in_flight=None,
        tokens_in_flight=None,
    )
    work = sample_work(costs.batch_costs(samples, merged), merged.pipeline_shape)
    return replace(
        work,
        encoder_seconds=work.encoder_seconds / max(shape.num_encoder_stages, 1),
        llm_seconds=work.llm_seconds / shape.llm_stages,
    )


def heaviest_replicas(
    work: SampleWork, shape: PipelineShape, data: int, policy: str, count: int
) -> list[NDArray[np.int64]]:
    """Rows of the replicas of a global batch that may be the slowest, heaviest first.

    A replica takes about the work of its busiest stage and its largest sample's way through all stages.
    """
    replica = split_replicas(work, num_replicas=data, policy=policy)
    loads = np.array([np.bincount(replica, w, data) for w in (work.encoder_seconds, work.llm_seconds)])
    ways = np.zeros(data)
    way = work.encoder_seconds * shape.num_encoder_stages + work.llm_seconds * shape.llm_stages
    np.maximum.at(ways, replica, way)
    order = np.argsort(-(loads.max(axis=0) + ways), kind="stable")[:count]
    return [rows for index in order if len(rows := np.flatnonzero(replica == index))]
