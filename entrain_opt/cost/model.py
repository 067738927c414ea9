"""CostModel: how long and how big, measured or analytic behind one interface.

A stage costs layers * layer + what its first and last layer bring along: the patch or token embedding on a module's
first stage, the projector or norm, head and loss on its last (the head computes at label positions only). Backward
passes follow what trains: see `PartCosts.backward_line`. Everything is vectorised over items; a global batch of 4,096
samples takes about a millisecond per stage.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entrain_opt.assignment import BatchCosts, StageCosts
from entrain_opt.cost import memory
from entrain_opt.cost.analytic import MESSAGE_LATENCY_SECONDS, analytic_costs
from entrain_opt.cost.attention import mean_squares
from entrain_opt.cost.features import ItemFeatures, encoder_of_media, module_features
from entrain_opt.cost.lines import Line, ModuleCosts
from entrain_opt.cost.links import Links
from entrain_opt.cost.precision import find_precision
from entrain_opt.cost.profile import MeasuredCosts
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import Plan, StagePlan
from entrain_opt.spec.cluster import ClusterSpec
from entrain_opt.spec.model import ModelSpec, ModuleSpec
from entrain_opt.workload.samples import SampleTable

FloatArray = NDArray[np.float64]

#: The AdamW step reads weight, gradient and two moments and writes all but the gradient.
_STEP_VALUES = 7


class CostModel:
    """Predicts seconds and bytes of a model on a cluster.

    Args:
        model: what trains in it is part of the spec (`ModelSpec.from_pretrained(..., frozen=...)`).
        cluster: devices and links.
        measured: lines measured on the device at hand; None takes the analytic ones of the cluster's device.
        precision: Lightning's name of it: `32-true`, `bf16-mixed` or `bf16-true`.

    Raises:
        RuntimeConfigError: an unknown precision, or measured costs of another model, precision or frozen parts.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        *,
        measured: MeasuredCosts | None = None,
        precision: str = "32-true",
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.measured = measured
        self.precision = find_precision(precision)
        self.source = "analytic" if measured is None else "measured"
        device = cluster.device_spec
        latency, self.action_seconds = MESSAGE_LATENCY_SECONDS, 2 * device.kernel_launch_seconds
        self.step_seconds_per_parameter = _STEP_VALUES * self.precision.weight_bytes / device.memory_bytes_per_second
        self.modules: dict[str, ModuleCosts] = {}
        if measured is None:
            self.modules = analytic_costs(model, device, self.precision)
            self.links = Links.of_cluster(cluster, latency)
            return
        measured.check(model)
        if measured.precision != precision:
            raise RuntimeConfigError(
                f"measured costs: expected precision {precision}, found {measured.precision}. Measure again with "
                "`entrain profile`."
            )
        self.modules = measured.modules
        self.action_seconds = measured.action_seconds
        self.step_seconds_per_parameter = measured.step_seconds_per_parameter
        self.links = Links.of_cluster(cluster, measured.message_latency_seconds or latency)
        if measured.message_bytes_per_second is not None:
            self.links = Links(
                latency_seconds=self.links.latency_seconds,
                link_bytes_per_second=measured.message_bytes_per_second,
                network_bytes_per_second=min(
                    measured.message_bytes_per_second, cluster.device_spec.network_bytes_per_second
                ),
                devices_per_node=cluster.devices_per_node,
            )

    def layer_seconds(self, module: str, segments: ArrayLike, *, backward: bool = False) -> float:
        """One layer of a module (the mean one, where they differ) on packed segments, its fixed part included.

        Args:
            module: name of the module.
            segments: lengths of the attention segments, in patches or tokens.
            backward: the backward pass, as the model's frozen parts make it.
        """
        lengths = np.asarray(segments, dtype=np.float64)
        lines = self.modules[self.model.module(module).name].layer
        spec = self.model.module(module)
        line = (
            lines.backward_line(trained=spec.trained, upstream_trained=self._upstream(spec))
            if backward
            else lines.forward
        )
        items = line.item_seconds(mean_squares(spec, lengths).sum(), lengths.sum(), len(lengths))
        return float(items) + line.fixed_seconds

    def module_seconds(self, samples: SampleTable) -> tuple[FloatArray, FloatArray]:
        """Forward seconds of whole modules: [M] per media item of its encoder, [N] per sample of the language model."""
        features = module_features(samples, self.model)
        encoder = np.zeros(samples.num_media)
        for module in self.model.encoders:
            encoder += self.stage_item_seconds(module, (0, module.num_layers), features[module.name])
        llm = self.model.llm
        return encoder, self.stage_item_seconds(llm, (0, llm.num_layers), features[llm.name])

    def stage_lines(
        self, module: ModuleSpec, layers: tuple[int, int], *, backward: bool = False
    ) -> tuple[Line, Line, Line]:
        """Lines of a stage's embedding, all its layers, and its projector or head (zero where it has none)."""
        costs, (first, end) = self.modules[module.name], layers
        has_output = end == module.num_layers
        upstream = self._upstream(module)
        if not backward:
            parts = (costs.input.forward, costs.layer.forward, costs.output.forward)
        else:
            parts = (
                costs.input.backward_line(trained=module.trained, upstream_trained=module.trained),
                costs.layer.backward_line(trained=module.trained, upstream_trained=upstream),
                costs.output.backward_line(trained=module.output_trained, upstream_trained=upstream),
            )
        return (
            parts[0] if first == 0 else Line(),
            parts[1].scaled(end - first),
            parts[2] if has_output else Line(),
        )

    def stage_item_seconds(
        self, module: ModuleSpec, layers: tuple[int, int], features: ItemFeatures, *, backward: bool = False
    ) -> FloatArray:
        """[items] seconds of a stage, without its fixed part."""
        entry, body, exit_ = self.stage_lines(module, layers, backward=backward)
        return features.input_seconds(entry) + features.layer_seconds(body, layers) + features.output_seconds(exit_)

    def stage_fixed_seconds(self, module: ModuleSpec, layers: tuple[int, int], *, backward: bool = False) -> float:
        """What a stage costs once per microbatch (or part of one); 0 for a backward that does not run."""
        lines = self.stage_lines(module, layers, backward=backward)
        if backward and not self.has_backward(module, layers):
            return 0.0
        return sum(line.fixed_seconds for line in lines) + self.action_seconds

    def has_backward(self, module: ModuleSpec, layers: tuple[int, int]) -> bool:
        """Whether a stage has a backward pass."""
        return module.trained or self._upstream(module) or (module.output_trained and layers[1] == module.num_layers)

    def _upstream(self, module: ModuleSpec) -> bool:
        """Whether gradients are asked for at the input of a module's layers."""
        if module.name != self.model.llm.name:
            return module.trained
        return module.trained or any(encoder.anything_trained for encoder in self.model.encoders)

    def batch_costs(self, samples: SampleTable, plan: Plan) -> BatchCosts:
        """Costs of a global batch for the stages of a plan; the input of the assigner and the simulator.

        Args:
            samples: the global batch.
            plan: for this model.

        Raises:
            PlanError: the plan is for another model.
            WorkloadError: a media kind has no encoder.
        """
        plan.check(num_layers={module.name: module.num_layers for module in self.model.modules})
        features = module_features(samples, self.model)
        encoder_seconds, llm_seconds = self.module_seconds(samples)
        specs = [self.model.module(stage.module) for stage in plan.stages]
        forward = [
            self.stage_item_seconds(spec, stage.layers, features[spec.name])
            for spec, stage in zip(specs, plan.stages, strict=True)
        ]
        backward = [
            self.stage_item_seconds(spec, stage.layers, features[spec.name], backward=True)
            for spec, stage in zip(specs, plan.stages, strict=True)
        ]
        numbers = range(len(plan.stages))
        stages = StageCosts(
            num_encoder_stages=plan.pipeline_shape.num_encoder_stages,
            forward_seconds=tuple(forward),
            backward_seconds=tuple(backward),
            weight_gradient_share=tuple(self._weight_share(specs[i], plan.stages[i], features) for i in numbers),
            forward_fixed_seconds=tuple(self.stage_fixed_seconds(specs[i], plan.stages[i].layers) for i in numbers),
            backward_fixed_seconds=tuple(
                self.stage_fixed_seconds(specs[i], plan.stages[i].layers, backward=True) for i in numbers
            ),
            send_seconds=tuple(self._send_seconds(plan, i, features) for i in numbers),
            send_fixed_seconds=self.links.latency_seconds,
            reduce_seconds=tuple(self.reduce_seconds(plan, i) for i in numbers),
            step_seconds=tuple(
                memory.trained_parameters(specs[i], plan.stages[i].layers) * self.step_seconds_per_parameter
                for i in numbers
            ),
            weight_bytes=tuple(self.static_bytes(plan.stages[i], plan.degrees.data).total for i in numbers),
            activation_bytes=tuple(self.activation_bytes(plan.stages[i], samples) for i in numbers),
            output_bytes=tuple(self._output_width(plan.stages[i]) for i in numbers),
            logit_bytes=self.logit_bytes,
        )
        return BatchCosts(
            encoder_seconds=encoder_seconds,
            llm_seconds=llm_seconds,
            encoder_patches=samples.media_patches,
            llm_tokens=samples.total_tokens,
            label_tokens=samples.label_tokens,
            media_offsets=samples.media_offsets,
            media_encoder=encoder_of_media(samples, self.model),
            media_tokens=samples.media_tokens,
            stages=stages,
        )

    @property
    def logit_bytes(self) -> float:
        """Per label token of a microbatch on the last stage: logits and what the norm and head keep."""
        llm = self.model.llm
        return memory.logit_bytes(llm, self.precision) + memory.output_activation_bytes(llm, llm, self.precision)

    def reduce_seconds(self, plan: Plan, stage: int) -> float:
        """Sum of a stage's gradients over the replicas, and of a tied embedding over its two holders."""
        spec = self.model.module(plan.stages[stage].module)
        trained = memory.trained_parameters(spec, plan.stages[stage].layers)
        seconds = self.links.all_reduce_seconds(plan.degrees, trained * self.precision.gradient_bytes)
        llm_stages = [i for i, other in enumerate(plan.stages) if other.module == spec.name]
        ends = {llm_stages[0], llm_stages[-1]}
        if self.model.tied_embeddings and spec.vocabulary_size and spec.trained and len(ends) == 2 and stage in ends:
            ranks = [plan.stages[end].rank for end in sorted(ends)]
            speed = self.links.between(plan.degrees, *ranks)
            seconds += spec.input_parameters * self.precision.gradient_bytes / speed + self.links.latency_seconds
        return seconds

    def static_bytes(self, stage: StagePlan, data_degree: int) -> memory.StaticBytes:
        """Weights, gradients, optimizer state and reduction buffer of a stage."""
        module = self.model.module(stage.module)
        return memory.stage_bytes(self.model, module, stage.layers, precision=self.precision, reduced=data_degree > 1)

    def activation_bytes(self, stage: StagePlan, samples: SampleTable) -> float:
        """Per patch (encoder) or token (language model) in flight on a stage; the head's are counted per label."""
        module = self.model.module(stage.module)
        first, end = stage.layers
        per_layer = memory.layer_activation_bytes(module, self.precision)
        trains = self.has_backward(module, stage.layers)
        held = per_layer * (end - first if trains and self._upstream(module) else 1)
        if first == 0 and trains:
            held += memory.input_activation_bytes(module, self.precision)
        if end == module.num_layers and not module.vocabulary_size:
            ratio = float(samples.media_tokens.sum()) / max(float(samples.media_patches.sum()), 1.0)
            held += ratio * memory.output_activation_bytes(module, self.model.llm, self.precision)
        return held

    def _output_width(self, stage: StagePlan) -> float:
        """Bytes per token (or patch, inside an encoder) that a stage hands on; messages have the weights' type."""
        module = self.model.module(stage.module)
        last_of_encoder = not module.vocabulary_size and stage.layers[1] == module.num_layers
        width = self.model.llm.hidden_size if last_of_encoder else module.hidden_size
        return float(width * self.precision.weight_bytes)

    def _send_seconds(self, plan: Plan, index: int, features: dict[str, ItemFeatures]) -> FloatArray:
        stage = plan.stages[index]
        item = features[stage.module]
        if index == len(plan.stages) - 1:
            return np.zeros(len(item.tokens))
        target = plan.stages[index + 1]
        amount = item.tokens
        if stage.module != self.model.llm.name and target.module != stage.module:
            target = next(other for other in plan.stages if other.module == self.model.llm.name)
            amount = item.outputs
        if target.rank == stage.rank:
            return np.zeros(len(item.tokens))
        speed = self.links.between(plan.degrees, stage.rank, target.rank)
        return amount * item.present * (self._output_width(stage) / speed)

    def _weight_share(self, spec: ModuleSpec, stage: StagePlan, features: dict[str, ItemFeatures]) -> float:
        """Part of a stage's backward that computes weight gradients and nothing that another stage waits for."""
        total = float(self.stage_item_seconds(spec, stage.layers, features[spec.name], backward=True).sum())
        if total <= 0:
            return 0.0
        costs, (first, end), item = self.modules[spec.name], stage.layers, features[spec.name]
        weights = 0.0
        if spec.trained:
            line = costs.layer.backward.without(costs.layer.input_backward)
            weights += float(item.layer_seconds(line, stage.layers).sum()) * (end - first)
            if first == 0:
                weights += float(item.input_seconds(costs.input.backward.without(costs.input.input_backward)).sum())
        if spec.output_trained and end == spec.num_layers:
            weights += float(item.output_seconds(costs.output.backward.without(costs.output.input_backward)).sum())
        return min(weights / total, 1.0)
