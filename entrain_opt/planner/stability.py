"""How large a batch must be for one static plan to stay right: Algorithm 1 of the paper, judged on regret.

The paper doubles n until k = ceil(ln(1 - confidence) / ln(1 - error)) independent batches of n samples all give the
same proportional split of the ranks (k = 59 for 95 % and 5 %). Near a rounding border that never settles, although
either split is then nearly as good. So here a batch counts against n only if another cut of the layers would gain more
on it than on the data as a whole, by more than a tolerance (*regret*). Work is compared as a ratio of sums, which is
what a pipeline feels; a mean of ratios per sample converges to another number.

The regret on the data as a whole is subtracted because the plan was chosen by simulation, which may prefer a cut whose
slowest rank is a little slower. Promise: with k trials and no failure, a fresh batch of that size exceeds the tolerance
with probability above `error` only if something happened that has probability 1 - confidence. It holds for batches
drawn independently from the data, not for sorted or drifting order (`order.py`), and is about the cut of the layers,
not about the degrees. Price: a few ms per size for 8 ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from entrain_opt.cost import CostModel
from entrain_opt.errors import PlanError
from entrain_opt.plan import Plan
from entrain_opt.planner.cuts import Cuts
from entrain_opt.planner.demand import module_seconds, work_shares
from entrain_opt.planner.order import Order, find_order
from entrain_opt.workload.samples import SampleTable

#: Batch sizes whose splits are listed, as in the paper's table 2.
LISTED_SIZES = (1, 4, 16, 64, 256)
#: The paper's criterion may never settle; regret always does in the end.
_LARGEST_SAME_SPLIT, _LARGEST = 4096, 65536


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """The certificate of a plan.

    Attributes:
        batch_size: smallest size tried at which no trial exceeded the tolerance; None if none up to the largest.
        largest_size: largest size tried.
        same_split_size: the same for the paper's criterion, equal proportional splits; None as above.
        num_ranks: pipeline ranks of the plan.
        worst_regret: largest regret of the trials at the plan's own global batch, above that on all data.
        data_regret: regret on the data as a whole.
        global_batch_size: of the plan.
        trials: k.
        tolerance, confidence, error: as asked for.
        splits: size -> ranks of the modules ("5:3") -> trials of that size in which the paper's rule gives them.
        order: of the data in its file; None if there is too little to tell.
        work_shares: module -> its share of the work of all data, from which `drift.py` tells drift.
    """

    batch_size: int | None
    largest_size: int
    same_split_size: int | None
    num_ranks: int
    worst_regret: float
    global_batch_size: int
    trials: int
    tolerance: float
    confidence: float
    error: float
    data_regret: float = 0.0
    splits: dict[int, dict[str, int]]
    order: Order | None = None
    work_shares: dict[str, float] = field(default_factory=dict)

    def sentence(self) -> str:
        """What it means, in words."""
        order = "" if self.order is None or self.order.is_random else f"\n{self.order.sentence()}"
        return self._statement() + order

    def _statement(self) -> str:
        if self.num_ranks == 1:
            return "stability: every replica is one rank, so no batch could ask for another cut of the layers."
        worst = f"at worst {self.worst_regret:.1%} slower than a batch's own best cut"
        beyond = ""
        if self.data_regret > 0.005:
            beyond = f" than all data would ({self.data_regret:.1%}, which memory or the simulation decided against)"
        if self.batch_size is None or self.batch_size > self.global_batch_size:
            needed = f"more than {self.largest_size:,}" if self.batch_size is None else f"at least {self.batch_size:,}"
            return (
                f"stability: in {self.trials} batches of {self.global_batch_size} the plan was {worst}; tolerated are "
                f"{self.tolerance:.0%}. A static plan needs {needed} samples per batch on this data."
            )
        return (
            f"stability: holds from batches of {self.batch_size} samples (yours: {self.global_batch_size}, {worst}): "
            f"with {self.confidence:.0%} confidence, fewer than {self.error:.0%} of random batches would run more than "
            f"{self.tolerance:.0%} faster with another cut of the layers{beyond}."
        )

    def split_lines(self, encoders: tuple[str, ...]) -> list[str]:
        """The paper's split of the ranks in trials of each size, most frequent first: its table 2."""
        if self.num_ranks < 2 or not encoders:
            return []
        lines = [
            f"proportional split {':'.join(encoders)}:llm of {self.num_ranks} ranks in {self.trials} batches each:"
        ]
        for size, counts in self.splits.items():
            shown = ", ".join(f"{split} {count}x" for split, count in list(counts.items())[:6])
            rest = len(counts) - 6
            lines.append(f"  {size:>4} samples: {shown}" + (f" and {rest} more" if rest > 0 else ""))
        return lines

    def as_plain(self) -> dict[str, Any]:
        """For the plan file."""
        plain: dict[str, Any] = {
            "statement": self._statement(),
            "b_min": self.batch_size,
            "b_min_same_split": self.same_split_size,
            "worst_regret": round(self.worst_regret, 6),
            "regret_on_all_data": round(self.data_regret, 6),
            "trials": self.trials,
            "tolerance": self.tolerance,
            "confidence": self.confidence,
            "error": self.error,
            "splits": {str(size): counts for size, counts in self.splits.items()},
            "work_shares": {name: round(share, 6) for name, share in self.work_shares.items()},
        }
        if self.order is not None:
            plain["order"] = {
                "is_random": self.order.is_random,
                "spread": round(self.order.spread, 3),
                "statement": self.order.sentence(),
            }
        return plain


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
        samples: the data, from which batches are drawn with replacement; its order is judged as it is.
        costs: of the model.
        confidence, error: of the statement.
        tolerance: regret that is still called right.
        smallest: first batch size; doubled up to 65,536.
        seed: of the draws.

    Raises:
        PlanError: confidence or error is not between 0 and 1.
    """
    trials = num_trials(confidence, error)
    cuts = Cuts(plan, samples, costs)
    generator = np.random.default_rng(seed)
    on_all = float(cuts.regrets(cuts.values.sum(axis=0, keepdims=True))[0])
    found: int | None = None
    same: int | None = None
    size = smallest
    largest = smallest
    while size <= _LARGEST and (found is None or (same is None and size <= _LARGEST_SAME_SPLIT)):
        sums = cuts.draw(generator, size, trials + 1)
        if same is None and size <= _LARGEST_SAME_SPLIT and len(set(cuts.splits(sums))) == 1:
            same = size
        if found is None and bool((cuts.regrets(sums[1:]) - on_all <= tolerance).all()):
            found = size
        largest, size = size, 2 * size
    names = [module.name for module in costs.model.modules]
    own = cuts.draw(np.random.default_rng(seed + 1), plan.global_batch_size, trials)
    return Stability(
        batch_size=found,
        largest_size=largest,
        same_split_size=same,
        num_ranks=cuts.num_ranks,
        worst_regret=max(float(cuts.regrets(own).max()) - on_all, 0.0),
        data_regret=on_all,
        global_batch_size=plan.global_batch_size,
        trials=trials,
        tolerance=tolerance,
        confidence=confidence,
        error=error,
        splits=split_counts(cuts, trials, seed=seed + 2),
        order=find_order(cuts.module_seconds(cuts.values), seed=seed),
        work_shares=dict(zip(names, work_shares(module_seconds(samples, costs)).tolist(), strict=True)),
    )


def split_counts(cuts: Cuts, trials: int, *, seed: int) -> dict[int, dict[str, int]]:
    """Batch size -> split ("encoder:llm" ranks) -> trials, most frequent first."""
    counts: dict[int, dict[str, int]] = {}
    for size in LISTED_SIZES:
        splits = cuts.splits(cuts.draw(np.random.default_rng(seed + size), size, trials))
        found = Counter(":".join(map(str, split)) for split in splits)
        counts[size] = dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
    return counts
