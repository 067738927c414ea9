"""What a measurement times: embeddings, layers, projectors and head of a short model, on media of typical sizes.

1. Media are what the model's own media rule makes of pictures from 112 to 896 pixels a side and of clips: for a tower
   of squares some squares, for one of native resolution small and large grids, alone and several in a row.
2. What each pass computes on (squares, tokens, segments) comes from `module_features`, which the cost model asks too,
   windows included; so a fitted line is in the columns that it will be multiplied with.
3. A piece runs through the `Family`, as the executor runs it.

What a stage does once, whatever its layers (windows, rotary angles), is taken off the encoder's layers, because a
stage has many of them; it stays in what the first and the last stage measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from entrain_opt.cost.features import ItemFeatures, module_features
from entrain_opt.runtime.families import INPUT, OUTPUT, MediaUnit, Span
from entrain_opt.runtime.short_model import ShortModel
from entrain_opt.spec.model import ModuleSpec
from entrain_opt.workload.media import MediaRule
from entrain_opt.workload.samples import MEDIA_KINDS, SampleTable

#: (width, height) of the pictures of a unit, and seconds of the clips.
_PICTURES: tuple[tuple[tuple[int, int], ...], ...] = (
    *(((112, 112),) * count for count in (1, 2, 4, 8)), *(((224, 224),) * count for count in (1, 4)),
    *(((448, 448),) * count for count in (1, 2)), ((448, 224),), ((896, 112),), ((896, 448),), ((896, 896),),
)  # fmt: skip
_CLIPS = ((30.0,), (5.0,), (30.0,) * 2, (30.0,) * 4)
#: Units of more patches are left out, but for the smallest few.
_MOST_PATCHES, _FEWEST_UNITS = 8192, 3
#: Units of a tower of squares, whose line has no more than two coefficients.
_MOST_SQUARE_UNITS = 4
_ROWS = ((64,), (64,) * 4, (256,), (512,), (256, 256), (128,) * 8, (1024,))
_LABELS = (16, 64, 256, 512)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Something to time.

    Attributes:
        name: `module piece`.
        squares, tokens, segments: what one layer computes on.
        layers: that run in one pass; times are divided by them.
        leaf: the input whose gradient is asked for; None for pixels and ids.
        parameters: of the piece.
        trained: whether its weights train.
        upstream: whether gradients are asked for at its input.
        run: leaf (or None) -> output.
        setup: what `run` does besides the layers; its time is taken off. None: nothing.
    """

    name: str
    squares: float
    tokens: float
    segments: float
    layers: int = 1
    leaf: Tensor | None
    parameters: list[nn.Parameter]
    trained: bool
    upstream: bool
    run: Callable[[Tensor | None], Tensor]
    setup: Callable[[Tensor | None], Tensor] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedUnit:
    """A unit of media, and the tokens that each item becomes (text around the features included)."""

    unit: MediaUnit
    tokens: tuple[int, ...]

    @property
    def patches(self) -> int:
        return sum(self.unit.patches)


def typical_units(short: ShortModel, module: str, rule: MediaRule) -> list[SizedUnit]:
    """Units of an encoder, no two of one size, small ones first."""
    wanted: tuple[tuple[Any, ...], ...] = _CLIPS if module == "audio" else _PICTURES
    found = {}
    for media in wanted:
        if module == "audio":
            sizes, shapes = [rule.audio(item) for item in media], [rule.audio_shape(item) for item in media]
        else:
            sizes, shapes = [rule.image(*item) for item in media], [rule.image_shape(*item) for item in media]
        unit = MediaUnit(
            module=module,
            segments=tuple(size.segments for size in sizes),
            patches=tuple(size.patches for size in sizes),
            features=tuple(short.family.features(size.patches, size.segments, size.tokens) for size in sizes),
            shapes=tuple(shapes),
        )
        sized = SizedUnit(unit=unit, tokens=tuple(size.tokens for size in sizes))
        found[sized.patches, sum(unit.segments), sum(sized.tokens)] = sized
    ordered = [found[key] for key in sorted(found)]
    if len({patches / segments for patches, segments, _ in found}) == 1:
        ordered = _doubling(ordered)[:_MOST_SQUARE_UNITS]
    return [one for index, one in enumerate(ordered) if index < _FEWEST_UNITS or one.patches <= _MOST_PATCHES]


