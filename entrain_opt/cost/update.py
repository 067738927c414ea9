"""How long the end of an iteration takes: gradients summed over replicas, optimizer step, weights gathered.

Under `data_parallel: sharded` the sum sends each replica its rows only, the step covers 1 / replicas of the values, and
the weights of the others are gathered after it, in the type of the weights: as many bytes as an all-reduce in float32,
three quarters of them under bf16-true. The gather counts as a part of the step, because nothing hides it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from entrain_opt.cost import memory
from entrain_opt.cost.links import Links
from entrain_opt.cost.precision import Precision
from entrain_opt.plan import Plan
from entrain_opt.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateCosts:
    """Seconds of a stage's update.

    Attributes:
        model: what trains in it counts.
        links, precision: of the run.
        step_seconds_per_parameter: of the optimizer.
    """

    model: ModelSpec
    links: Links
    precision: Precision
    step_seconds_per_parameter: float

    def trained_parameters(self, plan: Plan, stage: int) -> float:
        """Of a stage, on one of its devices."""
        held = plan.stages[stage]
        module, tensor = self.model.module(held.module), plan.degrees.tensor_of(held.rank)
        return memory.trained_parameters(self.model, module, held.layers, tensor)

    def reduce_seconds(self, plan: Plan, stage: int) -> float:
        """Sum of a stage's gradients over replicas and context devices, and of a tied embedding over its holders."""
        degrees, shares = plan.degrees, plan.num_shares
        spec, rank = self.model.module(plan.stages[stage].module), plan.stages[stage].rank
        tensor, context = degrees.tensor_of(rank), degrees.context_of(rank)
        num_bytes = self.trained_parameters(plan, stage) * self.precision.gradient_bytes
        if plan.shards_state:
            # Context devices then sum the rows of their replica.
            alone = replace(degrees, data=1)
            seconds = self.links.share_seconds(degrees, num_bytes)
            seconds += self.links.all_reduce_seconds(alone, num_bytes / shares, context)
        else:
            seconds = self.links.all_reduce_seconds(degrees, num_bytes, context)
        llm_stages = [i for i, other in enumerate(plan.stages) if other.module == spec.name]
        ends = {llm_stages[0], llm_stages[-1]}
        if self.model.tied_embeddings and spec.vocabulary_size and spec.trained and len(ends) == 2 and stage in ends:
            ranks = [plan.stages[end].rank for end in sorted(ends)]
            speed = float(self.links.between(degrees, *ranks))
            own_bytes = spec.input_parameters / tensor / shares * self.precision.gradient_bytes
            seconds += own_bytes / speed + self.links.latency_seconds
        return seconds

    def step_seconds(self, plan: Plan, stage: int) -> float:
        """The optimizer's step on a stage, and the gather of what other replicas updated."""
        parameters = self.trained_parameters(plan, stage)
        seconds = parameters / plan.num_shares * self.step_seconds_per_parameter
        if plan.shards_state:
            seconds += self.links.share_seconds(plan.degrees, parameters * self.precision.weight_bytes)
        return seconds
