"""The stages of one replica as the assigner and simulator see them; can be written by hand without any plan."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def any_encoder_has_backward(self) -> bool:
        return any(self.encoder_has_backward(encoder) for encoder in range(self.num_encoders))

    def encoder_has_backward(self, encoder: int) -> bool:
        """Whether the language model returns gradients to this encoder (its last stage has a backward pass)."""
        return self.has_backward[self.stages_of_encoder(encoder)[-1]]
