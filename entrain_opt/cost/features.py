"""What each item of a sample table makes a module compute on: the three columns that a cost line takes.

Media go to encoders by kind: audio to the encoder named `audio`, images and videos to `vision`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from entrain_opt.cost.lines import Line
from entrain_opt.errors import WorkloadError
from entrain_opt.spec.model import ModelSpec
from entrain_opt.workload.samples import MEDIA_KINDS, SampleTable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFeatures:
    """Columns of the items of one module: media items of an encoder, samples of the language model.

    Attributes:
        squares, tokens, segments: [items] for layers and the embedding.
        outputs: [items] media tokens for the projector, label tokens for the head.
        present: [items] 1, or 0 for media of another encoder.
    """

    squares: FloatArray
    tokens: FloatArray
    segments: FloatArray
    outputs: FloatArray
    present: FloatArray

    def layer_seconds(self, line: Line) -> FloatArray:
        return line.item_seconds(self.squares, self.tokens, self.segments) * self.present

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
    features = {
        module.name: ItemFeatures(
            squares=patches**2 / np.maximum(segments, 1),
            tokens=patches,
            segments=segments,
            outputs=samples.media_tokens.astype(np.float64),
            present=(encoder == index).astype(np.float64),
        )
        for index, module in enumerate(model.encoders)
    }
    tokens = samples.total_tokens.astype(np.float64)
    features[model.llm.name] = ItemFeatures(
        squares=tokens**2,
        tokens=tokens,
        segments=np.ones(len(samples)),
        outputs=samples.label_tokens.astype(np.float64),
        present=np.ones(len(samples)),
    )
    return features
