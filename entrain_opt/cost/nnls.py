"""Non-negative least squares by the active-set method of Lawson and Hanson (1974, chapter 23).

Coefficients start at zero; the one whose increase helps most is freed, the free ones are solved for, and any that would
turn negative is fixed at zero again on the way. Promise: the optimum, in finitely many steps; seconds never come out
negative, also beyond the sizes that were measured. Price: microseconds for a handful of columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entrain_opt.errors import SolverError

FloatArray = NDArray[np.float64]


def non_negative_least_squares(matrix: ArrayLike, target: ArrayLike) -> FloatArray:
    """[columns] x >= 0 with the least |matrix x - target|.

    Args:
        matrix: [rows, columns].
        target: [rows].

    Raises:
        SolverError: the shapes differ or a value is not finite.
    """
    a, b = np.asarray(matrix, dtype=np.float64), np.asarray(target, dtype=np.float64)
    if a.ndim != 2 or b.shape != (len(a),) or not np.isfinite(a).all() or not np.isfinite(b).all():
        raise SolverError(f"least squares: expected finite [rows, columns] and [rows], found {a.shape} and {b.shape}.")
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    columns = a.shape[1]
    x, free = np.zeros(columns), np.zeros(columns, dtype=bool)
    # Columns have length one, so no slope is above the target's length; where targets cancel, slopes are rounding only.
    tolerance = 1e-12 * max(float(np.linalg.norm(b)), 1e-300)
    for _ in range(30 * max(columns, 1)):
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        if free.all() or gradient.max(initial=-np.inf) <= tolerance:
            return x / scale
        free[int(gradient.argmax())] = True
        while True:
            solved = np.zeros(columns)
            solved[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            blocked = free & (solved <= 0)
            if not blocked.any():
                break
            step = np.min(x[blocked] / np.maximum(x[blocked] - solved[blocked], 1e-300))
            x = x + step * (solved - x)
            free &= x > 1e-14 * max(float(x.max(initial=0.0)), 1e-300)
            x[~free] = 0.0
        x = solved
    raise SolverError(f"least squares: no convergence on {a.shape[0]} rows and {columns} columns.")
