"""CostModel: how long and how big, measured or analytic behind one interface.

A stage costs layers * layer + what its first and last layer bring along: the patch or token embedding on a module's
first stage, the projector or norm, head and loss on its last (the head computes at label positions only). Backward
passes follow what trains: see `PartCosts.backward_line`. Everything is vectorised over items; a global batch of 4,096
samples takes about a millisecond per stage.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entrain_opt.assignment import BatchCosts, StageCosts
from entrain_opt.cost import memory
from entrain_opt.cost.alike import AlikeStages
from entrain_opt.cost.analytic import MESSAGE_LATENCY_SECONDS, analytic_costs
from entrain_opt.cost.attention import mean_squares
from entrain_opt.cost.context import context_costs
from entrain_opt.cost.features import ItemFeatures, encoder_of_media, module_features
from entrain_opt.cost.lines import Line, ModuleCosts
from entrain_opt.cost.links import Links
from entrain_opt.cost.messages import StageMessages
from entrain_opt.cost.precision import find_precision
from entrain_opt.cost.profile import MeasuredCosts
from entrain_opt.cost.tensor import divided_costs
from entrain_opt.cost.update import UpdateCosts
from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import ParallelDegrees, Plan, StagePlan
from entrain_opt.spec.cluster import ClusterSpec
from entrain_opt.spec.model import ModelSpec, ModuleSpec
from entrain_opt.workload.samples import SampleTable

FloatArray = NDArray[np.float64]


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
        self.step_seconds_per_parameter = self.precision.step_bytes / device.memory_bytes_per_second
        self.modules: dict[str, ModuleCosts] = {}
        self._divided: dict[tuple[str, int, int], ModuleCosts] = {}
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

    def layer_seconds(
        self, module: str, segments: ArrayLike, *, backward: bool = False, tensor: int = 1, context: int = 1
    ) -> float:
        """One layer of a module (the mean one, where they differ) on packed segments, its fixed part included.

        Args:
            module: name of the module.
            segments: lengths of the attention segments, in patches or tokens.
            backward: the backward pass, as the model's frozen parts make it.
            tensor, context: degrees of the module.
        """
        lengths, spec = np.asarray(segments, dtype=np.float64), self.model.module(module)
        lines = self.module_costs(spec.name, tensor, context).layer
        line = lines.forward
        if backward:
            line = lines.backward_line(trained=spec.trained, upstream_trained=self._upstream(spec))
        items = line.item_seconds(mean_squares(spec, lengths).sum(), lengths.sum(), len(lengths))
        return float(items) + line.fixed_seconds

    def module_costs(self, module: str, tensor: int = 1, context: int = 1) -> ModuleCosts:
        """Lines of a module whose samples are divided over `context` groups of `tensor` devices sharing its layers."""
        if tensor == context == 1:
            return self.modules[module]
        key, spec = (module, tensor, context), self.model.module(module)
        if key not in self._divided:
            links, precision = self.links, self.precision
            shared = divided_costs(
                self.modules[module],
                spec,
                self.model,
                tensor,
                links=links,
                device=self.cluster.device_spec,
                precision=precision,
            )
            self._divided[key] = context_costs(
                shared, spec, self.model, context, tensor=tensor, links=links, precision=precision
            )
        return self._divided[key]

    def module_seconds(self, samples: SampleTable, plan: Plan | None = None) -> tuple[FloatArray, FloatArray]:
        """Forward seconds of whole modules: [M] per media item of its encoder, [N] per sample of the language model.

        Args:
            samples: the samples.
            plan: whose tensor and context degrees hold; None takes 1.
        """
        features = module_features(samples, self.model)
        ranks = {stage.module: stage.rank for stage in plan.stages} if plan else {}
        degrees = plan.degrees if plan else ParallelDegrees()

        def seconds(module: ModuleSpec) -> FloatArray:
            rank, whole = ranks.get(module.name, 0), (0, module.num_layers)
            tensor, context = degrees.tensor_of(rank), degrees.context_of(rank)
            return self.stage_item_seconds(module, whole, features[module.name], tensor=tensor, context=context)

        encoder = np.zeros(samples.num_media)
        for module in self.model.encoders:
            encoder += seconds(module)
        return encoder, seconds(self.model.llm)

    def stage_lines(
        self,
        module: ModuleSpec,
        layers: tuple[int, int],
        *,
        backward: bool = False,
        tensor: int = 1,
        context: int = 1,
        recompute: bool = False,
    ) -> tuple[Line, Line, Line]:
        """Lines of a stage's embedding, all its layers, and its projector or head (zero where it has none).

        Args:
            module: the module.
            layers: of the stage.
            backward: the backward pass.
            tensor: devices that share the stage's layers.
            context: devices, or such groups, that its samples are divided over.
            recompute: the backward pass of layers begins with another forward.
        """
        costs, (first, end) = self.module_costs(module.name, tensor, context), layers
        has_output = end == module.num_layers
        upstream = self._upstream(module)
        if not backward:
            parts = (costs.input.forward, costs.layer.forward, costs.output.forward)
        else:
            parts = (
                costs.input.backward_line(trained=module.trained, upstream_trained=module.trained),
                costs.layer.backward_line(trained=module.trained, upstream_trained=upstream, recompute=recompute),
                costs.output.backward_line(trained=module.output_trained, upstream_trained=upstream),
            )
        return (
            parts[0] if first == 0 else Line(),
            parts[1].scaled(end - first),
            parts[2] if has_output else Line(),
        )

    def stage_item_seconds(
        self,
        module: ModuleSpec,
        layers: tuple[int, int],
        features: ItemFeatures,
        *,
        backward: bool = False,
        tensor: int = 1,
        context: int = 1,
        recompute: bool = False,
    ) -> FloatArray:
        """[items] seconds of a stage, without its fixed part; arguments as for `stage_lines`."""
        how = _How(tensor=tensor, context=context, recompute=recompute)
        entry, body, exit_ = self.stage_lines(module, layers, backward=backward, **how)
        return features.input_seconds(entry) + features.layer_seconds(body, layers) + features.output_seconds(exit_)

    def stage_fixed_seconds(
        self,
        module: ModuleSpec,
        layers: tuple[int, int],
        *,
        backward: bool = False,
        tensor: int = 1,
        context: int = 1,
        recompute: bool = False,
    ) -> float:
        """What a stage costs once per microbatch (or part of one); 0 for a backward that does not run."""
        how = _How(tensor=tensor, context=context, recompute=recompute)
        lines = self.stage_lines(module, layers, backward=backward, **how)
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
        encoder_seconds, llm_seconds = self.module_seconds(samples, plan)
        specs = [self.model.module(stage.module) for stage in plan.stages]
        alike, messages = AlikeStages(self.model, plan), StageMessages(self.model, plan, self.precision)
        update = self.update

        def items(i: int, backward: bool) -> FloatArray:
            spec, how = specs[i], self._how(plan, i)
            return self.stage_item_seconds(spec, plan.stages[i].layers, features[spec.name], backward=backward, **how)

        def fixed(i: int, backward: bool) -> float:
            return self.stage_fixed_seconds(specs[i], plan.stages[i].layers, backward=backward, **self._how(plan, i))

        splits = alike.each(lambda i: self._split_costs(plan, i, features))
        stages = StageCosts(
            num_encoder_stages=plan.pipeline_shape.num_encoder_stages,
            forward_seconds=alike.each(lambda i: items(i, False)),
            backward_seconds=alike.each(lambda i: items(i, True)),
            weight_gradient_share=alike.each(lambda i: self._weight_share(plan, i, features)),
            split_share=tuple(share for share, _ in splits),
            split_fixed_seconds=tuple(seconds for _, seconds in splits),
            forward_fixed_seconds=alike.each(lambda i: fixed(i, False)),
            backward_fixed_seconds=alike.each(lambda i: fixed(i, True)),
            send_seconds=messages.send_seconds(self.links, features),
            send_fixed_seconds=self.links.latency_seconds,
            reduce_seconds=alike.each(lambda i: update.reduce_seconds(plan, i)),
            step_seconds=alike.each(lambda i: update.step_seconds(plan, i)),
            weight_bytes=alike.each(lambda i: self.static_bytes(plan.stages[i], plan.degrees, plan.num_shares).total),
            activation_bytes=alike.each(lambda i: self.activation_bytes(plan.stages[i], samples, plan.degrees)),
            output_bytes=alike.each(messages.token_bytes),
            logit_bytes=self.logit_bytes(plan.degrees, plan.stages[-1].rank),
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

    @staticmethod
    def _how(plan: Plan, stage: int) -> _How:
        rank, recompute = plan.stages[stage].rank, plan.stages[stage].recompute
        degrees = plan.degrees
        return {"tensor": degrees.tensor_of(rank), "context": degrees.context_of(rank), "recompute": recompute}

    def logit_bytes(self, degrees: ParallelDegrees, rank: int) -> float:
        """Per label token of a microbatch on one device of the last rank: logits and what the norm and head keep."""
        return self.divided_logit_bytes(degrees.tensor_of(rank)) / degrees.context_of(rank)

    def divided_logit_bytes(self, tensor: int) -> float:
        """`logit_bytes` per label token that the device has of its own."""
        llm = self.model.llm
        kept = memory.output_activation_bytes(llm, llm, self.precision)
        return memory.logit_bytes(llm, self.precision) / tensor + kept

    @property
    def update(self) -> UpdateCosts:
        """Seconds of the end of an iteration."""
        return UpdateCosts(
            model=self.model,
            links=self.links,
            precision=self.precision,
            step_seconds_per_parameter=self.step_seconds_per_parameter,
        )

    def static_bytes(self, stage: StagePlan, degrees: ParallelDegrees, shares: int = 1) -> memory.StaticBytes:
        """Weights, gradients, optimizer state and reduction buffer of a stage, on one device.

        Args:
            stage: of a plan.
            degrees: of that plan.
            shares: replicas that share out the optimizer's state (`Plan.num_shares`).
        """
        module, tensor = self.model.module(stage.module), degrees.tensor_of(stage.rank)
        reduced = degrees.data * degrees.context_of(stage.rank) > 1
        return memory.stage_bytes(
            self.model,
            module,
            stage.layers,
            precision=self.precision,
            reduced=reduced,
            tensor=tensor,
            shares=shares,
        )

    def layer_bytes(self, stage: StagePlan, degrees: ParallelDegrees) -> float:
        """Per patch or token that a device keeps of one layer without recompute: what is held of one recomputed."""
        module, tensor = self.model.module(stage.module), degrees.tensor_of(stage.rank)
        return memory.layer_activation_bytes(module, self.precision, tensor) / degrees.context_of(stage.rank)

    def activation_bytes(self, stage: StagePlan, samples: SampleTable, degrees: ParallelDegrees) -> float:
        """Per patch or token in flight, what a device of the stage holds; the head's are counted per label."""
        module, (first, end) = self.model.module(stage.module), stage.layers
        tensor, context = degrees.tensor_of(stage.rank), degrees.context_of(stage.rank)
        trains = self.has_backward(module, stage.layers)
        if trains and self._upstream(module):
            recompute = stage.recompute
            per_layer = memory.layer_activation_bytes(module, self.precision, tensor, recompute=recompute)
            held = per_layer * (end - first)
        else:
            held = memory.layer_activation_bytes(module, self.precision, tensor)
        if first == 0 and trains:
            held += memory.input_activation_bytes(module, self.precision)
        if end == module.num_layers and not module.vocabulary_size:
            mine = encoder_of_media(samples, self.model) == self.model.encoders.index(module)
            patches = max(float(samples.media_patches[mine].sum()), 1.0)
            ratio = float(samples.media_tokens[mine].sum()) / patches
            held += ratio * memory.output_activation_bytes(module, self.model.llm, self.precision)
        return held / context

    def _weight_share(self, plan: Plan, index: int, features: dict[str, ItemFeatures]) -> float:
        """Part of a stage's backward that computes weight gradients only; none with recompute, which runs it whole."""
        stage, how = plan.stages[index], self._how(plan, index)
        spec, (first, end) = self.model.module(stage.module), stage.layers
        item = features[spec.name]
        total = float(self.stage_item_seconds(spec, stage.layers, item, backward=True, **how).sum())
        if total <= 0 or stage.recompute:
            return 0.0
        costs = self.module_costs(spec.name, how["tensor"], how["context"])
        weights = 0.0
        if spec.trained:
            line = costs.layer.backward.without(costs.layer.input_backward)
            weights += float(item.layer_seconds(line, stage.layers).sum()) * (end - first)
            if first == 0:
                weights += float(item.input_seconds(costs.input.backward.without(costs.input.input_backward)).sum())
        if spec.output_trained and end == spec.num_layers:
            weights += float(item.output_seconds(costs.output.backward.without(costs.output.input_backward)).sum())
        return min(weights / total, 1.0)

    def _split_costs(self, plan: Plan, index: int, features: dict[str, ItemFeatures]) -> tuple[float, float]:
        """`StageCosts.split_share` and `split_fixed_seconds` of a stage; nothing where a backward always runs whole."""
        stage, how = plan.stages[index], self._how(plan, index)
        spec, (first, end) = self.model.module(stage.module), stage.layers
        layer = self.module_costs(spec.name, how["tensor"], how["context"]).layer
        if stage.recompute or not spec.trained or layer.split_backward is None:
            return 0.0, 0.0
        layers, item, lines = end - first, features[spec.name], (layer.backward, layer.split_backward)
        whole, split = (layers * item.layer_seconds(line, stage.layers).sum() for line in lines)
        total = max(self.stage_item_seconds(spec, stage.layers, item, backward=True, **how).sum(), 1e-300)
        fixed = layers * (layer.split_backward.fixed_seconds - layer.backward.fixed_seconds)
        return float(max(split - whole, 0.0) / total), max(fixed, 0.0)


class _How(TypedDict):
    """How a stage runs, as arguments of `CostModel.stage_lines`."""

    tensor: int
    context: int
    recompute: bool
