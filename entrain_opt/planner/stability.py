"""How large a batch must be for one static plan to stay right: Algorithm 1 of the paper, judged on regret.

The paper doubles n until k = ceil(ln(1 - confidence) / ln(1 - error)) independent batches of n samples all give the
same proportional split of the ranks (k = 59 for 95 % and 5 %). Near a rounding border that never settles, although
either split is then nearly as good. So here a batch counts against n only if the plan's cut of the layers is slower on
it than the batch's own best cut by more than a tolerance (*regret*). Work is compared as a ratio of sums, which is what
a pipeline feels; a mean of ratios per sample converges to another number.

Promise: with k trials and no failure, a fresh batch of that size exceeds the tolerance with probability above `error`
only if something happened that has probability 1 - confidence. It holds for batches drawn independently from the data,
not for sorted or drifting order, and is about the cut of the layers, not about the degrees.
Price: k small dynamic programs per size, about 50 ms for 8 ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_opt.cost import CostModel
from entrain_opt.errors import PlanError
from entrain_opt.plan import Plan
from entrain_opt.planner.demand import sample_columns
from entrain_opt.planner.partition import partition_chain, segment_sums
from entrain_opt.planner.proportional import allocate_ranks
from entrain_opt.workload.samples import SampleTable

IntArray = NDArray[np.int64]
_TICKS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """The certificate of a plan.

    Attributes:
        batch_size: smallest size tried at which no trial exceeded the tolerance; None if none up to the largest.
        same_split_size: the same for the paper's criterion, equal proportional splits; None as above.
        num_ranks: pipeline ranks of the plan.
        worst_regret: largest regret of the trials at the plan's own global batch.
        global_batch_size: of the plan.
        trials: k.
        tolerance, confidence, error: as asked for.
    """

    batch_size: int | None
    same_split_size: int | None
    num_ranks: int
    worst_regret: float
    global_batch_size: int
    trials: int
    tolerance: float
    confidence: float
    error: float

    def sentence(self) -> str:
        """What it means, in words."""
        if self.num_ranks == 1:
            return "stability: every replica is one rank, so no batch could ask for another cut of the layers."
        worst = f"at worst {self.worst_regret:.1%} slower than a batch's own best cut"
        if self.batch_size is None or self.batch_size > self.global_batch_size:
            needed = f"at least {self.batch_size}" if self.batch_size is not None else "more than were tried"
            return (
                f"stability: in {self.trials} batches of {self.global_batch_size} the plan was {worst}; tolerated are "
                f"{self.tolerance:.0%}. A static plan needs {needed} samples per batch on this data."
            )
        return (
            f"stability: holds from batches of {self.batch_size} samples (yours: {self.global_batch_size}, {worst}): "
            f"with {self.confidence:.0%} confidence, fewer than {self.error:.0%} of random batches would run more than "
            f"{self.tolerance:.0%} faster with another cut of the layers."
        )


def num_trials(confidence: float, error: float) -> int:
    """Trials without failure that show, with this confidence, a failure probability of at most `error`."""
    if not 0 < confidence < 1 or not 0 < error < 1:
        raise PlanError(f"stability: expected confidence and error between 0 and 1, found {confidence} and {error}.")
    return math.ceil(math.log(1 - confidence) / math.log(1 - error))


def plan_stability(
    plan: Plan,
    samples: SampleTable,
    costs: CostModel,
    *,
    confidence: float = 0.95,
    error: float = 0.05,
    tolerance: float = 0.02,
    smallest: int = 16,
    seed: int = 0,
) -> Stability:
    """The certificate of a plan on a data set.

    Args:
        plan: of this model.
        samples: the data, from which batches are drawn with replacement.
        costs: of the model.
        confidence, error: of the statement.
        tolerance: regret that is still called right.
        smallest: first batch size; doubled up to the larger of 4,096 and the plan's global batch.
        seed: of the draws.

    Raises:
        PlanError: confidence or error is not between 0 and 1.
    """
    trials = num_trials(confidence, error)
    judge = _Judge(plan, samples, costs)
    generator = np.random.default_rng(seed)
    found: int | None = None
    same: int | None = None
    size, largest = smallest, max(4096, plan.global_batch_size)
    while size <= largest and (found is None or same is None):
        sums = judge.draw(generator, size, trials + 1)
        splits = {judge.split(row) for row in sums}
        if same is None and len(splits) == 1:
            same = size
        if found is None and all(judge.regret(row) <= tolerance for row in sums[1:]):
            found = size
        size *= 2
    own = judge.draw(np.random.default_rng(seed + 1), plan.global_batch_size, trials)
    return Stability(
        batch_size=found,
        same_split_size=same,
        num_ranks=judge.num_ranks,
        worst_regret=max(judge.regret(row) for row in own),
        global_batch_size=plan.global_batch_size,
        trials=trials,
        tolerance=tolerance,
        confidence=confidence,
        error=error,
    )


class _Judge:
    """Compares a plan's cut with the best one for a batch's sums."""

    def __init__(self, plan: Plan, samples: SampleTable, costs: CostModel) -> None:
        self.modules = costs.model.modules
        self.num_layers = [module.num_layers for module in self.modules]
        columns = sample_columns(samples, costs)
        names = [f"{module.name} {piece}" for module in self.modules for piece in ("input", "layer", "output")]
        self.values = np.stack([columns[name] for name in names], axis=1)
        self.num_ranks = plan.degrees.pipeline
        layers_of_rank = [0] * self.num_ranks
        for stage in plan.stages:
            layers_of_rank[stage.rank] += stage.num_layers
        self.ends = tuple(int(end) for end in np.cumsum(layers_of_rank))
        borders = np.cumsum(self.num_layers)[:-1]
        self.shares = any(start < border < end for border in borders for start, end in self._spans())
        self.borders = borders

    def _spans(self) -> list[tuple[int, int]]:
        return list(zip((0, *self.ends[:-1]), self.ends, strict=True))

    def draw(self, generator: np.random.Generator, size: int, count: int) -> NDArray[np.float64]:
        """[count, pieces] sums over random batches."""
        rows = generator.integers(len(self.values), size=(count, size))
        return np.stack([self.values[row].sum(axis=0) for row in rows])

    def split(self, sums: NDArray[np.float64]) -> tuple[int, ...]:
        """The paper's proportional split of the ranks."""
        if self.num_ranks < len(self.modules):
            return (self.num_ranks,)
        pieces = sums.reshape(-1, 3)
        work = [row[0] + count * row[1] + row[2] for row, count in zip(pieces, self.num_layers, strict=True)]
        return allocate_ranks(work, self.num_ranks, self.num_layers)

    def regret(self, sums: NDArray[np.float64]) -> float:
        """How much slower the plan's slowest rank is than that of the best cut of the same kind."""
        if self.num_ranks == 1:
            return 0.0
        pieces = sums.reshape(-1, 3)
        layers = np.repeat(pieces[:, 1], self.num_layers)
        starts = np.concatenate([[0], np.cumsum(self.num_layers)[:-1]])
        layers[starts] += pieces[:, 0]
        layers[starts + np.array(self.num_layers) - 1] += pieces[:, 2]
        if layers.sum() <= 0:
            return 0.0
        ticks = np.rint(layers * (_TICKS / layers.sum())).astype(np.int64)
        module_of_layer = np.repeat(np.arange(len(self.modules)), self.num_layers)
        segments = segment_sums(ticks, module_of_layer, np.zeros(len(self.modules), dtype=np.int64))
        mine = max(int(segments[i, j]) for i, j in self._spans())
        best = partition_chain(lambda _: segments, self.num_ranks)
        assert best is not None
        if not self.shares:
            fixed = (
                [
                    partition_chain(lambda _: segments, self.num_ranks, fixed_ends={rank: int(self.borders[-1])})
                    for rank in range(self.num_ranks - 1)
                ]
                if len(self.borders)
                else [best]
            )
            best = min((f for f in fixed if f is not None), key=lambda f: f.ticks, default=best)
        return mine / best.ticks - 1
