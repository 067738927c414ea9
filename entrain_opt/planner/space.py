"""The planning problem in integers: every choice of degrees and microbatches, and what layers on ranks then cost.

Predicted iteration seconds of a choice (data degree d, pipeline degree p = devices / d, K microbatches):

    U + max over ranks of [(K - 1) * (the rank's seconds per mean microbatch) + its reduction + its optimizer step]

U is one pass, forward and backward, of the *largest* microbatch through all stages (a microbatch is never smaller than
the largest sample), with every stage's fixed part and 2 (p - 1) messages of the slowest kind. With equal microbatches
this is the paper's T = sum of all stages + (K - 1) * slowest stage, plus what the paper leaves out. More microbatches
shorten U and pay the fixed parts more often, so K has an optimum.

Memory of a rank: what its layers hold all the time, the activations of the microbatches in flight (largest first, the
rest of mean size; as many as stages follow in 1F1B), logits of the largest microbatch and messages.

Seconds become ticks and bytes MiB, both rounded up, so that all solvers see the same problem in small integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_opt.cost import CostModel, memory
from entrain_opt.errors import PlanError
from entrain_opt.plan import ParallelDegrees, StagePlan
from entrain_opt.planner.demand import Demand, ModuleDemand
from entrain_opt.planner.options import PlanOptions
from entrain_opt.planner.partition import IMPOSSIBLE, segment_sums
from entrain_opt.spec.model import ModuleSpec
from entrain_opt.units import bytes_to_mib, seconds_to_ticks

IntArray = NDArray[np.int64]

#: The fastest choice takes about this many ticks: a resolution of 0.005 %, without large coefficients.
RESOLUTION_TICKS = 20_000
#: Samples of a microbatch in the paper's evaluation, for its method.
PAPER_MICROBATCH_SIZE = 4
ORDERS_WITHOUT_SHARING = ("1f1b", "interleaved")
_MULTIPLES = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTicks:
    """Per module: what one layer, the first layer besides, the last layer besides, and every stage adds to a rank."""

    layer: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    stage: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Degrees and microbatches, and what layers cost under them.

    Attributes:
        data, pipeline, num_microbatches: the choice.
        shares: whether a rank may hold layers of two modules.
        constant_ticks: U.
        ticks: what the slowest rank is judged by.
        mib: per rank, what it holds.
    """

    data: int
    pipeline: int
    num_microbatches: int
    shares: bool
    constant_ticks: int
    ticks: PartTicks
    mib: tuple[PartTicks, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One planning problem.

    Attributes:
        modules: names, in chain order.
        num_layers: of each module.
        choices: all of them.
        limit_mib: memory of one rank.
        tick_seconds: seconds of one tick.
        one_in_flight: memory was counted with one microbatch in flight only; the schedule must be throttled.
    """

    modules: tuple[str, ...]
    num_layers: tuple[int, ...]
    choices: tuple[Choice, ...]
    limit_mib: int
    tick_seconds: float
    one_in_flight: bool = False

    @property
    def chain_length(self) -> int:
        return sum(self.num_layers)

    @property
    def module_starts(self) -> tuple[int, ...]:
        """Chain position of the first layer of each module."""
        return tuple(int(start) for start in np.concatenate([[0], np.cumsum(self.num_layers)[:-1]]))

    def segments(self, part: PartTicks) -> IntArray:
        """[n + 1, n + 1] cost of chain layers i to j - 1 on one rank."""
        layers = np.repeat(np.array(part.layer, dtype=np.int64), self.num_layers)
        starts = np.array(self.module_starts)
        layers[starts] += np.array(part.first, dtype=np.int64)
        layers[starts + np.array(self.num_layers) - 1] += np.array(part.last, dtype=np.int64)
        module_of_layer = np.repeat(np.arange(len(self.num_layers)), self.num_layers)
        return segment_sums(layers, module_of_layer, np.array(part.stage, dtype=np.int64))

    def rank_costs(self, choice: Choice, rank: int, seconds: IntArray, *, shares: bool) -> IntArray:
        """`seconds`, with IMPOSSIBLE where the rank would be out of memory or share modules that it may not."""
        allowed = self.segments(choice.mib[rank]) <= self.limit_mib
        if not shares:
            position = np.arange(self.chain_length + 1)
            for border in self.module_starts[1:]:
                allowed &= (position[:, None] >= border) | (position[None, :] <= border)
        return np.where(allowed, seconds, IMPOSSIBLE)

    def objective_ticks(self, choice: Choice, ends: tuple[int, ...]) -> int:
        """Predicted ticks of a partition."""
        costs, starts = self.segments(choice.ticks), (0, *ends[:-1])
        return choice.constant_ticks + max(int(costs[i, j]) for i, j in zip(starts, ends, strict=True))

    def memory_mib(self, choice: Choice, ends: tuple[int, ...]) -> list[int]:
        """MiB of every rank of a partition."""
        starts = (0, *ends[:-1])
        return [
            int(self.segments(choice.mib[rank])[i, j]) for rank, (i, j) in enumerate(zip(starts, ends, strict=True))
        ]

    def stages(self, ends: tuple[int, ...]) -> tuple[StagePlan, ...]:
        """The stages of a partition of the chain."""
        stages = []
        for module, start, count in zip(self.modules, self.module_starts, self.num_layers, strict=True):
            for rank, (i, j) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
                first, end = max(i, start), min(j, start + count)
                if first < end:
                    stages.append(StagePlan(module=module, layers=(first - start, end - start), rank=rank))
        return tuple(stages)


def build_instance(costs: CostModel, demand: Demand, options: PlanOptions, *, one_in_flight: bool = False) -> Instance:
    """All choices that the options leave open.

    Raises:
        PlanError: the options leave none.
    """
    limit = options.memory_bytes or costs.cluster.memory_limit_bytes
    pairs = allowed_degrees(costs, demand.global_batch_size, options)
    raw = [
        (degrees, count, *_seconds(costs, demand, degrees, count))
        for degrees in pairs
        for count in microbatch_counts(demand.global_batch_size // degrees.data, degrees.pipeline, options)
    ]
    modules = costs.model.modules
    layer_counts = np.array([module.num_layers for module in modules])
    estimates = [
        constant + float((layer_counts * parts[0]).sum() + sum(parts[1]) + sum(parts[2])) / degrees.pipeline
        for degrees, _, constant, parts in raw
    ]
    tick_seconds = max(min(estimates), 1e-9) / RESOLUTION_TICKS
    choices = []
    for degrees, count, constant, parts in raw:
        ticks = [tuple(seconds_to_ticks(float(value), tick_seconds) for value in part) for part in parts]
        choices.append(
            Choice(
                data=degrees.data,
                pipeline=degrees.pipeline,
                num_microbatches=count,
                shares=may_share(degrees.pipeline, len(modules), options.schedule),
                constant_ticks=seconds_to_ticks(constant, tick_seconds),
                ticks=PartTicks(layer=ticks[0], first=ticks[1], last=ticks[2], stage=ticks[3]),
                mib=tuple(
                    _memory(costs, demand, degrees, count, 1 if one_in_flight else None, rank)
                    for rank in range(degrees.pipeline)
                ),
            )
        )
    return Instance(
        modules=tuple(module.name for module in modules),
        num_layers=tuple(module.num_layers for module in modules),
        choices=tuple(choices),
        limit_mib=int(limit) >> 20,
        tick_seconds=tick_seconds,
        one_in_flight=one_in_flight,
    )


def allowed_degrees(costs: CostModel, global_batch_size: int, options: PlanOptions) -> list[ParallelDegrees]:
    """Every pair of degrees that uses all devices, gives every replica a sample and every rank a layer."""
    devices, layers = costs.cluster.num_devices, sum(module.num_layers for module in costs.model.modules)
    pairs = [
        ParallelDegrees(data=data, pipeline=devices // data) for data in range(1, devices + 1) if devices % data == 0
    ]
    found = [
        pair
        for pair in pairs
        if pair.pipeline <= layers
        and pair.data <= global_batch_size
        and options.data_degree in (None, pair.data)
        and options.pipeline_degree in (None, pair.pipeline)
    ]
    if not found:
        raise PlanError(
            f"degrees: no data degree * pipeline degree = {devices} devices with at most {layers} pipeline ranks "
            f"(layers of {costs.model.name}) and at most {global_batch_size} replicas (samples of a global batch)"
            + "".join(
                f", {name} = {value}"
                for name, value in (
                    ("data_degree", options.data_degree),
                    ("pipeline_degree", options.pipeline_degree),
                )
                if value is not None
            )
            + f". Possible pairs (data, pipeline): {[(pair.data, pair.pipeline) for pair in pairs]}."
        )
    return found


def microbatch_counts(samples_of_replica: int, pipeline: int, options: PlanOptions) -> list[int]:
    """Numbers of microbatches worth trying: up to a sample each, mostly multiples of the pipeline's ranks."""
    most = max(samples_of_replica, 1)
    if options.num_microbatches is not None:
        return [options.num_microbatches]
    if options.method == "proportional":
        return [max(most // PAPER_MICROBATCH_SIZE, 1)]
    counts = {1, 2, 4, 8, *(pipeline * multiple for multiple in _MULTIPLES)}
    if most <= pipeline * _MULTIPLES[-1]:
        counts.add(most)
    return sorted(count for count in counts if count <= most)


def may_share(pipeline: int, num_modules: int, schedule: str) -> bool:
    """Whether a rank may hold the end of one module and the beginning of the next.

    With fewer ranks than modules it must. The orders of `ORDERS_WITHOUT_SHARING` count every action as equally long, so
    a rank with two short stages looks twice as slow to them: up to 1.7 times the ideal makespan from three ranks on.
    """
    return pipeline <= max(num_modules - 1, 2) or schedule not in ORDERS_WITHOUT_SHARING


Parts = tuple[list[float], list[float], list[float], list[float]]


def _seconds(costs: CostModel, demand: Demand, degrees: ParallelDegrees, count: int) -> tuple[float, Parts]:
    """U, and per module the seconds of (layer, first, last, stage) that the slowest rank is judged by."""
    constant = 0.0
    parts: Parts = ([], [], [], [])
    for module, load in zip(costs.model.modules, demand.modules, strict=True):
        layer_fixed, first_fixed, last_fixed, stage_fixed = _fixed_seconds(costs, module)
        updates = [
            _update_seconds(costs, degrees, parameters)
            for parameters in (
                module.layer_parameters * module.trained,
                module.input_parameters * module.trained,
                module.output_parameters * module.output_trained,
            )
        ]
        for index, (one, fixed, update) in enumerate(
            zip((load.layer, load.input, load.output), (layer_fixed, first_fixed, last_fixed), updates, strict=True)
        ):
            mean = one.of_microbatch(degrees.data, count) + fixed
            parts[index].append((count - 1) * mean + update)
            times = module.num_layers if index == 0 else 1
            constant += times * (one.of_largest_microbatch(degrees.data, count) + fixed)
        parts[3].append((count - 1) * stage_fixed)
        constant += stage_fixed
    num_links = degrees.pipeline - 1
    constant += max(num_links - len(costs.model.modules) + 1, 0) * max(
        _fixed_seconds(costs, m)[3] for m in costs.model.modules
    )
    if num_links:
        widest = max(_message_bytes(costs, module, load, degrees, count) for module, load in _pairs(costs, demand))
        constant += 2 * num_links * (costs.links.latency_seconds + widest / costs.links.neighbours(degrees))
    constant += 2 * (degrees.data - 1) * costs.links.latency_seconds
    return constant, parts


def _pairs(costs: CostModel, demand: Demand) -> list[tuple[ModuleSpec, ModuleDemand]]:
    return list(zip(costs.model.modules, demand.modules, strict=True))


def _fixed_seconds(costs: CostModel, module: ModuleSpec) -> tuple[float, float, float, float]:
    """Forward plus backward fixed seconds of one layer, of the first and last piece, and of each stage's action."""
    last = module.num_layers
    lines = [costs.stage_lines(module, (0, last), backward=backward) for backward in (False, True)]
    first, layer, output = (sum(pair[index].fixed_seconds for pair in lines) for index in range(3))
    actions = 1 + costs.has_backward(module, (0, last))
    return layer / last, first, output, actions * costs.action_seconds


def _update_seconds(costs: CostModel, degrees: ParallelDegrees, trained_parameters: float) -> float:
    """Reduction (without latency) and optimizer step of some parameters."""
    latency = 2 * (degrees.data - 1) * costs.links.latency_seconds
    num_bytes = trained_parameters * costs.precision.gradient_bytes
    reduction = max(costs.links.all_reduce_seconds(degrees, num_bytes) - latency, 0.0)
    return reduction + trained_parameters * costs.step_seconds_per_parameter


def _message_bytes(
    costs: CostModel, module: ModuleSpec, load: ModuleDemand, degrees: ParallelDegrees, count: int
) -> float:
    width = costs.precision.weight_bytes
    inside = load.amount.of_microbatch(degrees.data, count) * module.hidden_size * width
    if module.vocabulary_size:
        return inside
    return max(inside, load.outputs.of_microbatch(degrees.data, count) * costs.model.llm.hidden_size * width)


def _memory(
    costs: CostModel, demand: Demand, degrees: ParallelDegrees, count: int, in_flight: int | None, rank: int
) -> PartTicks:
    """MiB that layers of each module take on one rank."""
    model, precision = costs.model, costs.precision
    columns: list[list[int]] = [[], [], [], []]
    for module, load in _pairs(costs, demand):
        is_llm = bool(module.vocabulary_size)
        trains = costs.has_backward(module, (0, module.num_layers - 1)) if module.num_layers > 1 else module.trained
        trains = trains or is_llm
        depth = min(count, in_flight or degrees.pipeline - rank + (0 if is_llm else 1))
        largest = load.amount.of_largest_microbatch(degrees.data, count)
        mean = load.amount.of_microbatch(degrees.data, count)
        held = min(largest + (depth - 1) * mean, max(load.amount.total / degrees.data, largest))
        reduced = degrees.data > 1

        def static(parameters: int, trained: bool, reduced: bool = reduced) -> float:
            return memory.parameter_bytes(parameters, trained=trained, precision=precision, reduced=reduced).total

        per_layer = memory.layer_activation_bytes(module, precision)
        layer = static(module.layer_parameters, module.trained) + (per_layer * held if trains else 0.0)
        first = static(module.input_parameters, module.trained)
        first += memory.input_activation_bytes(module, precision) * (held if trains else largest)
        outputs = load.outputs.of_largest_microbatch(degrees.data, count)
        last = static(module.output_parameters, module.output_trained)
        if is_llm:
            per_label = memory.logit_bytes(module, precision) + memory.output_activation_bytes(
                module, module, precision
            )
            last += per_label * outputs
            if model.tied_embeddings and degrees.pipeline > 1:
                last += static(module.input_parameters, module.trained)
        else:
            ratio = outputs / largest if largest else 0.0
            last += memory.output_activation_bytes(module, model.llm, precision) * held * ratio
        message = _message_bytes(costs, module, load, degrees, count) if degrees.pipeline > 1 else 0.0
        stage = 2 * message + (0.0 if trains else per_layer * largest)
        for column, value in zip(columns, (layer, first, last, stage), strict=True):
            column.append(bytes_to_mib(value))
    return PartTicks(layer=tuple(columns[0]), first=tuple(columns[1]), last=tuple(columns[2]), stage=tuple(columns[3]))
