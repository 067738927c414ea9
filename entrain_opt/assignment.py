"""What a global batch costs, and which sample goes where: the input and output of the assigner.

Promise of `Assignment.check()`: every sample in exactly one language-model microbatch, every media item in exactly
one encoder microbatch of the same replica, and no sample's language-model work before its encoder work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entrain_opt.errors import AssignmentError
from entrain_opt.plan import PipelineShape

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """What each stage spends, stage by stage in the order of the `PipelineShape`.

    Per-item arrays have one value per media item (encoder stages) or per sample (language-model stages). A
    microbatch takes the sum over its items plus the fixed part.

    Attributes:
        num_encoder_stages: the first stages, whose items are media; the others' items are samples.
        forward_seconds, backward_seconds: per stage, per item. `backward_seconds` is 0 where nothing trains.
        weight_gradient_share: per stage, the part of the backward that computes weight gradients, 0 to 1.
        split_share, split_fixed_seconds: per stage, what a backward in two parts (input gradients, then weight
            gradients) takes beyond a whole one: a part of its items' seconds, and seconds each time. Empty: nothing.
        forward_fixed_seconds, backward_fixed_seconds: per stage and microbatch (or part of one).
        send_seconds: per stage, per item: its output to the next rank; the gradient back takes as long.
        send_fixed_seconds: latency of one message.
        reduce_seconds: per stage, data-parallel gradient reduction of one iteration.
        step_seconds: per stage, optimizer step.
        weight_bytes: per stage: weights, gradients and optimizer state.
        activation_bytes: per stage, per patch (encoder) or token (language model) of a microbatch in flight.
        output_bytes: per stage, per token sent on; what a deferred encoder output costs its holder.
        logit_bytes: per label token of the last stage, while its microbatch is in flight.
    """

    num_encoder_stages: int
    forward_seconds: tuple[FloatArray, ...]
    backward_seconds: tuple[FloatArray, ...]
    weight_gradient_share: tuple[float, ...]
    forward_fixed_seconds: tuple[float, ...]
    backward_fixed_seconds: tuple[float, ...]
    send_seconds: tuple[FloatArray, ...]
    send_fixed_seconds: float = 0.0
    split_share: tuple[float, ...] = ()
    split_fixed_seconds: tuple[float, ...] = ()
    reduce_seconds: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    weight_bytes: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    output_bytes: tuple[float, ...] = ()
    logit_bytes: float = 0.0

    def split_costs(self, stage: int) -> tuple[float, float]:
        """`split_share` and `split_fixed_seconds` of a stage."""
        share = self.split_share[stage] if self.split_share else 0.0
        return share, self.split_fixed_seconds[stage] if self.split_fixed_seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchCosts:
    """Forward seconds of whole modules for the samples of one global batch.

    Attributes:
        encoder_seconds: [M] per media item, or [N] per sample if `media_offsets` is None (0 marks a text-only sample).
        llm_seconds: [N] per sample.
        encoder_patches: like `encoder_seconds`; None counts each item as one patch.
        llm_tokens: [N]; None counts each sample as one token.
        label_tokens: [N]; None takes `llm_tokens`.
        media_offsets: [N + 1] or None for at most one media item per sample.
        media_encoder: [M] which encoder each item goes through; None for the only one.
        media_tokens: [M] tokens the language model sees of each item; None takes `encoder_patches`.
        stages: costs per stage; None spreads each module evenly over its stages, with a backward of twice the forward.
    """

    encoder_seconds: FloatArray
    llm_seconds: FloatArray
    encoder_patches: IntArray | None = None
    llm_tokens: IntArray | None = None
    label_tokens: IntArray | None = None
    media_offsets: IntArray | None = None
    media_encoder: IntArray | None = None
    media_tokens: IntArray | None = None
    stages: StageCosts | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "encoder_seconds", np.asarray(self.encoder_seconds, dtype=np.float64))
        set_field(self, "llm_seconds", np.asarray(self.llm_seconds, dtype=np.float64))
        integers = ("encoder_patches", "llm_tokens", "label_tokens", "media_offsets", "media_encoder", "media_tokens")
        for name in integers:
            if getattr(self, name) is not None:
                set_field(self, name, np.asarray(getattr(self, name), dtype=np.int64))
        if self.media_offsets is None:
            if len(self.encoder_seconds) != len(self.llm_seconds):
                raise AssignmentError(
                    f"encoder_seconds: expected one value per sample ({len(self.llm_seconds)}) or media_offsets, "
                    f"found {len(self.encoder_seconds)}."
                )
        elif self.media_offsets.shape != (len(self.llm_seconds) + 1,) or self.media_offsets[-1] != len(
            self.encoder_seconds
        ):
            raise AssignmentError(
                f"media_offsets: expected {len(self.llm_seconds) + 1} offsets ending at {len(self.encoder_seconds)}, "
                f"found {self.media_offsets}."
            )
        for name, length in (
            ("encoder_patches", len(self.encoder_seconds)),
            ("media_encoder", len(self.encoder_seconds)),
            ("media_tokens", len(self.encoder_seconds)),
            ("llm_tokens", len(self.llm_seconds)),
            ("label_tokens", len(self.llm_seconds)),
        ):
            values = getattr(self, name)
            if values is not None and values.shape != (length,):
                raise AssignmentError(f"{name}: expected {length} values, found {values.shape}.")
        for name in ("encoder_seconds", "llm_seconds"):
            values = getattr(self, name)
            if not np.isfinite(values).all() or (values < 0).any():
                raise AssignmentError(f"{name}: expected finite seconds of at least 0, found {values.min()}.")

    @property
    def num_samples(self) -> int:
        return len(self.llm_seconds)

    @property
    def num_media(self) -> int:
        """Length of the per-media arrays."""
        return len(self.encoder_seconds)

    @property
    def media_sample(self) -> IntArray:
        """[M] sample of each media item."""
        if self.media_offsets is None:
            return np.arange(self.num_samples)
        return np.repeat(np.arange(self.num_samples), np.diff(self.media_offsets))

    @property
    def has_media(self) -> NDArray[np.bool_]:
        """[M] False only for the placeholder entry of a text-only sample when `media_offsets` is None."""
        if self.media_offsets is not None:
            return np.ones(self.num_media, dtype=bool)
        patches = np.zeros(self.num_media) if self.encoder_patches is None else self.encoder_patches
        return (self.encoder_seconds > 0) | (patches > 0)

    @property
    def encoder_seconds_per_sample(self) -> FloatArray:
        """[N] sums over each sample's media items."""
        sums = np.bincount(self.media_sample, weights=self.encoder_seconds, minlength=self.num_samples)
        return sums.astype(np.float64)

    @property
    def patches(self) -> IntArray:
        """[M], with the default filled in."""
        return self.encoder_patches if self.encoder_patches is not None else self.has_media.astype(np.int64)

    @property
    def tokens(self) -> IntArray:
        """[N], with the default filled in."""
        return self.llm_tokens if self.llm_tokens is not None else np.ones(self.num_samples, dtype=np.int64)

    @property
    def encoder_index(self) -> IntArray:
        """[M], with the default filled in."""
        return self.media_encoder if self.media_encoder is not None else np.zeros(self.num_media, dtype=np.int64)

    @property
    def feature_tokens(self) -> IntArray:
        """[M] tokens handed to the language model, with the default filled in."""
        return self.media_tokens if self.media_tokens is not None else self.patches

    def stage_costs(self, shape: PipelineShape) -> StageCosts:
        """The per-stage costs given, or each module spread evenly over its stages."""
        if self.stages is not None:
            return self.stages
        zeros_media, zeros_samples = np.zeros(self.num_media), np.zeros(self.num_samples)
        forward: list[FloatArray] = []
        for encoder, count in enumerate(shape.encoder_stage_counts):
            forward += [np.where(self.encoder_index == encoder, self.encoder_seconds, 0.0) / count] * count
        forward += [self.llm_seconds / shape.llm_stages] * shape.llm_stages
        backward = tuple(2 * f if has else 0 * f for f, has in zip(forward, shape.has_backward, strict=True))
        num_stages = shape.num_stages
        return StageCosts(
            num_encoder_stages=shape.num_encoder_stages,
            forward_seconds=tuple(forward),
            backward_seconds=backward,
            weight_gradient_share=(0.5,) * num_stages,
            forward_fixed_seconds=(0.0,) * num_stages,
            backward_fixed_seconds=(0.0,) * num_stages,
            send_seconds=(zeros_media,) * shape.num_encoder_stages + (zeros_samples,) * shape.llm_stages,
            reduce_seconds=(0.0,) * num_stages,
            step_seconds=(0.0,) * num_stages,
            weight_bytes=(0.0,) * num_stages,
            activation_bytes=(1.0,) * num_stages,
            output_bytes=(0.0,) * num_stages,
        )

    def take(self, samples: ArrayLike) -> BatchCosts:
        """The costs of some samples, in the given order; per-stage costs follow."""
        samples = np.asarray(samples, dtype=np.int64)
        if self.media_offsets is None:
            media, offsets = samples, None
        else:
            counts = np.diff(self.media_offsets)[samples]
            offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
            media = np.arange(offsets[-1]) + np.repeat(self.media_offsets[samples] - offsets[:-1], counts)

        def pick(values: IntArray | None, rows: IntArray) -> IntArray | None:
            return None if values is None else values[rows]

        stages = self.stages
        if stages is not None:
            first_llm_stage = stages.num_encoder_stages

            def per_stage(arrays: tuple[FloatArray, ...]) -> tuple[FloatArray, ...]:
                return tuple(a[media if i < first_llm_stage else samples] for i, a in enumerate(arrays))

            stages = replace(
                stages,
                forward_seconds=per_stage(stages.forward_seconds),
                backward_seconds=per_stage(stages.backward_seconds),
                send_seconds=per_stage(stages.send_seconds),
            )
        return BatchCosts(
            encoder_seconds=self.encoder_seconds[media],
            llm_seconds=self.llm_seconds[samples],
            encoder_patches=pick(self.encoder_patches, media),
            llm_tokens=pick(self.llm_tokens, samples),
            label_tokens=pick(self.label_tokens, samples),
            media_offsets=offsets,
            media_encoder=pick(self.media_encoder, media),
            media_tokens=pick(self.media_tokens, media),
            stages=stages,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Which sample in which microbatch.

    Attributes:
        replica: [N] data-parallel replica of each sample.
        encoder_microbatch: [M] microbatch in which each media item is encoded; -1 for no media.
        llm_microbatch: [N] microbatch in which each sample's language-model part runs, never before its encoder part.
        num_microbatches: [num_replicas] microbatches of each replica; 0 for a replica without samples.
        policy: the policy that made it.
    """

    replica: IntArray
    encoder_microbatch: IntArray
    llm_microbatch: IntArray
    num_microbatches: IntArray
    policy: str = ""

    @property
    def num_replicas(self) -> int:
        return len(self.num_microbatches)

    def deferred_samples(self, costs: BatchCosts) -> IntArray:
        """Indices of the samples whose language-model part waits for a later microbatch than some encoder part."""
        waits = (self.encoder_microbatch >= 0) & (self.encoder_microbatch < self.llm_microbatch[costs.media_sample])
        return np.unique(costs.media_sample[waits])

    def check(self, costs: BatchCosts, shape: PipelineShape | None = None) -> None:
        """Raise AssignmentError unless every item is placed exactly once, in order, and under the memory caps.

        The cap of one microbatch is the stage's whole budget: a microbatch above it could never run.
        """
        expected = {"replica": costs.num_samples, "llm_microbatch": costs.num_samples}
        expected["encoder_microbatch"] = costs.num_media
        for name, length in expected.items():
            if getattr(self, name).shape != (length,):
                raise AssignmentError(f"{name}: expected {length} values, found {getattr(self, name).shape}.")
        self._check_range("replica", self.replica, self.num_replicas)
        limits = self.num_microbatches[self.replica]
        self._check_range("llm_microbatch", self.llm_microbatch, limits)
        media, sample = costs.has_media, costs.media_sample
        self._check_range("encoder_microbatch", self.encoder_microbatch[media], limits[sample][media])
        if (self.encoder_microbatch[~media] != -1).any():
            raise AssignmentError("encoder_microbatch: expected -1 for a sample without media.")
        early = media & (self.encoder_microbatch > self.llm_microbatch[sample])
        if early.any():
            item = int(np.flatnonzero(early)[0])
            raise AssignmentError(
                f"llm_microbatch: sample {sample[item]} runs in microbatch {self.llm_microbatch[sample[item]]}, before "
                f"its media item {item} is encoded in {self.encoder_microbatch[item]}."
            )
        if shape is not None:
            self._check_memory(costs, shape)

    def _check_range(self, name: str, values: IntArray, limit: IntArray | int) -> None:
        outside = (values < 0) | (values >= limit)
        if outside.any():
            index = int(np.flatnonzero(outside)[0])
            bound = int(np.broadcast_to(limit, values.shape)[index])
            raise AssignmentError(f"{name}[{index}]: expected 0 to {bound - 1}, found {values[index]}.")

    def _check_memory(self, costs: BatchCosts, shape: PipelineShape) -> None:
        media = costs.has_media
        loads = (
            (
                "patches_in_flight",
                shape.patches_limit,
                self.replica[costs.media_sample][media],
                self.encoder_microbatch[media],
                costs.patches[media],
            ),
            ("tokens_in_flight", shape.tokens_limit, self.replica, self.llm_microbatch, costs.tokens),
        )
        for name, limit, replica, microbatch, amount in loads:
            if limit is None or not len(amount):
                continue
            width = int(self.num_microbatches.max())
            sums = np.bincount(replica * width + microbatch, weights=amount)
            if sums.max() > limit:
                worst = int(sums.argmax())
                raise AssignmentError(
                    f"{name}: replica {worst // width} microbatch {worst % width} holds {sums.max():.0f}, the limit is "
                    f"{limit}. Use more microbatches or allow more memory."
                )
