"""Random numbers inside compiled code, the same on every machine: xorshift64* (Marsaglia; Vigna, 2016)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrain_opt.compiled import compiled

_MULTIPLIER = np.uint64(0x2545F4914F6CDD1D)
_12, _25, _27, _11 = np.uint64(12), np.uint64(25), np.uint64(27), np.uint64(11)


def random_state(seed: int) -> NDArray[np.uint64]:
    """[1] state that `random_unit` changes; never zero."""
    return np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)


@compiled
def random_unit(state: NDArray[np.uint64]) -> float:
    """Uniform from 0 up to, not including, 1."""
    x = state[0]
    x ^= x >> _12
    x ^= x << _25
    x ^= x >> _27
    state[0] = x
    return float((x * _MULTIPLIER) >> _11) * 2.0**-53


@compiled
def random_below(state: NDArray[np.uint64], end: int) -> int:
    """A whole number from 0 to `end` - 1."""
    return int(random_unit(state) * end)
