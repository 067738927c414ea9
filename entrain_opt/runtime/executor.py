"""Replays one rank's schedule with tensors.

The schedule says what runs when; this file says what each action does. Nothing here decides an order, and every tensor
is named by (stage, microbatch, part), so labels, features and gradients can never meet the wrong microbatch.

Promise: the gradient equals that of the plain model on the whole global batch, for any assignment and any schedule.
Price: activations of the units in flight, one leaf tensor per received input.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime import split_backward
from entrain_opt.runtime.batches import RankBatch
from entrain_opt.runtime.gradients import GradientReducer
from entrain_opt.runtime.p2p import Mailbox, PipelineGroups
from entrain_opt.runtime.split_backward import PendingWeightGradients
from entrain_opt.runtime.stages import RankModel
from entrain_opt.schedule.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Message,
    Receive,
    Reduce,
    Send,
    Step,
)

Unit = tuple[int, int, int]
"""(stage, microbatch, part)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationResult:
    """What one rank knows after an iteration.

    Attributes:
        loss: its share of the loss of the global batch: the sum over all ranks is the loss. Where several devices
            compute the same loss, one of them has it.
        busy_seconds: time spent computing, without waiting for messages.
        wall_seconds: from the first action to the last.
    """

    loss: Tensor
    busy_seconds: float
    wall_seconds: float


@dataclass(slots=True)
class Flight:
    """Tensors alive within one iteration."""

    outputs: dict[Unit, Tensor] = field(default_factory=dict)
    """Results that wait for a local consumer or for their Send."""
    graphs: dict[Unit, tuple[Tensor, list[tuple[Unit, Tensor]]]] = field(default_factory=dict)
    """Output with its graph, and the leaves whose gradients go to upstream units."""
    gradients: dict[Unit, Tensor] = field(default_factory=dict)
    weight_gradients: dict[Unit, PendingWeightGradients] = field(default_factory=dict)
    features: dict[Unit, tuple[Tensor, int]] = field(default_factory=dict)
    """Features of units with several consumers, and how many still need them."""


