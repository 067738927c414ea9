"""The records every later part shares: which ranks exist, which layers each holds, what was promised.

A `Plan` is a YAML file that a human can read and edit; `Plan.check()` validates the edits. A `PipelineShape` is the
little that the assigner and simulator need of it, and can be written by hand without any plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from entrain_opt.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineShape:
    """The stages of one replica: every encoder's stages first, then the language model's.

    Stage indices count through that order. Several encoders are parallel branches that meet at the first
    language-model stage.

    Attributes:
        encoder_stages: stages of the encoder, or of each of several encoders; 0 for no encoder.
        llm_stages: stages of the language model.
        encoder_trained: whether every encoder stage runs a backward pass.
        patches_in_flight: patches whose activations one encoder stage may hold, the same for all or one value for each
            encoder stage; None is unlimited.
        tokens_in_flight: tokens whose activations one language-model stage may hold, likewise.
        stage_ranks: pipeline rank of each stage; None puts each stage on a rank of its own. Stages that share a
            rank are either colocated modules or the chunks of an interleaved schedule.
        stage_has_backward: whether each stage runs a backward pass; None follows from `encoder_trained`, with every
            language-model stage running one.
    """

    encoder_stages: int | tuple[int, ...] = 1
    llm_stages: int = 1
    encoder_trained: bool = True
    patches_in_flight: int | tuple[int, ...] | None = None
    tokens_in_flight: int | tuple[int, ...] | None = None
    stage_ranks: tuple[int, ...] | None = None
    stage_has_backward: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if any(count < 0 for count in self.encoder_stage_counts) or self.llm_stages < 1:
            raise PlanError(
                f"encoder_stages and llm_stages: expected at least 0 and 1, found {self.encoder_stages} and "
                f"{self.llm_stages}."
            )
        for name in ("stage_ranks", "stage_has_backward"):
            values = getattr(self, name)
            if values is not None and len(values) != self.num_stages:
                raise PlanError(f"{name}: expected one value for each of {self.num_stages} stages, found {values}.")
        limits = (
            ("patches_in_flight", self.patches_in_flight, self.num_encoder_stages),
            ("tokens_in_flight", self.tokens_in_flight, self.llm_stages),
        )
        for name, limit, count in limits:
            if isinstance(limit, tuple) and len(limit) != count:
                raise PlanError(f"{name}: expected one value, or one for each of {count} stages, found {limit}.")
        if set(self.ranks_of_stages) != set(range(self.num_ranks)):
            raise PlanError(f"stage_ranks: expected every rank from 0 to hold a stage, found {self.stage_ranks}.")

    @property
    def encoder_stage_counts(self) -> tuple[int, ...]:
        """Stages of each encoder; empty without an encoder."""
        counts = self.encoder_stages if isinstance(self.encoder_stages, tuple) else (self.encoder_stages,)
        return () if counts == (0,) else counts

    @property
    def num_encoders(self) -> int:
        return len(self.encoder_stage_counts)

    @property
    def num_encoder_stages(self) -> int:
        return sum(self.encoder_stage_counts)

    @property
    def num_stages(self) -> int:
        return self.num_encoder_stages + self.llm_stages

    @property
    def ranks_of_stages(self) -> tuple[int, ...]:
        return self.stage_ranks if self.stage_ranks is not None else tuple(range(self.num_stages))

    @property
    def num_ranks(self) -> int:
        return max(self.ranks_of_stages) + 1

    @property
    def has_backward(self) -> tuple[bool, ...]:
        if self.stage_has_backward is not None:
            return self.stage_has_backward
        return (self.encoder_trained,) * self.num_encoder_stages + (True,) * self.llm_stages

    @property
    def stage_limits(self) -> tuple[int | None, ...]:
        """Per stage, the patches (encoder) or tokens (language model) whose activations it may hold."""

        def spread(limit: int | tuple[int, ...] | None, count: int) -> tuple[int | None, ...]:
            return limit if isinstance(limit, tuple) else (limit,) * count

        return (
            *spread(self.patches_in_flight, self.num_encoder_stages),
            *spread(self.tokens_in_flight, self.llm_stages),
        )

    @property
    def patches_limit(self) -> int | None:
        """The smallest limit of the encoder stages: what one encoder microbatch may hold."""
        limits = [limit for limit in self.stage_limits[: self.num_encoder_stages] if limit is not None]
        return min(limits, default=None)

    @property
    def tokens_limit(self) -> int | None:
        """The smallest limit of the language-model stages: what one microbatch may hold."""
        limits = [limit for limit in self.stage_limits[self.num_encoder_stages :] if limit is not None]
        return min(limits, default=None)

    def stages_of_encoder(self, encoder: int) -> range:
        first = sum(self.encoder_stage_counts[:encoder])
        return range(first, first + self.encoder_stage_counts[encoder])

    @property
    def stages_of_llm(self) -> range:
        return range(self.num_encoder_stages, self.num_stages)

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.ranks_of_stages) if owner == rank)

    def encoder_of_stage(self, stage: int) -> int | None:
        """Index of the encoder that a stage belongs to; None for a language-model stage."""
        for encoder in range(self.num_encoders):
            if stage in self.stages_of_encoder(encoder):
                return encoder
        return None

    def encoder_has_backward(self, encoder: int) -> bool:
        """Whether the language model returns gradients to this encoder (its last stage has a backward pass)."""
        return self.has_backward[self.stages_of_encoder(encoder)[-1]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDegrees:
    """How many ranks each axis of the device mesh has."""

    data: int = 1
    pipeline: int = 1

    @property
    def world_size(self) -> int:
        return self.data * self.pipeline

    def check(self, world_size: int) -> None:
        """Raise PlanError if the degrees do not multiply to the number of ranks."""
        if self.world_size != world_size:
            raise PlanError(
                f"degrees: data ({self.data}) * pipeline ({self.pipeline}) = {self.world_size} ranks, but {world_size} "
                f"were launched. Launch {self.world_size} ranks or make a new plan with `entrain plan`."
            )

    def global_rank(self, replica: int, pipeline_rank: int) -> int:
        """Ranks of one replica are neighbours: their messages are the frequent ones."""
        return replica * self.pipeline + pipeline_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Consecutive layers of one module on one pipeline rank.

    Attributes:
        module: `vision`, `audio` or `llm`.
        layers: first layer and one past the last.
        rank: pipeline rank within a replica.
    """

    module: str
    layers: tuple[int, int]
    rank: int

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the plan promises; every number comes from the cost model named in the provenance."""

    iteration_seconds: float
    bubble_share: float
    samples_per_second: float
    tokens_per_second: float
    peak_bytes: tuple[int, ...]
    """Per pipeline rank."""
    peak_bytes_parts: tuple[dict[str, int], ...] = ()
    """What makes up the peak of each pipeline rank."""
    model_flops_utilization: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a plan comes from and how sure the solver is."""

    method: str
    cost_source: str
    """`measured`, `analytic`, or `none` for a plan written by hand."""
    solver_status: str = ""
    objective_seconds: float | None = None
    bound_seconds: float | None = None
    gap: float | None = None
    seed: int = 0
    input_hash: str = ""
    """Changes when the model, data statistics, cluster or options change."""
    candidates: tuple[dict[str, Any], ...] = ()
    """The runners-up: degrees, stages, microbatches, predicted seconds, and why they lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One static parallel configuration."""

    model: str
    degrees: ParallelDegrees
    stages: tuple[StagePlan, ...]
    global_batch_size: int
    num_microbatches: int
    """Per replica; the assigner may use fewer on a batch that has less work."""
    schedule: str = "1f1b"
    policy: str = "pairwise"
    frozen: tuple[str, ...] = ()
    patches_in_flight: int | None = None
    tokens_in_flight: int | None = None
    predicted: Prediction | None = None
    provenance: Provenance = field(default_factory=lambda: Provenance(method="manual", cost_source="none"))

    @property
    def encoder_modules(self) -> tuple[str, ...]:
        """Names of the encoders in stage order."""
        return tuple(dict.fromkeys(stage.module for stage in self.stages if stage.module != "llm"))

    @property
    def pipeline_shape(self) -> PipelineShape:
        """The stages of one replica, as the assigner and simulator see them."""
        tower_trained = "vision_tower" not in self.frozen
        projector_trained = "projector" not in self.frozen
        llm_trained = "language_model" not in self.frozen
        has_backward = []
        for index, stage in enumerate(self.stages):
            is_last = index + 1 == len(self.stages) or self.stages[index + 1].module != stage.module
            if stage.module == "llm":
                has_backward.append(tower_trained or projector_trained or llm_trained)
            else:
                has_backward.append(tower_trained or (projector_trained and is_last))
        return PipelineShape(
            encoder_stages=tuple(sum(stage.module == name for stage in self.stages) for name in self.encoder_modules)
            or 0,
            llm_stages=sum(stage.module == "llm" for stage in self.stages),
            encoder_trained=tower_trained,
            patches_in_flight=self.patches_in_flight,
            tokens_in_flight=self.tokens_in_flight,
            stage_ranks=tuple(stage.rank for stage in self.stages),
            stage_has_backward=tuple(has_backward),
        )

    def check(self, *, num_layers: Mapping[str, int] | None = None) -> None:
        """Raise PlanError naming the field, its value and what was expected.

        Args:
            num_layers: layers of each module of the model, if known, to prove that none is lost or held twice.
        """
        for name in ("global_batch_size", "num_microbatches"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}: expected at least 1, found {getattr(self, name)}.")
        order = [stage.module for stage in self.stages]
        if not order or order[-1] != "llm" or "llm" in self.encoder_modules:
            raise PlanError(
                f"stages: expected the encoders' stages first and at least one llm stage last, found {order}."
            )
        if sorted(order, key=[*self.encoder_modules, "llm"].index) != order:
            raise PlanError(f"stages: expected the stages of a module to follow each other, found {order}.")
        for module in (*self.encoder_modules, "llm"):
            next_layer = 0
            for index, stage in enumerate(self.stages):
                if stage.module != module:
                    continue
                first, end = stage.layers
                if first != next_layer or end <= first:
                    raise PlanError(
                        f"stages[{index}].layers: expected {module} layers from {next_layer} on, found "
                        f"[{first}, {end}]."
                    )
                next_layer = end
            if num_layers is not None and next_layer != num_layers.get(module):
                raise PlanError(
                    f"stages: module {module} of {self.model} has {num_layers.get(module)} layers, the plan holds "
                    f"{next_layer}. Make a new plan with `entrain plan`."
                )
        if num_layers is not None and set(num_layers) != {*self.encoder_modules, "llm"}:
            raise PlanError(f"stages: expected the modules {sorted(num_layers)}, found {sorted(set(order))}.")
        if self.pipeline_shape.num_ranks != self.degrees.pipeline:
            raise PlanError(
                f"stages: expected pipeline ranks 0 to {self.degrees.pipeline - 1} (degrees.pipeline), found "
                f"{sorted({stage.rank for stage in self.stages})}."
            )

    def write(self, path: str | Path) -> None:
        """Write YAML, whole or not at all."""
        write_yaml(self, path)

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read and check a plan.

        Raises:
            PlanError: the file is missing, is not a plan, or fails `check()`.
        """
        import yaml

        path = Path(path)
        if not path.is_file():
            raise PlanError(f"plan: no file {path}. Make one with `entrain plan --config RECIPE`.")
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise PlanError(f"plan {path}: not valid YAML: {error}") from error
        try:
            plan = _from_plain(cls, content, "plan")
            plan.check()
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        return plan


def write_yaml(record: Any, path: str | Path) -> None:
    """Write a record's plain values, whole or not at all."""
    import yaml

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".partial")
    scratch.write_text(yaml.safe_dump(to_plain(record), sort_keys=False, width=120), encoding="utf-8")
    scratch.replace(path)


