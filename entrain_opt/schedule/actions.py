"""The vocabulary of a schedule. A rank's schedule is a list of these, and nothing else decides what runs when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a stage on (a part of) a microbatch. `part` is always 0 for language-model stages."""

    stage: int
    microbatch: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """Whole backward: input and weight gradients together."""

    stage: int
    microbatch: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Gradients of the inputs only, which the upstream stage waits for."""

    stage: int
    microbatch: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """The weight gradients that `BackwardInput` left for later."""

    stage: int
    microbatch: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """What crosses between two ranks: the output of `source_stage` for one unit, or the gradient back to it.

    `microbatch` and `part` are those of the unit on the upstream (activation-producing) stage.
    """

    source_stage: int
    target_stage: int
    microbatch: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending; never blocks the sender."""

    message: Message


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive early; the action that needs it waits for it."""

    message: Message


@dataclass(frozen=True, slots=True)
class Reduce:
    """Sum a stage's gradients over the data-parallel replicas."""

    stage: int


@dataclass(frozen=True, slots=True)
class Step:
    """Optimizer step of a stage."""

    stage: int


Compute = Forward | Backward | BackwardInput | BackwardWeight
Action = Compute | Send | Receive | Reduce | Step
