"""What stages hand on, and how long it takes.

A pipeline rank whose samples are divided over context devices sends as many parts at once. Where two modules have
different degrees, the one with fewer devices to send or receive decides. (The paper counts such borders as a resharding
cost of its own, without a formula.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_opt.cost.features import ItemFeatures
from entrain_opt.cost.links import Links
from entrain_opt.cost.precision import Precision
from entrain_opt.plan import Plan, StagePlan
from entrain_opt.spec.model import ModelSpec

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageMessages:
    """What the stages of a plan hand on to the next ones.

    Attributes:
        model: of the plan.
        plan: whose stages they are.
        precision: of the run.
    """

    model: ModelSpec
    plan: Plan
    precision: Precision

    def leaves_encoder(self, index: int) -> bool:
        """Whether a stage's output is the encoder's, which the language model takes."""
        stage = self.plan.stages[index]
        module = self.model.module(stage.module)
        return not module.vocabulary_size and stage.layers[1] == module.num_layers

    def target(self, index: int) -> StagePlan:
        """The stage that takes what this one hands on; the last one's is itself."""
        stages = self.plan.stages
        if self.leaves_encoder(index):
            return next(stage for stage in stages if stage.module == self.model.llm.name)
        return stages[min(index + 1, len(stages) - 1)]

    def token_bytes(self, index: int) -> float:
        """Bytes per token (or patch, inside an encoder) that one device hands on; they have the weights' type."""
        stage = self.plan.stages[index]
        width = (self.model.llm if self.leaves_encoder(index) else self.model.module(stage.module)).hidden_size
        ranks = (stage.rank, self.target(index).rank)
        return width * self.precision.weight_bytes / min(self.plan.degrees.context_of(rank) for rank in ranks)

    def send_seconds(self, links: Links, features: dict[str, ItemFeatures]) -> tuple[FloatArray, ...]:
        """Of each stage, [items]; one object for stages that send as much at the same speed."""
        stages = self.plan.stages
        ends = [stage.rank for stage in stages], [self.target(index).rank for index in range(len(stages))]
        speeds = links.between(self.plan.degrees, *ends)
        known: dict[tuple[str, bool, float], FloatArray] = {}
        result = []
        for index, (stage, source, target, speed) in enumerate(zip(stages, *ends, speeds.tolist(), strict=True)):
            out = self.leaves_encoder(index)
            own_speed = np.inf if source == target else speed
            key = (stage.module, out, own_speed)
            if key not in known:
                item = features[stage.module]
                amount = item.outputs if out else item.tokens
                known[key] = amount * item.present * (self.token_bytes(index) / own_speed)
            result.append(known[key])
        return tuple(result)
