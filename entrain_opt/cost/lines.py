"""Seconds of one pass through a piece of a model, as a line in what is computed on.

    seconds = max(square * sum(segment^2), exchange * tokens) + token * tokens + segment * segments + fixed

The square term is attention within segments (an image tile, a packed sample), so packing and windows are counted right;
the exchange term is messages that travel while attention computes (`context.py`; 0 elsewhere); the fixed term is paid
once per pass, whatever its size. Everything but the fixed term adds up over items, which is what lets a microbatch's
cost be the sum over its samples. Measured and analytic costs are both such lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The coefficients, in seconds."""

    square_seconds: float = 0.0
    token_seconds: float = 0.0
    segment_seconds: float = 0.0
    fixed_seconds: float = 0.0
    exchange_seconds: float = 0.0

    def item_seconds(self, squares: ArrayLike, tokens: ArrayLike, segments: ArrayLike) -> FloatArray:
        """[items] seconds without the fixed part.

        Args:
            squares: [items] sum of squared segment lengths.
            tokens: [items] tokens or patches.
            segments: [items] attention segments.
        """
        square, token = np.asarray(squares, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
        return (
            np.maximum(self.square_seconds * square, self.exchange_seconds * token)
            + self.token_seconds * token
            + self.segment_seconds * np.asarray(segments, dtype=np.float64)
        )

    def scaled(self, factor: float) -> Line:
        return Line(
            square_seconds=factor * self.square_seconds,
            token_seconds=factor * self.token_seconds,
            segment_seconds=factor * self.segment_seconds,
            fixed_seconds=factor * self.fixed_seconds,
            exchange_seconds=factor * self.exchange_seconds,
        )

    def plus(self, other: Line) -> Line:
        """The sum."""
        return Line(
            square_seconds=self.square_seconds + other.square_seconds,
            token_seconds=self.token_seconds + other.token_seconds,
            segment_seconds=self.segment_seconds + other.segment_seconds,
            fixed_seconds=self.fixed_seconds + other.fixed_seconds,
            exchange_seconds=self.exchange_seconds + other.exchange_seconds,
        )

    def without(self, other: Line) -> Line:
        """The difference, never below zero."""
        return Line(
            square_seconds=max(0.0, self.square_seconds - other.square_seconds),
            token_seconds=max(0.0, self.token_seconds - other.token_seconds),
            segment_seconds=max(0.0, self.segment_seconds - other.segment_seconds),
            fixed_seconds=max(0.0, self.fixed_seconds - other.fixed_seconds),
            exchange_seconds=max(0.0, self.exchange_seconds - other.exchange_seconds),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartCosts:
    """An embedding, a layer, or a projector or head.

    Attributes:
        forward: forward pass.
        backward: input and weight gradients.
        input_backward: input gradients only.
        split_backward: input gradients, then weight gradients, in two passes; None where it was not measured.
    """

    forward: Line = field(default_factory=Line)
    backward: Line = field(default_factory=Line)
    input_backward: Line = field(default_factory=Line)
    split_backward: Line | None = None

    def backward_line(self, *, trained: bool, upstream_trained: bool, recompute: bool = False) -> Line:
        """What the backward pass costs, given what trains.

        Trained and asked for input gradients: about 2x the forward. Frozen with something trained upstream: input
        gradients only, about 1x. Trained with nothing trained upstream: weight gradients only. Else nothing. With
        `recompute` another forward comes first, because activations were not kept.
        """
        if trained:
            backward = self.backward if upstream_trained else self.backward.without(self.input_backward)
        elif upstream_trained:
            backward = self.input_backward
        else:
            return Line()
        return backward.plus(self.forward) if recompute else backward


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCosts:
    """One encoder or the language model.

    Attributes:
        input: patch embedding per patch, or token embedding per token.
        layer: one layer, per patch or token.
        output: projector per media token, or final norm, head and loss per *label* token (logits exist there only).
    """

    input: PartCosts = field(default_factory=PartCosts)
    layer: PartCosts = field(default_factory=PartCosts)
    output: PartCosts = field(default_factory=PartCosts)
