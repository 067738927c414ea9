"""The planning problem in integers: choices, and what layers on ranks cost under each.

Seconds are ticks and bytes MiB, both rounded up, so that all solvers see the same problem in small integers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from entrain_opt.plan import ParallelDegrees, StagePlan
from entrain_opt.plan.shares import ALL_REDUCE, SHARDED
from entrain_opt.planner.partition import IMPOSSIBLE

IntArray = NDArray[np.int64]


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
        tensor: devices that share the layers of a pipeline rank, per module; empty for 1.
        context: parts that samples are divided into, per module; empty for 1.
        recompute: per module; empty for none.
        ranks: pipeline ranks of each module, where the choice fixes them (modules of different degrees); empty where
            the partition decides.
        sharded: whether replicas share out the optimizer's state.
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
    tensor: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    recompute: tuple[bool, ...] = ()
    ranks: tuple[int, ...] = ()
    sharded: bool = False

    @property
    def num_shares(self) -> int:
        """Replicas that share out the optimizer's state; 1 for none."""
        return self.data if self.sharded else 1

    @property
    def data_parallel(self) -> str:
        """As a plan says it."""
        return SHARDED if self.sharded else ALL_REDUCE

    @property
    def kind(self) -> tuple[object, ...]:
        """Everything but the number of microbatches."""
        return (self.data, self.pipeline, self.tensor, self.context, self.recompute, self.ranks, self.sharded)

    @property
    def degrees(self) -> ParallelDegrees:
        """The mesh."""
        ranks = self.ranks or (self.pipeline,)
        tensor, context = self.tensor or (1,) * len(ranks), self.context or (1,) * len(ranks)
        return ParallelDegrees.of_modules(data=self.data, ranks=ranks, tensor=tensor, context=context)

    @property
    def degree_words(self) -> str:
        """`, tensor=2/1, context=1/2`: degrees above 1, in the order of the modules."""
        kinds = (("tensor", self.tensor), ("context", self.context))
        return "".join(f", {name}={'/'.join(map(str, degrees))}" for name, degrees in kinds if degrees)

    def widths(self, num_modules: int) -> tuple[int, ...]:
        """Devices of a pipeline rank, per module."""
        tensor, context = self.tensor or (1,) * num_modules, self.context or (1,) * num_modules
        return tuple(t * c for t, c in zip(tensor, context, strict=True))

    def borders(self, module_starts: tuple[int, ...]) -> dict[int, int]:
        """Rank -> chain position where it must end, for the modules' fixed numbers of ranks."""
        if not self.ranks:
            return {}
        last = np.cumsum(self.ranks)[:-1] - 1
        return {int(rank): start for rank, start in zip(last, module_starts[1:], strict=True)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """All modules' layers in a row, n of them: what every sum over segments of it needs.

    Attributes:
        starts: position of each module's first layer.
        last_layers: [modules] position of its last.
        module_of_layer: [n].
        overlaps: [modules, n + 1, n + 1] 1 where layers i to j - 1 have some of the module's.
        shared: [n + 1, n + 1] whether they have some of two modules.
        empty: [n + 1, n + 1] whether there are none.
    """

    starts: tuple[int, ...]
    last_layers: IntArray
    module_of_layer: IntArray
    overlaps: IntArray
    shared: NDArray[np.bool_]
    empty: NDArray[np.bool_]

    @classmethod
    def of(cls, num_layers: tuple[int, ...]) -> Chain:
        counts = np.array(num_layers)
        ends = np.cumsum(counts)
        starts = ends - counts
        position = np.arange(int(ends[-1]) + 1)
        first, end = position[:, None], position[None, :]
        overlaps = np.stack([(first < e) & (end > s) & (end > first) for s, e in zip(starts, ends, strict=True)])
        return cls(
            starts=tuple(starts.tolist()),
            last_layers=ends - 1,
            module_of_layer=np.repeat(np.arange(len(counts)), counts),
            overlaps=overlaps.astype(np.int64),
            shared=overlaps.sum(axis=0) > 1,
            empty=end <= first,
        )


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
        num_dropped: choices left out, which do not fit or cannot be faster than the best of these.
    """

    modules: tuple[str, ...]
    num_layers: tuple[int, ...]
    choices: tuple[Choice, ...]
    limit_mib: int
    tick_seconds: float
    one_in_flight: bool = False
    num_dropped: int = 0

    _chain: Chain = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_chain", Chain.of(self.num_layers))

    @property
    def chain_length(self) -> int:
        return len(self._chain.module_of_layer)

    @property
    def module_starts(self) -> tuple[int, ...]:
        """Chain position of the first layer of each module."""
        return self._chain.starts

    def segments(self, part: PartTicks) -> IntArray:
        """[n + 1, n + 1] cost of chain layers i to j - 1 on one rank."""
        chain = self._chain
        layers = np.array(part.layer, dtype=np.int64)[chain.module_of_layer]
        layers[list(chain.starts)] += np.array(part.first, dtype=np.int64)
        layers[chain.last_layers] += np.array(part.last, dtype=np.int64)
        prefix = np.concatenate([[0], np.cumsum(layers)])
        sums = prefix[None, :] - prefix[:, None]
        for overlaps, ticks in zip(chain.overlaps, part.stage, strict=True):
            if ticks:
                sums += overlaps * ticks
        sums[chain.empty] = IMPOSSIBLE
        return sums

    def apart(self, costs: IntArray) -> IntArray:
        """[n + 1, n + 1] `costs`, with IMPOSSIBLE where a rank would hold layers of two modules."""
        return np.where(self._chain.shared, IMPOSSIBLE, costs)

    def all_rank_costs(self, choice: Choice, seconds: IntArray, *, shares: bool) -> list[IntArray]:
        """Per rank `seconds`, with IMPOSSIBLE where it would be out of memory or share modules that it may not."""
        if not shares:
            seconds = self.apart(seconds)
        costs: dict[PartTicks, IntArray] = {}
        for part in choice.mib:
            if part not in costs:
                costs[part] = np.where(self.segments(part) <= self.limit_mib, seconds, IMPOSSIBLE)
        return [costs[part] for part in choice.mib]

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

    def stages(self, ends: tuple[int, ...], choice: Choice | None = None) -> tuple[StagePlan, ...]:
        """The stages of a partition of the chain, with the choice's recompute."""
        stages = []
        recomputes = (choice.recompute if choice else ()) or (False,) * len(self.modules)
        for module, start, count, recompute in zip(
            self.modules, self.module_starts, self.num_layers, recomputes, strict=True
        ):
            for rank, (i, j) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
                first, end = max(i, start), min(j, start + count)
                if first < end:
                    layers = (first - start, end - start)
                    stages.append(StagePlan(module=module, layers=layers, rank=rank, recompute=recompute))
        return tuple(stages)
