"""Emulated compute: the real strategy, schedule, messages and loaders, with a timed wait in place of each computation.

A process that waits needs no core, so a laptop rehearses as many ranks as it has memory for. What is real: processes
and groups, the assigner, every rank's list of actions, every message (posted, sent and awaited in the schedule's order)
and the collectives. What is not: a forward or backward waits for its predicted seconds times `scale`, and a message is
a stand-in of 4 KB that carries the name of its unit, which the receiver checks, and the instant at which the real one
would have arrived over a link that carries one message at a time. Reductions and optimizer steps wait likewise.

Promise: waits follow the simulator's model and never catch up, so what the wall clock has beyond `scale` times the
simulated seconds is the cost of the runtime itself. No weights are made or changed.
Price: the machine's wake-up time per action (0.1 ms idle, more under load), so make actions 20 ms or longer. Instants
are compared between processes by one clock: all ranks must be on one machine.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from entrain_opt.errors import RuntimeConfigError, TrainingError
from entrain_opt.plan import Plan
from entrain_opt.runtime.batches import RankBatch
from entrain_opt.runtime.dropout import DropoutKey
from entrain_opt.runtime.executor import Flight, IterationResult, PipelineExecutor, Unit
from entrain_opt.runtime.gradients import GradientReducer
from entrain_opt.runtime.master import MasterWeights
from entrain_opt.runtime.p2p import Mailbox, PipelineGroups
from entrain_opt.runtime.rank_work import ActionSeconds
from entrain_opt.runtime.stages import RankModel
from entrain_opt.runtime.tensor_group import TensorGroup
from entrain_opt.runtime.tensor_layers import DividedModel
from entrain_opt.schedule.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward, Message

#: Numbers (8 bytes each) of a stand-in message.
STAND_IN_LENGTH = 512
_OUTPUT, _GRADIENT = 0.0, 1.0
#: Where in a stand-in its arrival instant lies, behind stage, microbatch, part and kind.
_ARRIVAL = 4


class StandInModel(RankModel):
    """What an emulated rank holds: its place in the plan, and one number for the optimizer to own."""

    def __init__(self, plan: Plan, stages: tuple[int, ...]) -> None:
        nn.Module.__init__(self)
        self.plan = plan
        self.stages = stages
        self.number = nn.Parameter(torch.zeros(1))
        self.masters = MasterWeights({})
        self.tensor = TensorGroup()
        self.divided = DividedModel()
        self.dropout_key = DropoutKey()

    def keep_masters(self, groups: PipelineGroups | None = None) -> None:
        """There are no weights to keep masters of."""

    def stage_parameters(self, stage: int) -> dict[str, nn.Parameter]:
        return {}


class StandInReducer(GradientReducer):
    """Reductions of one rank's stages: real collectives of one number, then the predicted wait.

    Each collective finds the instant at which the slowest replica is ready; a rank's reductions then run one after the
    other beside its compute, as the simulator has it.
    """

    def __init__(self, model: StandInModel, groups: PipelineGroups) -> None:
        self._model = model
        self._groups = groups
        self._started: list[tuple[int, dist.Work | None, Tensor]] = []
        self.ends: dict[int, float] = {}
        """Instant at which each stage's reduction was over; after `finish`."""
        self.scaled_seconds: tuple[float, ...] = ()
        """Per stage; set for every iteration."""

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {"number": self._model.number}

    def zero_missing(self) -> None:
        self._model.number.grad = torch.zeros(1)

    def start_reduce(self, stage: int) -> None:
        ready = torch.tensor([time.perf_counter()], dtype=torch.float64)
        work = None
        if self._groups.data is not None:
            work = dist.all_reduce(ready, op=dist.ReduceOp.MAX, group=self._groups.data, async_op=True)
        self._started.append((stage, work, ready))

    def finish(self) -> None:
        self.zero_missing()
        self.ends, free = {}, 0.0
        for stage, work, ready in self._started:
            if work is not None:
                with self._groups.waits.on("the sum of gradients over replicas"):
                    work.wait()
            free = max(float(ready), free) + self.scaled_seconds[stage]
            self.ends[stage] = free
        self._started.clear()

    def global_norm(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64)

    def clip(self, norm: float, max_norm: float) -> None:
        """Nothing to clip: the norm is 0."""


