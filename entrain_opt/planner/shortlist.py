"""The choices worth a solver's time, and their ranking: a bound first, then exact partitions in its order.

1. Every layout's seconds are estimated for all its numbers of microbatches at once, with a bound that no partition of
   the layers can beat (`estimates.py`).
2. In the order of that bound, choices get their memory counted and their best partition found by dynamic programming,
   until the bound is above the best partition so far. What is left cannot be better: it is dropped, with this proof.
   Where memory stands in a choice's way, it is tried with the optimizer's state shared out over the replicas too, which
   takes as long and holds less; the twin is kept if its partition is faster.
3. The best few other kinds of layout are kept too, to be replayed.

Promise: the shortlist holds an optimum of the whole space. Price: 20 microseconds a layout and one dynamic program per
choice that is not dropped: mostly a few dozen, whatever the number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from entrain_opt.cost import CostModel
from entrain_opt.planner.demand import Demand
from entrain_opt.planner.estimates import Estimator, Layout, Seconds
from entrain_opt.planner.instance import Choice, Instance, PartTicks
from entrain_opt.planner.limits import memory_limit
from entrain_opt.planner.options import SEARCH, PlanOptions
from entrain_opt.planner.search import Ranked, best_partition, memory_binds
from entrain_opt.planner.space import allowed_layouts, microbatch_counts
from entrain_opt.units import MIB, seconds_to_ticks

#: The fastest choice takes about this many ticks: a resolution of 0.005 %, without large coefficients.
RESOLUTION_TICKS = 20_000
#: Other kinds of layout are kept if predicted to lose at most this share, one in any case, and at most so many.
WORTH_KEEPING, MOST_KINDS = 0.2, 6


def build_shortlist(
    costs: CostModel,
    demand: Demand,
    options: PlanOptions,
    *,
    one_in_flight: bool = False,
    everything: bool = False,
    tick_seconds: float | None = None,
) -> tuple[Instance, list[Ranked]]:
    """The problem without the choices that cannot win, and its feasible choices ranked, fastest first.

    Args:
        costs: of the model on the cluster.
        demand: of its global batches.
        options: which leave choices open.
        one_in_flight: count memory with one microbatch in flight only.
        everything: drop nothing and rank nothing.
        tick_seconds: of another instance, to be compared with it; None chooses.

    Returns:
        The instance, and its feasible choices with their best partitions; empty if nothing fits in memory.

    Raises:
        PlanError: the options leave no layout.
    """
    space = _Space(costs, demand, options, one_in_flight, tick_seconds)
    if everything:
        return space.instance(tuple(space.choice(*at) for at in space.positions())), []
    empty = space.instance(())
    ranking: list[Ranked] = []
    kinds: set[int] = set()
    kept: set[int] = set()
    best = np.inf
    for bound, layout, index in space.by_bound():
        in_ticks = bound / space.tick_seconds
        close = in_ticks <= (1 + WORTH_KEEPING) * best or len(kinds) < 2
        if in_ticks >= best and (not close or len(kinds) >= MOST_KINDS):
            break
        if in_ticks >= best and layout in kinds:
            continue
        found = best_partition(empty, space.choice(layout, index))
        twin = space.twins.get(layout)
        if twin is not None and (found is None or memory_binds(empty, found)):
            with_twin = best_partition(empty, space.choice(twin, index))
            if with_twin is not None and (found is None or with_twin.ticks < found.ticks):
                ranking.append(with_twin)
                kept.add(twin)
        if found is not None:
            ranking.append(found)
            kept.add(layout)
        if kept & {layout, twin}:
            kinds.add(layout)
            best = min(best, *(ranked.ticks for ranked in ranking[-2:]))
    ranking.sort(key=lambda ranked: ranked.ticks)
    # All numbers of microbatches of the kinds kept, so that neighbours can be tried.
    chosen = [at for at in space.positions() if not ranking or at[0] in kept]
    return space.instance(tuple(space.choice(*at) for at in chosen)), ranking


class _Space:
    """All layouts with their estimates; choices are completed when asked for, each once."""

    def __init__(
        self, costs: CostModel, demand: Demand, options: PlanOptions, one_in_flight: bool, tick_seconds: float | None
    ) -> None:
        self.costs, self.one_in_flight = costs, one_in_flight
        self.limit = memory_limit(costs, options.memory_bytes) // MIB
        self.estimator = Estimator(costs, demand)
        self.layouts: list[Layout] = allowed_layouts(costs, demand.global_batch_size, options)
        self.seconds: list[Seconds] = []
        for layout in self.layouts:
            samples = demand.global_batch_size // layout.degrees.data
            counts = np.array(microbatch_counts(samples, layout.degrees.pipeline, options))
            self.seconds.append(self.estimator.seconds(layout, counts))
        #: Layouts whose replicas could share out the optimizer's state, and where the one that does so stands.
        self.twins: dict[int, int] = {}
        if options.data_parallel == SEARCH:
            for at, layout in enumerate(list(self.layouts)):
                if layout.degrees.data > 1:
                    self.twins[at] = len(self.layouts)
                    self.layouts.append(replace(layout, sharded=True))
                    self.seconds.append(self.seconds[at])
        fastest = min(float(s.bound.min()) for s in self.seconds)
        self.tick_seconds = max(fastest, 1e-9) / RESOLUTION_TICKS if tick_seconds is None else tick_seconds
        self._choices: dict[tuple[int, int], Choice] = {}
        self._num_choices = sum(len(s.counts) for s in self.seconds)

    def by_bound(self) -> Iterator[tuple[float, int, int]]:
        """Bound, layout and position of the number of microbatches, smallest bound first; ties in order; no twins."""
        first = self.seconds[: len(self.seconds) - len(self.twins)]
        bounds = np.concatenate([s.bound for s in first])
        layouts = np.repeat(np.arange(len(first)), [len(s.counts) for s in first])
        positions = np.concatenate([np.arange(len(s.counts)) for s in first])
        for at in np.argsort(bounds, kind="stable").tolist():
            yield float(bounds[at]), int(layouts[at]), int(positions[at])

    def positions(self) -> list[tuple[int, int]]:
        """Every layout with every position of its numbers of microbatches."""
        return [(at, index) for at, seconds in enumerate(self.seconds) for index in range(len(seconds.counts))]

    def choice(self, layout: int, index: int) -> Choice:
        key = (layout, index)
        if key not in self._choices:
            item, seconds = self.layouts[layout], self.seconds[layout]
            count = int(seconds.counts[index])
            parts = [
                tuple(seconds_to_ticks(value, self.tick_seconds) for value in part)
                for part in seconds.parts[:, :, index].tolist()
            ]
            self._choices[key] = Choice(
                data=item.degrees.data,
                pipeline=item.degrees.pipeline,
                num_microbatches=count,
                shares=item.shares,
                constant_ticks=seconds_to_ticks(float(seconds.constant[index]), self.tick_seconds),
                ticks=PartTicks(layer=parts[0], first=parts[1], last=parts[2], stage=parts[3]),
                mib=self.estimator.mib(item, count, one_in_flight=self.one_in_flight),
                tensor=item.tensor if set(item.tensor) != {1} else (),
                context=item.context if set(item.context) != {1} else (),
                recompute=item.recompute if any(item.recompute) else (),
                ranks=item.ranks,
                sharded=item.sharded,
            )
        return self._choices[key]

    def instance(self, choices: tuple[Choice, ...]) -> Instance:
        modules = self.costs.model.modules
        return Instance(
            modules=tuple(module.name for module in modules),
            num_layers=tuple(module.num_layers for module in modules),
            choices=choices,
            limit_mib=self.limit,
            tick_seconds=self.tick_seconds,
            one_in_flight=self.one_in_flight,
            num_dropped=self._num_choices - len(choices),
        )
