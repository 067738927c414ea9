"""Many batches at once: how much slower a plan's cut of the layers is on each than the batch's own best cut.

The paper's dynamic program F(l, p), for all trials in one array operation per rank: float prefix sums instead of
integer segments, values only. Price: a millisecond per rank for 60 trials of 60 layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from entrain_opt.cost import CostModel
from entrain_opt.plan import Plan
from entrain_opt.planner.demand import PIECES, sample_columns
from entrain_opt.planner.proportional import allocate_ranks
from entrain_opt.workload.samples import SampleTable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def fastest_slowest(prefix: FloatArray, most_ranks: int) -> FloatArray:
    """[most_ranks + 1, trials] seconds of the slowest rank where a chain of layers is cut as well as can be.

    Args:
        prefix: [trials, n + 1] prefix sums of the layers' seconds.
        most_ranks: ranks; infinite where there are more ranks than layers, and for none.
    """
    num_layers = prefix.shape[1] - 1
    found = np.full((most_ranks + 1, len(prefix)), np.inf)
    segments = prefix[:, None, :] - prefix[:, :, None]
    segments = np.where(np.tri(num_layers + 1, dtype=bool), np.inf, segments)
    slowest = segments[:, 0, :]
    for ranks in range(1, min(most_ranks, num_layers) + 1):
        if ranks > 1:
            slowest = np.maximum(slowest[:, :, None], segments).min(axis=1)
        found[ranks] = slowest[:, -1]
    return found


class Cuts:
    """A plan's cut, judged on batches of a data set."""

    def __init__(self, plan: Plan, samples: SampleTable, costs: CostModel) -> None:
        self.modules = costs.model.modules
        self.num_layers = [module.num_layers for module in self.modules]
        self.num_ranks = plan.degrees.pipeline
        first = {stage.module: stage for stage in reversed(plan.stages)}
        columns = []
        for module in self.modules:
            stage = first[module.name]
            tensor, context = plan.degrees.tensor_of(stage.rank), plan.degrees.context_of(stage.rank)
            found = sample_columns(samples, costs, tensor=tensor, context=context, recompute=stage.recompute)
            columns += [found[f"{module.name} {piece}"] for piece in PIECES]
        #: [N, 3 * modules] seconds of each sample: embedding, one layer, and projector or head of every module.
        self.values = np.stack(columns, axis=1)
        starts = dict(zip([m.name for m in self.modules], np.cumsum([0, *self.num_layers[:-1]]), strict=True))
        #: [stages, 2] positions of each stage in the chain of all modules' layers, and [stages, ranks] where it lies.
        self.positions = np.array([starts[stage.module] + np.array(stage.layers) for stage in plan.stages])
        self.on_rank = np.zeros((len(plan.stages), self.num_ranks))
        ranks_of: dict[str, set[int]] = {}
        for index, stage in enumerate(plan.stages):
            self.on_rank[index, stage.rank] = 1.0
            ranks_of.setdefault(stage.module, set()).add(stage.rank)
        self.ranks = [len(ranks_of[module.name]) for module in self.modules]
        self.shares = sum(self.ranks) > self.num_ranks
        #: Modules of different degrees keep their ranks: another number would need other devices.
        self.fixed_ranks = not (isinstance(plan.degrees.tensor, int) and isinstance(plan.degrees.context, int))

    def draw(self, generator: np.random.Generator, size: int, count: int) -> FloatArray:
        """[count, 3 * modules] sums over random batches."""
        num_samples = len(self.values)
        # How often each sample is in a batch; a batch at a time, so that little memory is touched.
        times = [np.bincount(generator.integers(num_samples, size=size), minlength=num_samples) for _ in range(count)]
        return np.asarray(np.stack(times) @ self.values)

    def module_seconds(self, sums: FloatArray) -> FloatArray:
        """[trials, modules] seconds of whole modules."""
        pieces = sums.reshape(len(sums), -1, 3)
        return pieces[:, :, 0] + np.array(self.num_layers) * pieces[:, :, 1] + pieces[:, :, 2]

    def splits(self, sums: FloatArray) -> list[tuple[int, ...]]:
        """The paper's proportional split of the ranks over the modules, per trial."""
        if self.num_ranks < len(self.modules):
            return [(self.num_ranks,)] * len(sums)
        return [allocate_ranks(work, self.num_ranks, self.num_layers) for work in self.module_seconds(sums)]

    def regrets(self, sums: FloatArray) -> FloatArray:
        """[trials] how much slower the plan's slowest rank is than that of the best cut of its kind, as a share.

        A cut gives every rank neighbouring layers. A plan need not, and may be a little faster: below 0.
        """
        if self.num_ranks == 1:
            return np.zeros(len(sums))
        chains = [self._layers(sums, index) for index in range(len(self.modules))]
        prefix = _prefix(np.concatenate(chains, axis=1))
        stages = prefix[:, self.positions[:, 1]] - prefix[:, self.positions[:, 0]]
        mine = (stages @ self.on_rank).max(axis=1)
        if self.shares:
            best = fastest_slowest(prefix, self.num_ranks)[self.num_ranks]
        else:
            best = self._apart([_prefix(chain) for chain in chains])
        return np.divide(mine, best, out=np.ones(len(sums)), where=best > 0) - 1

    def _layers(self, sums: FloatArray, module: int) -> FloatArray:
        """[trials, layers] seconds of each layer of a module, embedding and head with the first and last."""
        pieces = sums.reshape(len(sums), -1, 3)[:, module]
        layers = np.repeat(pieces[:, 1:2], self.num_layers[module], axis=1)
        layers[:, 0] += pieces[:, 0]
        layers[:, -1] += pieces[:, 2]
        return layers

    def _apart(self, prefixes: Sequence[FloatArray]) -> FloatArray:
        """[trials] the best cut in which no rank holds layers of two modules."""
        tables = [fastest_slowest(prefix, self.num_ranks) for prefix in prefixes]
        if self.fixed_ranks:
            return np.max([table[ranks] for table, ranks in zip(tables, self.ranks, strict=True)], axis=0)
        best = tables[0]
        for table in tables[1:]:
            joined = np.full_like(best, np.inf)
            for ranks in range(2, self.num_ranks + 1):
                options = [np.maximum(best[ranks - own], table[own]) for own in range(1, ranks)]
                joined[ranks] = np.min(options, axis=0)
            best = joined
        return np.asarray(best[self.num_ranks])


def _prefix(layers: FloatArray) -> FloatArray:
    return np.concatenate([np.zeros((len(layers), 1)), np.cumsum(layers, axis=1)], axis=1)
