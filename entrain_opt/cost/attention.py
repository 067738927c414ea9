"""How many keys attention looks at: the only home of these formulas.

Counted in squares, so that full attention over n patches is n^2 and lines stay comparable between modules:

    not causal    squares = query-key pairs                     (every encoder)
    causal        squares = 2 * query-key pairs - tokens        (language models)

so a causal segment of n tokens is n^2 too, and `layer_square_flops` halves it. Windows:

    blocks    n = whole blocks of w and a rest r               squares = blocks * w^2 + r^2
    squares   the same along both sides of the picture,        squares = (blocks * w + r^2)^2 with w, r of a side
              taken as a square of n patches
    sliding   a token sees itself and w - 1 before it          squares = n^2 up to w tokens, else 2 n w - w^2 + w - n

Promise: exact, but for `squares`, where the table knows the area of a picture and not its sides: exact for square
pictures; summed over the pictures of six real workloads within 2 % (one in twenty is off by more than 10 %), of a term
that windows make small. Price: vectorised, microseconds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entrain_opt.spec.model import AttentionWindow, ModuleSpec

FloatArray = NDArray[np.float64]


def attended_squares(lengths: ArrayLike, window: AttentionWindow | None) -> FloatArray:
    """[segments] what one layer's attention over each segment costs.

    Args:
        lengths: [segments] patches or tokens, at least 0.
        window: of the layer; None where attention covers the segment.
    """
    length = np.asarray(lengths, dtype=np.float64)
    if window is None:
        return length**2
    keys = float(window.keys)
    if window.shape == "sliding":
        return np.where(length <= keys, length**2, 2 * length * keys - keys**2 + keys - length)
    if window.shape == "squares":
        # The side of an area may not be whole, but every patch sees itself at least.
        return np.maximum(_block_sums(np.sqrt(length), float(np.sqrt(keys))) ** 2, length)
    return _block_sums(length, keys)


def _block_sums(length: FloatArray, block: float) -> FloatArray:
    """Sum of the squared parts when blocks are cut off a length, the last one being what is left."""
    # A square root may fall just below the whole number that it is.
    blocks = np.floor(length / block + 1e-9)
    rest = np.maximum(length - blocks * block, 0.0)
    return blocks * block**2 + rest**2


def both_ways_squares(lengths: ArrayLike, window: AttentionWindow | None) -> FloatArray:
    """[runs] what a causal layer's attention costs more where the tokens of a run see each other in both directions.

    Args:
        lengths: [runs] tokens of each run.
        window: of the layer, which a run may exceed.
    """
    length = np.asarray(lengths, dtype=np.float64)
    return 2 * length**2 - length - attended_squares(length, window)


def mean_squares(module: ModuleSpec, lengths: ArrayLike) -> FloatArray:
    """[segments] mean of `attended_squares` over the layers of a module; times their number it is their sum.

    Args:
        module: whose windows count.
        lengths: [segments] patches or tokens.
    """
    total = np.zeros(np.shape(lengths))
    for kind, count in module.kind_counts(0, module.num_layers):
        total = total + count * attended_squares(lengths, kind.window)
    return total / max(module.num_layers, 1)