def to_plain(record: Any) -> Any:
    """Dataclasses, tuples and NumPy numbers as plain YAML values."""
    if hasattr(record, "__dataclass_fields__"):
        return to_plain(asdict(record))
    if isinstance(record, Mapping):
        return {key: to_plain(value) for key, value in record.items()}
    if isinstance(record, (tuple, list)):
        return [to_plain(value) for value in record]
    return record.item() if hasattr(record, "item") else record


_NESTED = {"degrees": ParallelDegrees, "predicted": Prediction, "provenance": Provenance}


def _from_plain(record: type, content: Any, where: str) -> Any:
    """Build a record from YAML values, naming any key that is missing or unknown."""
    if not isinstance(content, Mapping):
        raise PlanError(f"{where}: expected a mapping of fields, found {type(content).__name__}.")
    known = {item.name for item in fields(record)}
    if unknown := sorted(set(content) - known):
        raise PlanError(f"{where}: unknown field {unknown[0]!r}; expected one of {sorted(known)}.")
    values: dict[str, Any] = {}
    for name, value in content.items():
        if name in _NESTED and value is not None:
            value = _from_plain(_NESTED[name], value, f"{where}.{name}")
        elif name == "stages":
            value = tuple(_from_plain(StagePlan, item, f"{where}.stages[{i}]") for i, item in enumerate(value))
        elif isinstance(value, list):
            value = tuple(value)
        values[name] = value
    try:
        return record(**values)
    except TypeError as error:
        raise PlanError(f"{where}: {error}") from error
