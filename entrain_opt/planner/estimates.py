"""Predicted seconds and bytes of a layout, for all numbers of microbatches at once.

Predicted iteration seconds of a choice (data degree d, p pipeline ranks, K microbatches):

    U + max over ranks of [(K - 1) * (the rank's seconds per mean microbatch) + its reduction + its optimizer step]

U is one pass, forward and backward, of the *largest* microbatch through all stages (a microbatch is never smaller than
the largest sample), with every stage's fixed part and 2 (p - 1) messages of the slowest kind. With equal microbatches
this is the paper's T = sum of all stages + (K - 1) * slowest stage, plus what the paper leaves out. More microbatches
shorten U and pay the fixed parts more often, so K has an optimum. Tensor and context parallelism and recompute change
the seconds of a module (`cost/tensor.py`, `cost/context.py`), and bytes are those of one device. Replicas that share
out the optimizer's state are given the seconds of those that do not: what they save is little, and sharding is to be
chosen where memory asks for it.

Memory of a rank: what its layers hold all the time, the activations of the microbatches in flight (largest first, the
rest of mean size; as many as stages follow in 1F1B), logits of the largest microbatch, the layer being recomputed, and
messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_opt.cost import CostModel, memory
from entrain_opt.plan import ParallelDegrees
from entrain_opt.plan.shares import BUCKET_BYTES
from entrain_opt.planner.demand import Demand, ModuleDemand
from entrain_opt.planner.instance import PartTicks
from entrain_opt.spec.model import ModuleSpec
from entrain_opt.units import MIB

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Everything of a choice but the number of microbatches; see `Choice`.

    Attributes:
        degrees: of the mesh.
        tensor, context, recompute: per module.
        ranks: pipeline ranks of each module; empty where the partition decides.
        shares: whether a rank may hold layers of two modules.
        sharded: whether replicas share out the optimizer's state.
    """

    degrees: ParallelDegrees
    tensor: tuple[int, ...]
    context: tuple[int, ...]
    recompute: tuple[bool, ...]
    ranks: tuple[int, ...] = ()
    shares: bool = False
    sharded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Of one layout and C numbers of microbatches.

    Attributes:
        counts: [C].
        constant: [C] U.
        parts: [4, modules, C] seconds of (layer, first, last, stage) that the slowest rank is judged by.
        bound: [C] no partition takes less.
    """

    counts: IntArray
    constant: FloatArray
    parts: FloatArray
    bound: FloatArray


class Estimator:
    """Seconds and bytes of layouts; keeps what layouts have in common."""

    def __init__(self, costs: CostModel, demand: Demand) -> None:
        self.costs, self.demand = costs, demand
        self.modules = costs.model.modules
        self.num_layers = np.array([module.num_layers for module in self.modules])
        self._fixed: dict[tuple[int, int, int, bool], tuple[float, float, float, float]] = {}
        self._neighbours: dict[ParallelDegrees, float] = {}

    def load(self, module: int, layout: Layout) -> ModuleDemand:
        """What a global batch asks of a device of a module under its degrees and recompute."""
        return self.demand.of(module, layout.tensor[module], layout.context[module], layout.recompute[module])

    def seconds(self, layout: Layout, counts: IntArray) -> Seconds:
        """Predicted seconds of a layout for several numbers of microbatches."""
        data, pipeline = layout.degrees.data, layout.degrees.pipeline
        constant = np.zeros(len(counts))
        parts = np.zeros((4, len(self.modules), len(counts)))
        widest = np.zeros(len(counts))
        for index, module in enumerate(self.modules):
            load, fixed = self.load(index, layout), self._fixed_seconds(index, layout)
            held = self._held_parameters(index, layout)
            trains = (module.trained, module.trained, module.output_trained)
            for piece, one in enumerate((load.layer, load.input, load.output)):
                mean = one.total / (data * counts)
                times = module.num_layers if piece == 0 else 1
                constant += times * (np.maximum(mean, one.largest) + fixed[piece])
                update = self._update_seconds(layout, index, held[piece] * trains[piece])
                parts[piece, index] = (counts - 1) * (mean + fixed[piece]) + update
            constant += fixed[3]
            parts[3, index] = (counts - 1) * fixed[3]
            widest = np.maximum(widest, self._message_bytes(index, layout, data * counts))
        latency = self.costs.links.latency_seconds
        if pipeline > 1:
            stages = max(pipeline - len(self.modules), 0)
            constant += stages * max(self._fixed_seconds(i, layout)[3] for i in range(len(self.modules)))
            constant += 2 * (pipeline - 1) * (latency + widest / self._speed(layout.degrees))
        constant += 2 * (data * max(layout.context) - 1) * latency
        return Seconds(counts=counts, constant=constant, parts=parts, bound=constant + self._bound(layout, parts))

    def _bound(self, layout: Layout, parts: FloatArray) -> FloatArray:
        """[C] no rank can be faster: the mean over ranks (of a module, where it has its own), or the largest layer."""
        layer, first, last, stage = parts
        single = (layer + stage).max(axis=0)
        if layout.ranks:
            ranks = np.array(layout.ranks)[:, None]
            work = (self.num_layers[:, None] * layer + first + last) / ranks + stage
            return np.maximum(work.max(axis=0), single)
        total = (self.num_layers[:, None] * layer + first + last + stage).sum(axis=0)
        return np.maximum(total / layout.degrees.pipeline, single)

    def _speed(self, degrees: ParallelDegrees) -> float:
        if degrees not in self._neighbours:
            self._neighbours[degrees] = self.costs.links.neighbours(degrees)
        return self._neighbours[degrees]

    def _held_parameters(self, index: int, layout: Layout) -> tuple[float, float, float]:
        """`memory.held_parameters`, with the copy of the embedding that a tied head on another rank has."""
        module = self.modules[index]
        layer, entry, exit_ = memory.held_parameters(module, layout.tensor[index])
        is_copied = bool(module.vocabulary_size) and self.costs.model.tied_embeddings and layout.degrees.pipeline > 1
        return layer, entry, exit_ + (entry if is_copied else 0.0)

    def _trained_bytes(self, index: int, layout: Layout) -> float:
        """Gradients of a whole module on one device: no stage has more."""
        module = self.modules[index]
        layer, entry, exit_ = self._held_parameters(index, layout)
        body = (module.num_layers * layer + entry) * module.trained
        return (body + exit_ * module.output_trained) * self.costs.precision.gradient_bytes

    def _fixed_seconds(self, index: int, layout: Layout) -> tuple[float, float, float, float]:
        """Forward plus backward fixed seconds of one layer, of the first and last piece, and of each stage's action."""
        module, tensor, context = self.modules[index], layout.tensor[index], layout.context[index]
        recompute = layout.recompute[index]
        key = (index, tensor, context, recompute)
        if key not in self._fixed:
            whole = (0, module.num_layers)
            lines = [
                self.costs.stage_lines(module, whole, backward=b, tensor=tensor, context=context, recompute=recompute)
                for b in (False, True)
            ]
            first, layer, output = (sum(pair[i].fixed_seconds for pair in lines) for i in range(3))
            actions = 1 + self.costs.has_backward(module, whole)
            self._fixed[key] = (layer / module.num_layers, first, output, actions * self.costs.action_seconds)
        return self._fixed[key]

    def _update_seconds(self, layout: Layout, index: int, trained_parameters: float) -> float:
        """Reduction (without latency) and optimizer step of some parameters of a module."""
        degrees, context = layout.degrees, layout.context[index]
        latency = 2 * (degrees.data * context - 1) * self.costs.links.latency_seconds
        num_bytes = trained_parameters * self.costs.precision.gradient_bytes
        reduction = max(self.costs.links.all_reduce_seconds(degrees, num_bytes, context) - latency, 0.0)
        return reduction + trained_parameters * self.costs.step_seconds_per_parameter

    def mib(self, layout: Layout, count: int, *, one_in_flight: bool) -> tuple[PartTicks, ...]:
        """Per pipeline rank: MiB that layers of each module take on one of its devices."""
        data, pipeline = layout.degrees.data, layout.degrees.pipeline
        columns = np.zeros((4, len(self.modules), pipeline))
        for index, module in enumerate(self.modules):
            columns[:, index] = self._module_bytes(index, module, layout, data, pipeline, count, one_in_flight)
        whole = np.ceil(columns / MIB - 1e-9).astype(np.int64).transpose(2, 0, 1).tolist()
        return tuple(
            PartTicks(layer=tuple(layer), first=tuple(first), last=tuple(last), stage=tuple(stage))
            for layer, first, last, stage in whole
        )

    def _module_bytes(
        self, index: int, module: ModuleSpec, layout: Layout, data: int, pipeline: int, count: int, one_in_flight: bool
    ) -> FloatArray:
        """[4, pipeline] bytes of one layer, the first piece, the last piece, and of each stage."""
        model, precision = self.costs.model, self.costs.precision
        load, tensor, recompute = self.load(index, layout), layout.tensor[index], layout.recompute[index]
        is_llm, reduced = bool(module.vocabulary_size), data * layout.context[index] > 1
        shares = data if layout.sharded else 1
        inner = (0, max(module.num_layers - 1, 1))
        trains = is_llm or (self.costs.has_backward(module, inner) if module.num_layers > 1 else module.trained)
        following = np.ones(pipeline) if one_in_flight else pipeline - np.arange(pipeline) + (0 if is_llm else 1)
        depth = np.minimum(count, following)
        largest = load.amount.of_worst_microbatch(data, count)
        mean = load.amount.of_microbatch(data, count)
        held = np.minimum(largest + (depth - 1) * mean, max(load.amount.total / data, largest))

        def static(parameters: float, trained: bool) -> float:
            found = memory.parameter_bytes(
                parameters, trained=trained, precision=precision, reduced=reduced, shares=shares
            )
            return found.total

        layer_parameters, entry_parameters, exit_parameters = self._held_parameters(index, layout)
        whole_layer = memory.layer_activation_bytes(module, precision, tensor)
        kept = memory.layer_activation_bytes(module, precision, tensor, recompute=recompute)
        layer = static(layer_parameters, module.trained) + (kept * held if trains else np.zeros(pipeline))
        entry = memory.input_activation_bytes(module, precision) * (held if trains else np.full(pipeline, largest))
        first = entry + static(entry_parameters, module.trained)
        outputs = load.outputs.of_worst_microbatch(data, count)
        last = static(exit_parameters, module.output_trained) + np.zeros(pipeline)
        if is_llm:
            last += self.costs.divided_logit_bytes(tensor) * outputs
        else:
            ratio = outputs / largest if largest else 0.0
            last += memory.output_activation_bytes(module, model.llm, precision) * held * ratio
        message = float(self._message_bytes(index, layout, data * count)) if pipeline > 1 else 0.0
        stage = 2 * message + (0.0 if trains and not recompute else whole_layer * largest)
        if shares > 1:
            table = memory.table_copy_bytes(module, precision, tensor, shares)
            first, last = first + table * module.trained, last + table * module.output_trained
            stage += min(BUCKET_BYTES, self._trained_bytes(index, layout)) if module.anything_trained else 0.0
        return np.stack([layer, first, last, np.full(pipeline, stage)])

    def _message_bytes(self, index: int, layout: Layout, microbatches: int | IntArray) -> FloatArray:
        """What a device hands on of a mean microbatch, per number of microbatches of all replicas."""
        module, load, width = self.modules[index], self.load(index, layout), self.costs.precision.weight_bytes
        per_microbatch = 1 / np.asarray(microbatches, dtype=np.float64)
        inside = load.amount.total * per_microbatch * module.hidden_size * width
        if module.vocabulary_size:
            return inside
        # Where the language model has fewer devices to receive with, each gets more than one of the encoder's sends.
        own, target = layout.context[index], layout.context[-1]
        outside = load.outputs.total * per_microbatch * self.costs.model.llm.hidden_size * width
        return np.maximum(inside, outside * own / min(own, target))
