"""The part of a model that one rank holds, and what each of its stages computes.

Cutting is by parameter: every parameter of the Hugging Face model has exactly one place, each stage owns the places in
its layer range, and a rank keeps the parameters of its stages under their original names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import Plan
from entrain_opt.runtime.dropout import DropoutKey, seed_dropout
from entrain_opt.runtime.families import INPUT, OUTPUT, UNUSED, Family, MediaUnit, Place, Span, read_family
from entrain_opt.runtime.lora import Lora, add_adapters, draw_adapters, is_adapter, plain_name
from entrain_opt.runtime.master import MasterWeights
from entrain_opt.runtime.p2p import PipelineGroups
from entrain_opt.runtime.recompute import layer_of, recompute_layers
from entrain_opt.runtime.sharded import ShardedWeights
from entrain_opt.runtime.shards import Shard
from entrain_opt.runtime.tensor_group import TensorGroup
from entrain_opt.runtime.tensor_layers import DividedModel, cut_parameters, divide, join_devices
from entrain_opt.runtime.trained import check_frozen_layers, trains
from entrain_opt.runtime.weights import keep_only, load_safetensors, materialize, tie, weight_homes


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedText:
    """The samples of one language-model microbatch in one row (T tokens, S samples).

    Attributes:
        segment_offsets: [S + 1] token offsets of the samples.
        position_ids: [T], or [axes, T] where a family has several.
        input_ids: [T]; needed by the first stage only.
        label_ids: [L] next tokens to predict, and
        label_positions: [L] the rows that predict them; needed by the last stage only.
        feature_positions: for each source unit, the rows that its features go to; needed by the first stage only.
        feature_rows: for each source unit, the rows of its features that this microbatch takes; None for all.
        two_way_spans: rows that attend to each other in both directions.
        sample_rows: [S] rows of the samples in the table; needed by the last stage only.
    """

    segment_offsets: list[int]
    position_ids: Tensor
    input_ids: Tensor | None = None
    label_ids: Tensor | None = None
    label_positions: Tensor | None = None
    feature_positions: tuple[Tensor, ...] = ()
    feature_rows: tuple[Tensor | None, ...] = ()
    two_way_spans: tuple[Span, ...] = ()
    sample_rows: tuple[int, ...] = ()


class RankModel(nn.Module):
    """The pruned Hugging Face model of one rank, with its stages as methods.

    Attributes:
        model: the Hugging Face model; parameters of other ranks are None.
        stages: indices (into `plan.stages`) of the stages on this rank.
        tensor: the devices that share its layers.
        divided: how this device holds them.
    """

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        plan: Plan,
        stages: tuple[int, ...],
        tensor: TensorGroup | None = None,
        divided: DividedModel | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.family = family
        self.plan = plan
        self.stages = stages
        self.tensor = tensor or TensorGroup()
        self.divided = divided or DividedModel()
        self.num_layers = family.num_layers()
        self.masters = MasterWeights({})
        self.dropout_key = DropoutKey()

    def keep_masters(self, groups: PipelineGroups | None = None) -> None:
        """Keep what the optimizer updates in place of parameters; a second call changes nothing.

        That is float32 masters of trained parameters in a shorter type, and this replica's rows where the plan shards
        the optimizer's state. To be called on the device, before the optimizer is made.

        Args:
            groups: of this rank; needed where the plan shards the optimizer's state.
        """
        if self.masters:
            return
        parameters = dict(self.model.named_parameters())
        if not self.plan.shards_state:
            self.masters = MasterWeights(parameters)
            return
        if groups is None or groups.data is None:
            raise RuntimeConfigError("data_parallel: sharded needs the groups of `make_groups`, on every rank.")
        self.masters = ShardedWeights(parameters, groups)

    def optimized_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of this rank by Hugging Face name, each replaced by what the optimizer updates in its place.

        Parameters of which this replica updates nothing are left out.
        """
        found = {plain_name(name): self.masters.of(parameter) for name, parameter in self.model.named_parameters()}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    def shards(self) -> dict[str, Shard]:
        """Part of each divided parameter of this rank, by the names of `optimized_parameters`."""
        parts = self.divided.shards
        found = {n: self.masters.shard_of(parameter, parts.get(n)) for n, parameter in self.model.named_parameters()}
        return {plain_name(name): shard for name, shard in found.items() if shard is not None}

    def stage_parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """Trained parameters that a stage's backward pass reaches, by name; a tied one under its owner's name."""
        family, plan, tied = self.family, self.plan, self.family.tied()
        found: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            place = family.place(name)
            if parameter.requires_grad and place.position != UNUSED and stage_of(place, plan) == stage:
                found[tied.get(name, name)] = parameter
        return found

    def encode(self, stage: int, hidden: Tensor, unit: MediaUnit) -> Tensor:
        """One encoder stage: pixels or hidden states -> hidden states or features."""
        return self.family.encode(self.model, hidden, self.plan.stages[stage].layers, unit)

    def decode(self, stage: int, text: PackedText, hidden: Tensor | None, features: list[Tensor]) -> Tensor:
        """One language-model stage without the head: [T, width] -> [T, width].

        The first stage takes ids from `text` and features; they replace the rows of the media placeholders.
        """
        layers = self.plan.stages[stage].layers
        if layers[0] == 0:
            assert text.input_ids is not None
            hidden = self.family.embed(self.model, text.input_ids)
            for positions, rows, feature in zip(text.feature_positions, text.feature_rows, features, strict=True):
                chosen = feature if rows is None else feature.index_select(0, rows)
                hidden = hidden.index_copy(0, positions, chosen.to(hidden.dtype))
        assert hidden is not None
        return self.family.decode(
            self.model, hidden, text.position_ids, text.segment_offsets, layers, text.two_way_spans
        )

    def is_first_llm_stage(self, stage: int) -> bool:
        return self.plan.stages[stage].module == "llm" and self.plan.stages[stage].layers[0] == 0

    def is_last_llm_stage(self, stage: int) -> bool:
        return stage == len(self.plan.stages) - 1

    def loss_sum(self, text: PackedText, hidden: Tensor) -> Tensor:
        """Cross-entropy summed over the label tokens of one microbatch; logits exist at those rows only."""
        assert text.label_ids is not None
        assert text.label_positions is not None
        logits = self.family.logits(self.model, hidden.index_select(0, text.label_positions)).float()
        if self.divided.head is not None:
            first = self.divided.shards[self.divided.head].ranges[0][0]
            return self.tensor.cross_entropy_sum(logits, text.label_ids, first)
        return nn.functional.cross_entropy(logits, text.label_ids, reduction="sum")


