"""What a plan says: which ranks exist, which layers each holds, what was promised and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from entrain_opt.errors import PlanError
from entrain_opt.plan.files import read_yaml_record, write_yaml
from entrain_opt.plan.shape import PipelineShape
from entrain_opt.plan.shares import ALL_REDUCE, DATA_PARALLELS, SHARDED
from entrain_opt.spec.model import TOWER_PARTS


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDegrees:
    """How many ranks each axis of the device mesh has.

    A pipeline rank is `tensor * context` devices: context ones hold the same layers and compute on parts of each
    sample, tensor ones share the layers of one such part. Both are one number for all pipeline ranks, or one for each.
    """

    data: int = 1
    pipeline: int = 1
    tensor: int | tuple[int, ...] = 1
    context: int | tuple[int, ...] = 1

    @classmethod
    def of_modules(
        cls, *, data: int, ranks: tuple[int, ...], tensor: tuple[int, ...], context: tuple[int, ...]
    ) -> ParallelDegrees:
        """The mesh of modules in chain order: pipeline ranks of each, and the degrees of them all."""

        def spread(degrees: tuple[int, ...]) -> int | tuple[int, ...]:
            if len(set(degrees)) == 1:
                return degrees[0]
            return tuple(degree for degree, count in zip(degrees, ranks, strict=True) for _ in range(count))

        return cls(data=data, pipeline=sum(ranks), tensor=spread(tensor), context=spread(context))

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Devices of each pipeline rank that share its layers."""
        return self._of_ranks(self.tensor)

    @property
    def context_degrees(self) -> tuple[int, ...]:
        """Parts of a sample that each pipeline rank computes on at once."""
        return self._of_ranks(self.context)

    def _of_ranks(self, degree: int | tuple[int, ...]) -> tuple[int, ...]:
        return (degree,) * self.pipeline if isinstance(degree, int) else degree

    @property
    def widths(self) -> tuple[int, ...]:
        """Devices of each pipeline rank."""
        return tuple(t * c for t, c in zip(self.tensor_degrees, self.context_degrees, strict=True))

    @property
    def replica_size(self) -> int:
        """Devices of one replica."""
        return sum(self.widths)

    @property
    def world_size(self) -> int:
        return self.data * self.replica_size

    def check(self, world_size: int) -> None:
        """Raise PlanError if a degree cannot be, or if they do not multiply to the number of ranks."""
        self.check_values()
        if self.world_size != world_size:
            how = f"pipeline ({self.pipeline})"
            if (self.tensor, self.context) != (1, 1):
                context = f", context {self.context}" if self.context != 1 else ""
                how = f"{self.replica_size} devices of a replica (pipeline {self.pipeline}, tensor {self.tensor}"
                how += f"{context})"
            raise PlanError(
                f"degrees: data ({self.data}) * {how} = {self.world_size} ranks, but {world_size} were launched. "
                f"Launch {self.world_size} ranks or make a new plan with `entrain plan`."
            )

    def check_values(self) -> None:
        """Raise PlanError if a degree is below 1 or there are not as many of a kind as pipeline ranks."""
        for name in ("data", "pipeline"):
            if getattr(self, name) < 1:
                raise PlanError(f"degrees.{name}: expected at least 1, found {getattr(self, name)}.")
        for name, degrees in (("tensor", self.tensor_degrees), ("context", self.context_degrees)):
            if len(degrees) != self.pipeline or min(degrees) < 1:
                raise PlanError(
                    f"degrees.{name}: expected a number of at least 1, or one for each of {self.pipeline} pipeline "
                    f"ranks, found {getattr(self, name)}."
                )

    def tensor_of(self, pipeline_rank: int) -> int:
        """Devices that share the layers of a pipeline rank."""
        return self.tensor if isinstance(self.tensor, int) else self.tensor[pipeline_rank]

    def context_of(self, pipeline_rank: int) -> int:
        """Parts of a sample that a pipeline rank computes on at once."""
        return self.context if isinstance(self.context, int) else self.context[pipeline_rank]

    def global_rank(self, replica: int, pipeline_rank: int, place: int = 0) -> int:
        """Ranks of one replica are neighbours, and within it those of one pipeline rank: they talk most.

        Args:
            replica: which.
            pipeline_rank: within it.
            place: within the pipeline rank; the tensor group of context part i starts at i * tensor.
        """
        if isinstance(self.tensor, int) and isinstance(self.context, int):
            before = pipeline_rank * self.tensor * self.context
        else:
            before = sum(self.widths[:pipeline_rank])
        return replica * self.replica_size + before + place

    def global_ranks(self, pipeline_rank: int) -> list[int]:
        """All that hold a pipeline rank's layers, in all replicas."""
        places = range(self.widths[pipeline_rank])
        return [self.global_rank(replica, pipeline_rank, place) for replica in range(self.data) for place in places]

    def place_of(self, global_rank: int) -> tuple[int, int, int]:
        """(replica, pipeline rank, place among its devices): the inverse of `global_rank`."""
        replica, rest = divmod(global_rank, self.replica_size)
        for pipeline_rank, width in enumerate(self.widths):
            if rest < width:
                return replica, pipeline_rank, rest
            rest -= width
        raise AssertionError("divmod leaves less than the size of a replica")


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """Consecutive layers of one module on one pipeline rank.

    Attributes:
        module: `vision`, `audio` or `llm`.
        layers: first layer and one past the last.
        rank: pipeline rank within a replica.
        recompute: whether layers keep their inputs only and run forward again in the backward pass.
    """

    module: str
    layers: tuple[int, int]
    rank: int
    recompute: bool = False

    @property
    def num_layers(self) -> int:
        return self.layers[1] - self.layers[0]

    @property
    def label(self) -> str:
        """`llm[0:4]@2`: module, layers and pipeline rank."""
        return f"{self.module}[{self.layers[0]}:{self.layers[1]}]@{self.rank}"


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
    num_dropped: int = 0
    """Choices left out before the solver, which do not fit or cannot be faster."""
    candidates: tuple[dict[str, Any], ...] = ()
    """The chosen one and the runners-up: degrees, stages, microbatches, predicted seconds, and why they lost."""
    stability: dict[str, Any] | None = None
    """From what batch size on the plan stays right, with its probability statement (`planner/stability.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One static parallel configuration."""

    model: str
    degrees: ParallelDegrees
    stages: tuple[StagePlan, ...]
    global_batch_size: int
    num_microbatches: int
    """Per replica; the assigner may use fewer on a batch that has less work."""
    schedule: str = "eager"
    policy: str = "auto"
    frozen: tuple[str, ...] = ()
    patches_in_flight: int | None = None
    tokens_in_flight: int | None = None
    data_parallel: str = ALL_REDUCE
    """`all_reduce`: every replica sums all gradients and updates all weights. `sharded`: each has the sum, the float32
    masters and the optimizer's state of its rows alone, updates them, and gets the others' weights once per step."""
    predicted: Prediction | None = None
    provenance: Provenance = field(default_factory=lambda: Provenance(method="manual", cost_source="none"))

    @property
    def shards_state(self) -> bool:
        """Whether replicas share out the optimizer's state; one replica has nobody to share it with."""
        return self.data_parallel == SHARDED and self.degrees.data > 1

    @property
    def num_shares(self) -> int:
        """Replicas that share out the optimizer's state; 1 if each holds all of it."""
        return self.degrees.data if self.shards_state else 1

    @property
    def encoder_modules(self) -> tuple[str, ...]:
        """Names of the encoders in stage order."""
        return tuple(dict.fromkeys(stage.module for stage in self.stages if stage.module != "llm"))

    @property
    def pipeline_shape(self) -> PipelineShape:
        """The stages of one replica, as the assigner and simulator see them."""
        tower_trained = {name: TOWER_PARTS.get(name, "") not in self.frozen for name in self.encoder_modules}
        projector_trained = "projector" not in self.frozen
        llm_trained = "language_model" not in self.frozen
        has_backward = []
        for index, stage in enumerate(self.stages):
            is_last = index + 1 == len(self.stages) or self.stages[index + 1].module != stage.module
            if stage.module == "llm":
                has_backward.append(any(tower_trained.values()) or projector_trained or llm_trained)
            else:
                has_backward.append(tower_trained[stage.module] or (projector_trained and is_last))
        return PipelineShape(
            encoder_stages=tuple(sum(stage.module == name for stage in self.stages) for name in self.encoder_modules)
            or 0,
            llm_stages=sum(stage.module == "llm" for stage in self.stages),
            encoder_trained=any(tower_trained.values()),
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
        for name in ("global_batch_size", "num_microbatches", "patches_in_flight", "tokens_in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name}: expected at least 1, found {value}.")
        if self.data_parallel not in DATA_PARALLELS:
            raise PlanError(f"data_parallel: expected one of {list(DATA_PARALLELS)}, found {self.data_parallel!r}.")
        if self.degrees.data > self.global_batch_size:
            raise PlanError(
                f"degrees.data: expected at most global_batch_size ({self.global_batch_size}) replicas, found "
                f"{self.degrees.data}."
            )
        self.degrees.check_values()
        for index, stage in enumerate(self.stages):
            if not 0 <= stage.rank < self.degrees.pipeline:
                raise PlanError(
                    f"stages[{index}].rank: expected 0 to {self.degrees.pipeline - 1} (degrees.pipeline = "
                    f"{self.degrees.pipeline}), found {stage.rank}."
                )
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
        for name, degree_of in (("tensor", self.degrees.tensor_of), ("context", self.degrees.context_of)):
            for module in (*self.encoder_modules, "llm"):
                degrees = sorted({degree_of(stage.rank) for stage in self.stages if stage.module == module})
                if len(degrees) > 1:
                    raise PlanError(
                        f"degrees.{name}: expected one degree for all pipeline ranks of module {module}, found "
                        f"{degrees}."
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
        plan = read_yaml_record(path, cls, "plan")
        try:
            plan.check()
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        return plan