def _doubling(ordered: list[SizedUnit]) -> list[SizedUnit]:
    """Of units of equal squares, which differ in their number only, those at least nearly twice the one before."""
    kept = ordered[:1]
    for one in ordered[1:]:
        if 5 * one.patches >= 9 * kept[-1].patches:
            kept.append(one)
    return kept


class Pieces:
    """All pieces of a short model.

    Args:
        short: the model's description.
        model: itself, with weights.
        rule: of the whole model's media.
    """

    def __init__(self, short: ShortModel, model: nn.Module, rule: MediaRule) -> None:
        self.short, self.model, self.rule = short, model, rule
        self.family = short.family
        first = next(model.parameters())
        self.dtype, self.device = first.dtype, first.device
        self.parameters: dict[str, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            place = self.family.place(name)
            piece = {INPUT: "input", OUTPUT: "output"}.get(str(place.position), "layer")
            if parameter.requires_grad:
                self.parameters.setdefault(f"{place.module} {piece}", []).append(parameter)

    def __iter__(self) -> Iterator[Piece]:
        for encoder in self.short.spec.encoders:
            yield from self._encoder(encoder)
        yield from self._llm()

    def _encoder(self, module: ModuleSpec) -> Iterator[Piece]:
        first, end = layers = self.short.layers[module.name]
        last = module.num_layers
        units = typical_units(self.short, module.name, self.rule)
        features = module_features(_media_table(units), self.short.spec)[module.name]
        item_of_unit = np.repeat(np.arange(len(units)), [len(one.tokens) for one in units])
        for index, one in enumerate(units):
            size = _size(features, layers, item_of_unit == index)
            outputs = float(features.outputs[item_of_unit == index].sum())
            rows = sum(self.family.input_rows(one.unit))
            pixels = torch.randn(rows, *self.family.row_shape(module.name), dtype=self.dtype).to(self.device)
            encode = partial(self._encode, unit=one.unit)
            yield self._piece(
                module, "input", size, None, upstream=False, trained=module.trained,
                run=partial(self._embed_media, pixels=pixels, unit=one.unit),
            )  # fmt: skip
            hidden = self._leaf(*self.family.encoder_shape(one.unit, first))
            yield self._piece(
                module, "layer", size, hidden, upstream=module.trained, trained=module.trained, layers=end - first,
                run=partial(encode, layers=layers), setup=partial(encode, layers=(first, first)),
            )  # fmt: skip
            hidden = self._leaf(*self.family.encoder_shape(one.unit, last))
            yield self._piece(
                module, "output", {**size, "tokens": outputs}, hidden, upstream=module.trained,
                trained=module.output_trained, run=partial(encode, layers=(last, last)),
            )  # fmt: skip

    def _llm(self) -> Iterator[Piece]:
        spec, family = self.short.spec, self.family
        module, layers, vocabulary = spec.llm, self.short.layers[spec.llm.name], spec.llm.vocabulary_size
        upstream = module.trained or any(encoder.anything_trained for encoder in spec.encoders)
        picture = self._picture_tokens()
        for segments in _ROWS:
            if max(segments) > max(spec.max_tokens, min(map(max, _ROWS))):
                continue
            tokens = sum(segments)
            offsets = [0, *np.cumsum(segments).tolist()]
            positions = torch.from_numpy(np.concatenate([family.position_ids(n, ()) for n in segments], axis=-1))
            ids = torch.randint(vocabulary, (tokens,), device=self.device)
            pictured = [picture if 0 < picture < length else 0 for length in segments]
            features = module_features(_text_table(segments, pictured), spec)[module.name]
            size = _size(features, layers, np.ones(len(segments), dtype=bool))
            spans: list[Span] = [
                (start + first, start + last)
                for start, count in zip(offsets[:-1], pictured, strict=True)
                for first, last in family.two_way_spans(np.arange(count))
            ]
            yield self._piece(
                module, "input", size, None, upstream=False, trained=module.trained,
                run=partial(self._embed, ids=ids),
            )  # fmt: skip
            yield self._piece(
                module, "layer", size, self._leaf(*family.llm_shape(tokens, 0)), upstream=upstream,
                trained=module.trained, layers=layers[1] - layers[0],
                run=partial(self._decode, positions=positions.to(self.device), offsets=offsets, spans=spans),
            )  # fmt: skip
        for labels in _LABELS:
            targets = torch.randint(vocabulary, (labels,), device=self.device)
            size = {"squares": 0.0, "tokens": float(labels), "segments": 1.0}
            yield self._piece(
                module, "output", size, self._leaf(labels, family.llm_width()), upstream=upstream,
                trained=module.output_trained, run=partial(self._loss, targets=targets),
            )  # fmt: skip

    def _piece(
        self,
        module: ModuleSpec,
        piece: str,
        size: dict[str, float],
        leaf: Tensor | None,
        *,
        trained: bool,
        upstream: bool,
        run: Callable[[Tensor | None], Tensor],
        layers: int = 1,
        setup: Callable[[Tensor | None], Tensor] | None = None,
    ) -> Piece:
        name = f"{module.name} {piece}"
        parameters = self.parameters.get(name, [])
        return Piece(
            name=name, leaf=leaf, parameters=parameters, trained=trained and bool(parameters), upstream=upstream,
            run=run, layers=layers, setup=setup, **size,
        )  # fmt: skip

    def _picture_tokens(self) -> int:
        """Features of a small picture, where the language model's tokens of a picture see each other; else 0."""
        if not self.short.spec.llm.bidirectional_media:
            return 0
        return min(sum(one.unit.features) for one in typical_units(self.short, "vision", self.rule))

    def _leaf(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device).requires_grad_()

    def _encode(self, hidden: Tensor | None, *, layers: tuple[int, int], unit: MediaUnit) -> Tensor:
        assert hidden is not None
        return self.family.encode(self.model, hidden, layers, unit)

    def _embed_media(self, _: Tensor | None, *, pixels: Tensor, unit: MediaUnit) -> Tensor:
        return self.family.encode(self.model, pixels, (0, 0), unit)

    def _embed(self, _: Tensor | None, *, ids: Tensor) -> Tensor:
        return self.family.embed(self.model, ids)

    def _decode(self, hidden: Tensor | None, *, positions: Tensor, offsets: list[int], spans: list[Span]) -> Tensor:
        assert hidden is not None
        layers = self.short.layers[self.short.spec.llm.name]
        return self.family.decode(self.model, hidden, positions, offsets, layers, spans)

    def _loss(self, hidden: Tensor | None, *, targets: Tensor) -> Tensor:
        assert hidden is not None
        logits = self.family.logits(self.model, hidden).float()
        return nn.functional.cross_entropy(logits, targets, reduction="sum")


def _size(features: ItemFeatures, layers: tuple[int, int], chosen: np.ndarray) -> dict[str, float]:
    """What the chosen items make one of the layers compute on."""
    columns = {"squares": features.squares_of(layers), "tokens": features.tokens, "segments": features.segments}
    return {name: float(column[chosen].sum()) for name, column in columns.items()}


def _media_table(units: list[SizedUnit]) -> SampleTable:
    """One sample per unit; its text does not matter."""
    counts = [len(one.tokens) for one in units]
    kinds = [MEDIA_KINDS.index("audio" if one.unit.module == "audio" else "image") for one in units]
    return SampleTable(
        sample_ids=np.array([f"unit {index}" for index in range(len(units))]),
        text_tokens=np.ones(len(units), dtype=np.int64),
        label_tokens=np.ones(len(units), dtype=np.int64),
        media_offsets=np.concatenate([[0], np.cumsum(counts)]),
        media_kind=np.repeat(kinds, counts),
        media_patches=np.array([count for one in units for count in one.unit.patches], dtype=np.int64),
        media_segments=np.array([count for one in units for count in one.unit.segments], dtype=np.int64),
        media_tokens=np.array([count for one in units for count in one.tokens], dtype=np.int64),
    )


def _text_table(lengths: tuple[int, ...], pictured: list[int]) -> SampleTable:
    """One sample per segment of a packed row, of which some tokens are a picture's."""
    has_picture = np.array(pictured) > 0
    tokens = np.array(pictured, dtype=np.int64)
    return SampleTable(
        sample_ids=np.array([f"segment {index}" for index in range(len(lengths))]),
        text_tokens=np.array(lengths, dtype=np.int64) - tokens,
        label_tokens=np.ones(len(lengths), dtype=np.int64),
        media_offsets=np.concatenate([[0], np.cumsum(has_picture)]),
        media_kind=np.zeros(int(has_picture.sum()), dtype=np.int64),
        media_patches=tokens[has_picture],
        media_segments=np.ones(int(has_picture.sum()), dtype=np.int64),
        media_tokens=tokens[has_picture],
    )
