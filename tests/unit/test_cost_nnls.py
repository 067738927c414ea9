"""Non-negative least squares: optimal by its own conditions, and exact where the answer is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from entrain_opt.cost.nnls import non_negative_least_squares
from entrain_opt.errors import SolverError

numbers = st.floats(-10, 10, allow_nan=False, width=32)


@settings(max_examples=100, deadline=None)
@given(arrays(np.float64, (7, 4), elements=numbers), arrays(np.float64, 7, elements=numbers))
def test_no_direction_that_is_allowed_improves_the_answer(matrix, target):
    solution = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ solution - target)
    scale = max(np.abs(matrix).max() ** 2, np.abs(matrix.T @ target).max(), 1.0)
    assert (solution >= 0).all()
    assert (gradient >= -1e-6 * scale).all()
    assert np.abs(gradient[solution > 0]).max(initial=0) <= 1e-6 * scale


def test_a_target_that_cancels_gives_nothing():
    assert non_negative_least_squares(np.ones((7, 4)), [-1, 1, *[1.01708925e-21] * 5]).max() < 1e-12


def test_exact_lines_come_back():
    sizes = np.array([64.0, 256, 1024, 4096])
    matrix = np.stack([sizes**2, sizes, np.ones(4)], axis=1)
    np.testing.assert_allclose(
        non_negative_least_squares(matrix, matrix @ [3e-9, 2e-6, 1e-4]), [3e-9, 2e-6, 1e-4], rtol=1e-8
    )


def test_a_negative_coefficient_becomes_zero():
    matrix = np.stack([np.arange(1.0, 5), np.ones(4)], axis=1)
    slope, offset = non_negative_least_squares(matrix, np.arange(1.0, 5) * 2 - 1)
    assert offset == 0
    assert slope == pytest.approx(np.dot(matrix[:, 0], matrix[:, 0] * 2 - 1) / np.dot(matrix[:, 0], matrix[:, 0]))


def test_wrong_shapes_are_named():
    with pytest.raises(SolverError, match="expected finite"):
        non_negative_least_squares(np.ones((3, 2)), np.ones(4))