class EmulatedExecutor(PipelineExecutor):
    """Runs the actions of a `RankBatch` that has `action_seconds`, without computing.

    Args:
        model: this rank's place.
        groups: its process groups.
        scale: wall seconds per predicted second.
    """

    def __init__(self, model: StandInModel, groups: PipelineGroups, *, scale: float) -> None:
        self._stand_in_reducer = StandInReducer(model, groups)
        super().__init__(model, groups, self._stand_in_reducer)
        self.scale = scale
        self._link_free: dict[tuple[int, int], float] = {}
        self._seconds = ActionSeconds(compute={}, transfer={}, reduce=(), step=())

    def run(self, batch: RankBatch, *, training: bool) -> IterationResult:
        """See `PipelineExecutor.run`; the loss is 0.

        Raises:
            RuntimeConfigError: the batch has no predicted seconds.
            TrainingError: a message of another unit arrived than the schedule expects.
        """
        if batch.action_seconds is None:
            raise RuntimeConfigError("emulation: expected a batch built without a reader, which has action_seconds.")
        self._seconds = batch.action_seconds
        self._link_free = {}
        self._stand_in_reducer.scaled_seconds = tuple(self.scale * seconds for seconds in self._seconds.reduce)
        return super().run(batch, training=training)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64  # Holds instants to the nanosecond.

    def _output_shape(self, unit: Unit, batch: RankBatch) -> tuple[int, ...]:
        return (STAND_IN_LENGTH,)

    def _inputs(self, unit: Unit, batch: RankBatch, flight: Flight, mailbox: Mailbox) -> list[tuple[Unit, Tensor]]:
        leaves = super()._inputs(unit, batch, flight, mailbox)
        for source, leaf in leaves:
            _await_arrival(leaf.detach(), source, _OUTPUT)
        return leaves

    def _incoming_gradient(self, unit: Unit, batch: RankBatch, flight: Flight, mailbox: Mailbox) -> Tensor | None:
        gradient = super()._incoming_gradient(unit, batch, flight, mailbox)
        if gradient is not None:
            _await_arrival(gradient, unit, _GRADIENT)
        return gradient

    def _outgoing(self, message: Message, flight: Flight) -> Tensor:
        tensor = super()._outgoing(message, flight)
        upstream = min(message.source_stage, message.target_stage)
        seconds = self._seconds.transfer[upstream, message.microbatch, message.part]
        link = (self.rank_of[message.source_stage], self.rank_of[message.target_stage])
        start = max(time.perf_counter(), self._link_free.get(link, 0.0))
        self._link_free[link] = start + self.scale * seconds
        tensor[_ARRIVAL] = self._link_free[link]
        return tensor

    def _forward(
        self, unit: Unit, inputs: list[tuple[Unit, Tensor]], batch: RankBatch, flight: Flight, training: bool
    ) -> Tensor:
        self._wait(Forward(*unit))
        if training and self.has_backward[unit[0]]:
            flight.graphs[unit] = (torch.empty(0), inputs)
        if not self.model.is_last_llm_stage(unit[0]):
            flight.outputs[unit] = _stand_in(unit, _OUTPUT)
        return torch.zeros(())

    def _backward(self, unit: Unit, gradient: Tensor | None, flight: Flight) -> None:
        self._wait(Backward(*unit))
        self._hand_gradients_on(unit, flight)

    def _backward_input(self, unit: Unit, gradient: Tensor | None, flight: Flight) -> None:
        self._wait(BackwardInput(*unit))
        self._hand_gradients_on(unit, flight)

    def _backward_weight(self, unit: Unit, flight: Flight) -> None:
        self._wait(BackwardWeight(*unit))

    def _hand_gradients_on(self, unit: Unit, flight: Flight) -> None:
        for source, _ in flight.graphs.pop(unit)[1]:
            if self.has_backward[source[0]]:
                flight.gradients[source] = _stand_in(source, _GRADIENT)

    def _finish_update(self) -> None:
        super()._finish_update()
        for stage, end in sorted(self._stand_in_reducer.ends.items()):
            wait_until(max(end, time.perf_counter()) + self.scale * self._seconds.step[stage])

    def _wait(self, action: Compute) -> None:
        wait_until(time.perf_counter() + self.scale * self._seconds.compute[action])


def wait_until(instant: float) -> None:
    """Sleep until `time.perf_counter()` has reached an instant."""
    while (left := instant - time.perf_counter()) > 0:
        time.sleep(left)


def _stand_in(unit: Unit, kind: float) -> Tensor:
    tensor = torch.zeros(STAND_IN_LENGTH, dtype=torch.float64)
    tensor[:_ARRIVAL] = torch.tensor([*unit, kind], dtype=torch.float64)
    return tensor


def _await_arrival(tensor: Tensor, unit: Unit, kind: float) -> None:
    """Check whose message it is, then wait until the real one would be there (0 for one of the same rank)."""
    found = tensor[:_ARRIVAL].tolist()
    if found != [*unit, kind]:
        raise TrainingError(
            f"emulation: expected the {'gradient' if kind else 'output'} of stage, microbatch, part {unit}, received "
            f"{found[:3]} of kind {'gradient' if found[3] else 'output'}: the two ends of a link disagree on the order."
        )
    wait_until(float(tensor[_ARRIVAL]))
