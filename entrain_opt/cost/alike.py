"""Stages of a plan that cost the same: as many layers of each kind of a module, run the same way.

Promise: `each` gives the very values that a call per stage gives, and one object for stages that are alike. Price: a
pipeline of 32 ranks has about six different stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from entrain_opt.plan import Plan, StagePlan
from entrain_opt.spec.model import ModelSpec

T = TypeVar("T")


class AlikeStages:
    """The stages of a plan, grouped."""

    def __init__(self, model: ModelSpec, plan: Plan) -> None:
        known: dict[tuple[object, ...], int] = {}
        #: Per stage, the first one that is like it.
        self.first = [
            known.setdefault((*_key(model, stage), *_degrees(plan, stage)), index)
            for index, stage in enumerate(plan.stages)
        ]

    def each(self, value: Callable[[int], T]) -> tuple[T, ...]:
        """Of every stage, a value that does not depend on its rank; asked for once for stages that are alike."""
        values = {index: value(index) for index in dict.fromkeys(self.first)}
        return tuple(values[index] for index in self.first)


def _degrees(plan: Plan, stage: StagePlan) -> tuple[int, int]:
    return plan.degrees.tensor_of(stage.rank), plan.degrees.context_of(stage.rank)


def _key(model: ModelSpec, stage: StagePlan) -> tuple[object, ...]:
    module, (first, end) = model.module(stage.module), stage.layers
    kinds = tuple(sum(first <= layer < end for layer in kind.layers) for kind in module.layer_kinds)
    return (stage.module, end - first, kinds, first == 0, end == module.num_layers, stage.recompute)
