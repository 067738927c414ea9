"""Whether a data set is in random order, by permutation.

Consecutive samples are put in blocks; if the blocks differ more (in work, or in the encoder's share of it) than blocks
of the same samples shuffled do, the order is not random: sorted, grouped by source, or drifting. With 199 shuffles and
two quantities, random order is called sorted in one case of a hundred. Price: 20 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

BLOCK, MOST_BLOCKS, SHUFFLES = 64, 64, 199


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the order of a data set is like.

    Attributes:
        block: samples in a block.
        spread: how many times more blocks of consecutive samples differ than shuffled ones; the larger of both
            quantities.
        is_random: whether that can be chance.
    """

    block: int
    spread: float
    is_random: bool

    def sentence(self) -> str:
        """What it means, in words."""
        if self.is_random:
            return f"order: batches of {self.block} consecutive samples differ no more than random ones do."
        return (
            f"order: batches of {self.block} consecutive samples differ {self.spread:.1f} times as much as random "
            "ones: the data is sorted, grouped or drifting. What is said of stability holds only if it is shuffled."
        )


def find_order(work: FloatArray, *, seed: int = 0) -> Order | None:
    """The order of a data set; None if it is too small to tell.

    Args:
        work: [N, modules] seconds of each sample in file order.
        seed: of the shuffles.
    """
    block = min(BLOCK, len(work) // 8)
    if block < 2:
        return None
    num_blocks = len(work) // block
    chosen = np.unique(np.linspace(0, num_blocks - 1, min(num_blocks, MOST_BLOCKS)).astype(np.int64))
    rows = (chosen[:, None] * block + np.arange(block)).reshape(-1)
    mine = work[rows]
    observed = _spreads(mine, block)
    generator = np.random.default_rng(seed)
    shuffled = np.stack([_spreads(mine[generator.permutation(len(mine))], block) for _ in range(SHUFFLES)])
    typical = np.median(shuffled, axis=0)
    varies = typical > 1e-12
    if not varies.any():
        return Order(block=block, spread=1.0, is_random=True)
    spread = float((observed[varies] / typical[varies]).max())
    return Order(block=block, spread=spread, is_random=not bool((observed > shuffled.max(axis=0))[varies].any()))


def _spreads(work: FloatArray, block: int) -> FloatArray:
    """[2] relative standard deviation of the blocks' work, and standard deviation of the first modules' share of it."""
    sums = work.reshape(-1, block, work.shape[1]).sum(axis=1)
    total = sums.sum(axis=1)
    share = np.divide(sums[:, :-1].sum(axis=1), total, out=np.zeros(len(total)), where=total > 0)
    mean = max(float(total.mean()), 1e-30)
    return np.array([float(total.std()) / mean, float(share.std())])