def stage_of(place: Place, plan: Plan) -> int:
    """Index of the stage that owns a place."""
    candidates = [index for index, stage in enumerate(plan.stages) if stage.module == place.module]
    if not candidates:
        raise RuntimeConfigError(f"plan: no stage holds module {place.module!r} of {plan.model}.")
    if place.position == INPUT:
        return candidates[0]
    if place.position in (OUTPUT, UNUSED):
        return candidates[-1]
    for index in candidates:
        first, end = plan.stages[index].layers
        if first <= int(place.position) < end:
            return index
    raise RuntimeConfigError(f"plan: no stage holds layer {place.position} of module {place.module!r}.")


def build_rank_model(
    folder: str | Path,
    plan: Plan,
    pipeline_rank: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    frozen_layers: Mapping[str, int] | None = None,
    lora: Lora | None = None,
    tensor: TensorGroup | None = None,
) -> RankModel:
    """Build what one device of a pipeline rank holds, on the CPU, with frozen parts set not to require gradients.

    Args:
        folder: model folder in Hugging Face format; its safetensors are read if present, else `seed` decides.
        plan: checked against the model's layers.
        pipeline_rank: rank within the replica.
        seed: of the initial weights.
        dtype: of the parameters.
        frozen_layers: {module: how many of its first layers do not train}; their embedding does not train either.
        lora: adapters, checked against what is frozen.
        tensor: the devices that share the rank's layers; as many as the plan says.

    Raises:
        RuntimeConfigError: unknown family or parameter, missing weights, layers that the model does not have, or ones
            that cannot be divided.
        PlanError: the plan is for another model.
    """
    folder = Path(folder)
    family = read_family(folder)
    plan.check(num_layers=family.num_layers())
    tensor = tensor or TensorGroup()
    if plan.degrees.tensor_of(pipeline_rank) != tensor.size:
        raise RuntimeConfigError(
            f"degrees.tensor: pipeline rank {pipeline_rank} has {plan.degrees.tensor_of(pipeline_rank)} devices, built "
            f"for {tensor.size}. Pass `tensor` of `make_groups`."
        )
    frozen_layers = frozen_layers or {}
    check_frozen_layers(frozen_layers, family)
    with torch.device("meta"):
        model = family.build()
    # What the plain model never trains (fixed position tables) is not trained here either.
    constant = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if lora is not None:
        with torch.device("meta"):
            add_adapters(model, family, lora)
    stages = plan.pipeline_shape.stages_of_rank(pipeline_rank)
    tied = family.tied()
    names = set()
    for name, _ in model.named_parameters(remove_duplicate=False):
        if stage_of(family.place(name), plan) in stages:
            names |= {name, tied.get(name, name)}
    removed = keep_only(model, names)
    divided = divide(model, family, plan, tensor) if tensor.size > 1 else DividedModel()
    # What is drawn is drawn whole, so that values do not depend on the degree; what is read is read in part.
    base = {name: shard for name, shard in divided.shards.items() if not is_adapter(name)}
    homes, drawn = weight_homes(model, family, folder)
    if not drawn:
        cut_parameters(model, base)
    materialize(model, removed, seed=seed if drawn else None, dtype=dtype)
    tie(model, tied)
    cut_parameters(model, base)
    for part, home in homes:
        load_safetensors(model, family, home, part=part, shards=base)
    draw_adapters(dict(model.named_parameters()), seed)
    cut_parameters(model, divided.shards)
    join_devices(model, divided, tensor)
    adapted = () if lora is None else lora.parts
    for name, parameter in model.named_parameters():
        place = family.place(name)
        beside_adapters = place.part in adapted and not is_adapter(name)
        may_train = plain_name(name) not in constant and not beside_adapters
        parameter.requires_grad_(trains(place, plan.frozen, frozen_layers) and may_train)
    layers = _layers(model, family, plan)
    recompute_layers(model, [name for name, recompute in layers.items() if recompute])
    rank_model = RankModel(model, family, plan, stages, tensor, divided)
    rank_model.dropout_key.seed = seed
    seed_dropout(model, layers, rank_model.dropout_key)
    return rank_model


def _layers(model: nn.Module, family: Family, plan: Plan) -> dict[str, bool]:
    """The layers that this rank holds, by module name, and whether the plan recomputes each."""
    found = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        place = family.place(name)
        if isinstance(place.position, int):
            found[layer_of(name)] = plan.stages[stage_of(place, plan)].recompute
    return found


def tied_stages(folder: str | Path, plan: Plan) -> tuple[int, ...]:
    """Stages that hold a parameter which is one tensor in the model; empty if nothing is tied."""
    family = read_family(folder)
    names = {name for pair in family.tied().items() for name in pair}
    return tuple(sorted({stage_of(family.place(name), plan) for name in names}))
