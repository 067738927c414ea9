"""An estimate of 1F1B that grows microbatch by microbatch: the simulator inside two peers' algorithms.

Ranks form a chain: each passes forward to the next and gradients back, and alternates one forward, one backward after
its warm-up of R - 1 - r forwards. Messages take no time and memory is unlimited. It is the peers' own model of a
pipeline; where a real shape is not a chain (parallel encoders, several stages per rank) it is coarse, and results are
judged by `simulate` instead. Price: 0.6 us per forward or backward of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence


class OneForwardOneBackward:
    """A pipeline of R ranks, played as far as the microbatches appended so far determine.

    Args:
        num_ranks: R.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._seconds: list[tuple[Sequence[float], Sequence[float]]] = []
        self._clock = [0.0] * num_ranks
        self._forward_end: list[list[float]] = [[] for _ in range(num_ranks)]
        self._backward_end: list[list[float]] = [[] for _ in range(num_ranks)]
        self._closed = False

    def append(self, forward: Sequence[float], backward: Sequence[float]) -> None:
        """Add the next microbatch: its seconds on each of R ranks."""
        self._seconds.append((forward, backward))
        self._play()

    def finish(self) -> float:
        """Seconds of the whole iteration; nothing can be appended afterwards."""
        self._closed = True
        self._play()
        return max(self._clock)

    @property
    def first_rank_interval(self) -> float:
        """How long the first of several ranks waits for its next backward, from when it is free.

        Known once R microbatches are there, and then after each further one.
        """
        return self._backward_end[1][len(self._backward_end[0])] - self._clock[0]

    def _play(self) -> None:
        moved = True
        while moved:
            moved = False
            # Down and up again, so that a forward and the backward it allows both pass in one sweep.
            for rank in (*range(self._num_ranks), *range(self._num_ranks - 2, -1, -1)):
                while self._step(rank):
                    moved = True

    def _step(self, rank: int) -> bool:
        """Run the rank's next forward or backward if its inputs are there."""
        forwards, backwards = len(self._forward_end[rank]), len(self._backward_end[rank])
        last = self._num_ranks - 1
        if forwards - backwards <= last - rank and not (self._closed and forwards == len(self._seconds)):
            before = self._forward_end[rank - 1] if rank else None
            if forwards == len(self._seconds) or (before is not None and forwards == len(before)):
                return False
            ready = before[forwards] if before is not None else 0.0
            self._run(rank, self._forward_end[rank], ready, self._seconds[forwards][0][rank])
            return True
        after = self._backward_end[rank + 1] if rank < last else self._forward_end[rank]
        if backwards == len(after):
            return False
        self._run(rank, self._backward_end[rank], after[backwards], self._seconds[backwards][1][rank])
        return True

    def _run(self, rank: int, ends: list[float], ready: float, seconds: float) -> None:
        self._clock[rank] = max(self._clock[rank], ready) + seconds
        ends.append(self._clock[rank])
