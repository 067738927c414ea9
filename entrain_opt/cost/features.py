"""What each item of a sample table makes a module compute on: the three columns that a cost line takes.

Media go to encoders by kind: audio to the encoder named `audio`, images and videos to `vision`. A table's segments are
the widest that an encoder attends to (a picture or its tile, a frame of a video, an audio clip); windows inside them
are the model's matter, and layers of one module may differ in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_opt.cost.attention import attended_squares, both_ways_squares
from entrain_opt.cost.lines import Line
from entrain_opt.errors import WorkloadError
from entrain_opt.spec.model import AttentionWindow, ModelSpec, ModuleSpec
from entrain_opt.workload.samples import MEDIA_KINDS, SampleTable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFeatures:
    """Columns of the items of one module: media items of an encoder, samples of the language model.

    Attributes:
        squares: [items] of attention, the mean over all layers.
        tokens, segments: [items] for layers and the embedding.
        outputs: [items] media tokens for the projector, label tokens for the head.
        present: [items] 1, or 0 for media of another encoder.
        kind_squares: (layer numbers, [items] squares) of each kind of layer; empty if all layers are alike.
    """

    squares: FloatArray
    tokens: FloatArray
    segments: FloatArray
    outputs: FloatArray
    present: FloatArray
    kind_squares: tuple[tuple[tuple[int, ...], FloatArray], ...] = ()

    def layer_seconds(self, line: Line, layers: tuple[int, int] | None = None) -> FloatArray:
        """[items] seconds of a line of layers.

        Args:
            line: of one layer, or scaled to several.
            layers: first and end of the layers that it stands for, whose mean attention counts; None for all layers.
        """
        return line.item_seconds(self.squares_of(layers), self.tokens, self.segments) * self.present

    def squares_of(self, layers: tuple[int, int] | None) -> FloatArray:
        """[items] mean squares of layers `first` to `end` - 1, or of all."""
        if layers is None or not self.kind_squares or layers[0] >= layers[1]:
            return self.squares
        first, end = layers
        total = np.zeros_like(self.squares)
        for numbers, squares in self.kind_squares:
            total += sum(first <= number < end for number in numbers) * squares
        return total / (end - first)

    def input_seconds(self, line: Line) -> FloatArray:
        return line.item_seconds(0.0, self.tokens, self.segments) * self.present

    def output_seconds(self, line: Line) -> FloatArray:
        return line.item_seconds(0.0, self.outputs, self.segments) * self.present


def encoder_of_media(samples: SampleTable, model: ModelSpec) -> IntArray:
    """[M] index of the encoder that each media item goes through.

    Raises:
        WorkloadError: the model has no encoder for a kind that the samples hold.
    """
    names = [encoder.name for encoder in model.encoders]
    wanted = ["audio" if kind == "audio" else "vision" for kind in MEDIA_KINDS]
    table = np.array([names.index(name) if name in names else -1 for name in wanted], dtype=np.int64)
    encoder = table[samples.media_kind]
    if len(lost := np.flatnonzero(encoder < 0)):
        item = int(lost[0])
        raise WorkloadError(
            f"sample {samples.sample_ids[samples.media_sample[item]]}: {model.name} has encoders {names}, none for "
            f"{MEDIA_KINDS[samples.media_kind[item]]}. Use another model, or leave the sample out."
        )
    return encoder


def module_features(samples: SampleTable, model: ModelSpec) -> dict[str, ItemFeatures]:
    """Features of every module by name."""
    encoder = encoder_of_media(samples, model)
    patches = samples.media_patches.astype(np.float64)
    segments = samples.media_segments.astype(np.float64)
    media_tokens = samples.media_tokens.astype(np.float64)
    length, run = patches / np.maximum(segments, 1), media_tokens / np.maximum(segments, 1)

    def media_squares(window: AttentionWindow | None) -> FloatArray:
        return segments * attended_squares(length, window)

    features = {
        module.name: _features(
            module,
            media_squares,
            tokens=patches,
            segments=segments,
            outputs=media_tokens,
            present=(encoder == index).astype(np.float64),
        )
        for index, module in enumerate(model.encoders)
    }
    tokens = samples.total_tokens.astype(np.float64)

    def text_squares(window: AttentionWindow | None) -> FloatArray:
        squares = attended_squares(tokens, window)
        if model.llm.bidirectional_media:
            squares = squares + samples.sum_media(segments * both_ways_squares(run, window))
        return squares

    features[model.llm.name] = _features(
        model.llm,
        text_squares,
        tokens=tokens,
        segments=np.ones(len(samples)),
        outputs=samples.label_tokens.astype(np.float64),
        present=np.ones(len(samples)),
    )
    return features


def _features(
    module: ModuleSpec,
    squares_of: Callable[[AttentionWindow | None], FloatArray],
    *,
    tokens: FloatArray,
    segments: FloatArray,
    outputs: FloatArray,
    present: FloatArray,
) -> ItemFeatures:
    kinds = tuple((kind.layers, squares_of(kind.window)) for kind in module.kinds)
    mean = sum((len(layers) * squares for layers, squares in kinds), np.zeros(len(tokens))) / module.num_layers
    return ItemFeatures(
        squares=mean,
        tokens=tokens,
        segments=segments,
        outputs=outputs,
        present=present,
        kind_squares=kinds if len(kinds) > 1 else (),
    )