class PipelineExecutor:
    """Runs iterations on one rank.

    Args:
        model: this rank's stages, on their device.
        groups: process groups from `make_groups`.
        reducer: sums gradients over replicas; only needed to train.
    """

    def __init__(self, model: RankModel, groups: PipelineGroups, reducer: GradientReducer | None = None) -> None:
        self.model = model
        self.groups = groups
        self.reducer = reducer
        self.shape = model.plan.pipeline_shape
        self.has_backward = self.shape.has_backward
        self.rank_of = self.shape.ranks_of_stages

    def run(self, batch: RankBatch, *, training: bool) -> IterationResult:
        """Run one iteration; with `training`, gradients are added to the parameters and reduced.

        Raises:
            RuntimeConfigError: the schedule holds an action that this executor does not know.
        """
        device, dtype = batch.device, self._dtype
        mailbox = Mailbox(self.groups, device)
        flight = Flight()
        loss = torch.zeros((), device=device, dtype=torch.float32)
        busy_seconds = 0.0
        started = time.perf_counter()
        for action in batch.actions if training else forward_only(batch.actions):
            self.groups.waits.doing = action
            match action:
                case Receive(message=message):
                    mailbox.post(message, self._shape_of(message, batch), dtype)
                case Send(message=message):
                    mailbox.send(message, self._outgoing(message, flight))
                case Forward(stage=stage, microbatch=microbatch, part=part):
                    inputs = self._inputs((stage, microbatch, part), batch, flight, mailbox)
                    clock = time.perf_counter()
                    loss = loss + self._forward((stage, microbatch, part), inputs, batch, flight, training)
                    busy_seconds += self._since(clock, action)
                case Backward(stage=stage, microbatch=microbatch, part=part):
                    gradient = self._incoming_gradient((stage, microbatch, part), batch, flight, mailbox)
                    clock = time.perf_counter()
                    self._backward((stage, microbatch, part), gradient, flight)
                    busy_seconds += self._since(clock, action)
                case BackwardInput(stage=stage, microbatch=microbatch, part=part):
                    gradient = self._incoming_gradient((stage, microbatch, part), batch, flight, mailbox)
                    clock = time.perf_counter()
                    self._backward_input((stage, microbatch, part), gradient, flight)
                    busy_seconds += self._since(clock, action)
                case BackwardWeight(stage=stage, microbatch=microbatch, part=part):
                    clock = time.perf_counter()
                    self._backward_weight((stage, microbatch, part), flight)
                    busy_seconds += self._since(clock, action)
                case Reduce(stage=stage):
                    assert self.reducer is not None
                    if self.groups.waits.spans is not None:
                        self.groups.waits.spans.reducing(stage)
                    self.reducer.start_reduce(stage)
                case Step():
                    pass  # The optimizer's owner steps after clipping, which needs every stage's gradient.
                case _:
                    raise RuntimeConfigError(f"schedule: cannot execute {action}.")
        mailbox.finish()
        if training:
            self._finish_update()
        return IterationResult(loss=loss, busy_seconds=busy_seconds, wall_seconds=time.perf_counter() - started)

    def _finish_update(self) -> None:
        """Wait for what the schedule started behind the last backward."""
        if self.reducer is not None:
            self.reducer.finish()
        if self.groups.waits.spans is not None:
            self.groups.waits.spans.reduced()

    def _since(self, start: float, action: Compute) -> float:
        """Seconds of an action that has just ended."""
        end = time.perf_counter()
        if self.groups.waits.spans is not None:
            self.groups.waits.spans.computed(action, start, end)
        return end - start

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def _shape_of(self, message: Message, batch: RankBatch) -> tuple[int, ...]:
        """A message carries the output of its upstream stage, or the gradient of that output: the same shape."""
        upstream = min(message.source_stage, message.target_stage)
        return self._output_shape((upstream, message.microbatch, message.part), batch)

    def _output_shape(self, unit: Unit, batch: RankBatch) -> tuple[int, ...]:
        stage, microbatch, part = unit
        family, encoder = self.model.family, self.shape.encoder_of_stage(stage)
        if encoder is None:
            return family.llm_shape(batch.llm_tokens[microbatch], self.model.plan.stages[stage].layers[1])
        size = batch.encoder_sizes[encoder, microbatch, part]
        if stage == self.shape.stages_of_encoder(encoder)[-1]:
            return (sum(size.features), family.feature_width())
        return family.encoder_shape(size, self.model.plan.stages[stage].layers[1])

    def _upstream(self, unit: Unit, batch: RankBatch) -> list[Unit]:
        """Units whose outputs a unit takes."""
        stage, microbatch, part = unit
        encoder = self.shape.encoder_of_stage(stage)
        if encoder is not None:
            first = stage == self.shape.stages_of_encoder(encoder)[0]
            return [] if first else [(stage - 1, microbatch, part)]
        if not self.model.is_first_llm_stage(stage):
            return [(stage - 1, microbatch, part)]
        return [
            (self.shape.stages_of_encoder(source.encoder)[-1], source.microbatch, source.part)
            for source in batch.sources[microbatch]
        ]

    def _inputs(self, unit: Unit, batch: RankBatch, flight: Flight, mailbox: Mailbox) -> list[tuple[Unit, Tensor]]:
        """Fresh leaves for everything a forward takes from other stages; waits for messages."""
        leaves = []
        for source in self._upstream(unit, batch):
            arrived = self._arrived(source, unit, batch, flight, mailbox)
            leaf = arrived.detach().requires_grad_(self.has_backward[source[0]])
            leaves.append((source, leaf))
        return leaves

    def _arrived(self, source: Unit, unit: Unit, batch: RankBatch, flight: Flight, mailbox: Mailbox) -> Tensor:
        if source in flight.features:
            tensor, needed = flight.features[source]
        else:
            local = self.rank_of[source[0]] == self.rank_of[unit[0]]
            tensor = flight.outputs.pop(source) if local else mailbox.take(Message(source[0], unit[0], *source[1:]))
            is_feature = (
                self.shape.encoder_of_stage(unit[0]) is None and self.shape.encoder_of_stage(source[0]) is not None
            )
            needed = batch.num_consumers(self.shape.encoder_of_stage(source[0]), source) if is_feature else 1
        if needed > 1:
            flight.features[source] = (tensor, needed - 1)
        else:
            flight.features.pop(source, None)
        return tensor

    def _forward(
        self, unit: Unit, inputs: list[tuple[Unit, Tensor]], batch: RankBatch, flight: Flight, training: bool
    ) -> Tensor:
        """Run a forward and keep what its backward needs. Returns the unit's share of the loss."""
        stage, microbatch, part = unit
        loss_share = torch.zeros((), device=batch.device, dtype=torch.float32)
        keep_graph = training and self.has_backward[stage]
        module = self.model.plan.stages[stage].module
        self.model.dropout_key.unit = (self.groups.replica, module, microbatch, part)
        with torch.set_grad_enabled(keep_graph):
            encoder = self.shape.encoder_of_stage(stage)
            if encoder is not None:
                hidden = inputs[0][1] if inputs else batch.pixels[encoder, microbatch, part]
                output = self.model.encode(stage, hidden, batch.encoder_sizes[encoder, microbatch, part])
            else:
                text = batch.texts[microbatch]
                first = self.model.is_first_llm_stage(stage)
                tensors = [leaf for _, leaf in inputs]
                hidden_or_none = None if first else tensors[0]
                output = self.model.decode(stage, text, hidden_or_none, tensors if first else [])
                if self.model.is_last_llm_stage(stage):
                    output = self.model.loss_sum(text, output) / batch.label_tokens
                    if self.groups.tensor.place == 0:
                        loss_share = output.detach()
        if keep_graph:
            flight.graphs[unit] = (output, inputs)
        if not self.model.is_last_llm_stage(stage):
            flight.outputs[unit] = output.detach().to(self._dtype)
        return loss_share

    def _outgoing(self, message: Message, flight: Flight) -> Tensor:
        if message.source_stage < message.target_stage:
            return flight.outputs.pop((message.source_stage, message.microbatch, message.part))
        return flight.gradients.pop((message.target_stage, message.microbatch, message.part))

    def _incoming_gradient(self, unit: Unit, batch: RankBatch, flight: Flight, mailbox: Mailbox) -> Tensor | None:
        """Gradient of a unit's output; None for the loss itself. Waits for messages."""
        stage, microbatch, part = unit
        if self.model.is_last_llm_stage(stage):
            return None
        encoder = self.shape.encoder_of_stage(stage)
        last_of_encoder = encoder is not None and stage == self.shape.stages_of_encoder(encoder)[-1]
        downstream = self.shape.stages_of_llm[0] if last_of_encoder else stage + 1
        if self.rank_of[downstream] == self.rank_of[stage]:
            return flight.gradients.pop(unit)
        return mailbox.take(Message(downstream, stage, microbatch, part))

    def _backward(self, unit: Unit, gradient: Tensor | None, flight: Flight) -> None:
        """Run a whole backward."""
        output, inputs = flight.graphs.pop(unit)
        if output.requires_grad:
            with _own_types(output):
                torch.autograd.backward(output, None if gradient is None else gradient.to(output.dtype))
        self._keep_input_gradients(inputs, flight)

    def _backward_input(self, unit: Unit, gradient: Tensor | None, flight: Flight) -> None:
        """The part of a backward that upstream waits for; the rest stays pending. With recompute: all of it."""
        output, inputs = flight.graphs.pop(unit)
        whole = self.model.plan.stages[unit[0]].recompute
        leaves = [] if whole else [leaf for _, leaf in inputs if leaf.requires_grad]
        gradient = None if gradient is None else gradient.to(output.dtype)
        with _own_types(output):
            if output.requires_grad and leaves:
                flight.weight_gradients[unit] = split_backward.start(output, gradient, leaves)
            elif output.requires_grad:
                torch.autograd.backward(output, gradient)
        self._keep_input_gradients(inputs, flight)

    def _backward_weight(self, unit: Unit, flight: Flight) -> None:
        """What `_backward_input` left for later."""
        if pending := flight.weight_gradients.pop(unit, None):
            with _own_types(pending.output):
                pending.finish()

    def _keep_input_gradients(self, inputs: list[tuple[Unit, Tensor]], flight: Flight) -> None:
        """Keep the gradients for upstream units; zeros where the output did not depend on an input."""
        for source, leaf in inputs:
            if self.has_backward[source[0]]:
                flight.gradients[source] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _own_types(output: Tensor) -> torch.autocast:
    """Backward passes follow the types of their forward; autocast, if it is on around the step, must not cast again."""
    return torch.autocast(output.device.type, enabled=False)


def forward_only(actions: Sequence[Action]) -> list[Action]:
    """A schedule without its gradients: forwards and the messages between them, in the same order."""

    def is_forward(action: Action) -> bool:
        match action:
            case Forward():
                return True
            case Send(message=message) | Receive(message=message):
                return message.source_stage < message.target_stage
        return False

    return [action for action in actions if is_forward(action)]
