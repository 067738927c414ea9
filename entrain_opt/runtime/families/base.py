"""What the runtime asks of a model family.

A family says which stage owns a parameter and what a stage computes, and holds no state but the config. Everything else
(weights, messages, gradients, checkpoints) is the same for all families.

What flows between stages is one tensor. Where a model needs more of it (features that enter several language-model
layers), the family packs them into that tensor: its shape is the family's to say.

Legend: T tokens of a packed row, W language-model width, P patches, F features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from entrain_opt.errors import FAMILY_GUIDE, RuntimeConfigError
from entrain_opt.runtime.attention import PACKED_ATTENTION, register_packed_attention
from entrain_opt.workload.media.rule import FrameValues

#: Positions of a parameter within its module, besides a layer index.
INPUT, OUTPUT, UNUSED = "input", "output", "unused"

#: Language models that the methods of `Family` run as their own model does.
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")

IntArray = NDArray[np.int64]
#: [start, end) of rows that attend to each other in both directions.
Span = tuple[int, int]


def feature_layer(config: Any) -> int:
    """How many layers of the tower `vision_feature_layer` asks for; features of several cannot be cut into stages.

    Raises:
        RuntimeConfigError: a list of layers.
    """
    layer = config.vision_feature_layer
    if not isinstance(layer, int):
        raise RuntimeConfigError(
            f"model: config.vision_feature_layer is expected to be one layer, found {layer}; features from several "
            "layers cannot be cut into stages."
        )
    return layer if layer >= 0 else int(config.vision_config.num_hidden_layers) + 1 + layer


def frame_squares(frames: Sequence[Any], values: FrameValues) -> Tensor:
    """[frames, 3, height, width] of RGB images of one size."""
    pixels = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames]))
    scaled = (pixels / 255 - torch.tensor(values.mean)) / torch.tensor(values.std)
    return scaled.permute(0, 3, 1, 2).contiguous()


def consecutive_runs(rows: IntArray) -> list[IntArray]:
    """Ascending rows, split where one is missing in between."""
    return np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter lives.

    `position` is a layer index, `INPUT` (first stage of the module), `OUTPUT` (last stage), or `UNUSED`: the model has
    the parameter but no training loss reaches it; the last stage keeps it so that nothing is lost on export.
    """

    module: str
    position: int | str
    part: str
    """Which freezable part it belongs to: one of `spec.model.FREEZABLE_PARTS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaUnit:
    """Media items that go through an encoder together; every attribute but `module` has one entry per item.

    Attributes:
        module: the encoder.
        segments: pictures, tiles or clips, which do not attend to each other.
        patches: what the encoder computes on, over all segments.
        features: rows that go to the language model.
        shapes: what `MediaRule.image_shape`, `audio_shape` or `video_shape` says of the item; empty unless the family
            `needs_shapes`.
    """

    module: str
    segments: tuple[int, ...]
    patches: tuple[int, ...]
    features: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()


class Family(ABC):
    """One Hugging Face model type: encoders with projectors in `model`, a Llama-like language model.

    The methods for the language model suit every model whose `model.<llm_name>` has `embed_tokens`, `layers`, `norm`
    and `rotary_emb`.
    """

    #: Attribute of `model.model` that holds the language model.
    llm_name: ClassVar[str] = "language_model"
    #: Whether stages must know the `shapes` of media items; costs one header read per item and rank.
    needs_shapes: ClassVar[bool] = False
    #: Whether positions or attention depend on where the media stand, so that every language-model stage reads the
    #: text; otherwise only the first and the last do.
    reads_text_everywhere: ClassVar[bool] = False
    #: Config names of the encoders and language model: `set_attn_implementation` takes them.
    encoder_configs: ClassVar[tuple[str, ...]] = ("vision_config",)
    #: Whether videos are executed, through `video_rows`.
    executes_videos: ClassVar[bool] = False
    #: Model types of the language model, and of the encoder, that the family executes; None where the config class
    #: itself allows one only.
    text_types: ClassVar[tuple[str, ...] | None] = None
    encoder_types: ClassVar[tuple[str, ...] | None] = None
    #: Whether rotary angles of the language model depend on the kind of layer.
    rotary_by_kind = False
    #: How encoders attend: `PACKED_ATTENTION` where several media lie in one row and `encode` gives their offsets.
    encoder_attention: ClassVar[str] = "sdpa"

    def __init__(self, config: Any) -> None:
        """Take a config.

        Raises:
            RuntimeConfigError: a setting that the family cannot execute exactly.
        """
        self.config = config
        self.text_config = config.text_config
        self.llm_layers: int = self.text_config.num_hidden_layers
        if getattr(self.text_config, "use_sliding_window", False):
            raise RuntimeConfigError("model: text_config.use_sliding_window is not supported in packed rows.")

    @abstractmethod
    def num_layers(self) -> dict[str, int]:
        """Computed layers of each module, encoders first."""

    @abstractmethod
    def place_encoder(self, name: str) -> Place | None:
        """Where a parameter of an encoder or projector lives; None if it is not one."""

    @abstractmethod
    def encoder_shape(self, unit: MediaUnit, end: int) -> tuple[int, ...]:
        """Shape of what leaves an encoder stage that ends before layer `end`, the last stage excepted."""

    @abstractmethod
    def encode(self, model: nn.Module, hidden: Tensor, layers: tuple[int, int], unit: MediaUnit) -> Tensor:
        """Run encoder layers; a stage from layer 0 takes pixels, the last one returns features.

        Args:
            model: the rank's model.
            hidden: what the reader made of the unit's items (concatenated) into layer 0, else as `encoder_shape` says.
            layers: first layer and one past the last.
            unit: the items.

        Returns:
            As `encoder_shape` says, or [F, feature width] after the last layer and the projector.
        """

    @abstractmethod
    def row_shape(self, module: str) -> tuple[int, ...]:
        """Shape of one of the rows that `input_rows` counts: a tile, a patch or a clip's mel frames."""

    def image_settings(self) -> dict[str, Any]:
        """What the family's combined processor tells its image processor, whatever that one's own file says."""
        return {}

    def arrange(self, pixels: Tensor) -> Tensor:
        """One image as its processor makes it -> rows that can stand behind those of other images."""
        return pixels

    def video_rows(self, frames: Sequence[Any], processor: Any, values: FrameValues | None) -> Tensor:
        """What the encoder takes of a video; asked for only where the family `executes_videos`.

        Args:
            frames: RGB images of the size that the rule says, in order.
            processor: the folder's image processor.
            values: how pixels are scaled; None as the image processor does.
        """
        if values is None:
            raise RuntimeConfigError(f"model: {type(self).__name__} executes no videos.")
        return frame_squares(frames, values)

    def input_rows(self, unit: MediaUnit) -> tuple[int, ...]:
        """First dimension of what the reader makes of each item: its tiles, unless the family says otherwise."""
        return unit.segments

    def features(self, patches: int, segments: int, tokens: int) -> int:
        """Rows that the projector makes of an item; the item's other tokens are the processor's text."""
        return tokens

    def feature_width(self) -> int:
        """Width of a feature row: that of the first language-model stage's embedding."""
        return self.llm_width()

    def build(self) -> nn.Module:
        """The whole model on the current default device (meta, usually), attention set up for packed rows."""
        register_packed_attention()
        model = self.new_model()
        encoders = dict.fromkeys(self.encoder_configs, self.encoder_attention)
        model.set_attn_implementation({"text_config": PACKED_ATTENTION, **encoders})
        return model

    def new_model(self) -> Any:
        """The plain model of the config."""
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText.from_config(self.config)

    def place(self, parameter_name: str) -> Place:
        """Where a parameter lives; raises RuntimeConfigError for one that the family does not know."""
        place = self.place_encoder(parameter_name) or self._place_llm(parameter_name)
        if place is None:
            raise RuntimeConfigError(
                f"model: parameter {parameter_name!r} has no place in any stage of {type(self).__name__}. Say in its "
                f"`place_encoder` ({type(self).__module__.replace('.', '/')}.py) which stage holds it, and compute it "
                f"in `encode`: see {FAMILY_GUIDE}."
            )
        return place

    def _place_llm(self, name: str) -> Place | None:
        rest = name.removeprefix(f"model.{self.llm_name}.")
        if rest == name:
            return Place("llm", OUTPUT, "language_model") if name.startswith("lm_head.") else None
        if rest.startswith("layers."):
            return Place("llm", int(rest.split(".")[1]), "language_model")
        if rest.startswith("embed_tokens."):
            return Place("llm", INPUT, "language_model")
        return Place("llm", OUTPUT, "language_model") if rest.startswith("norm.") else None

    def disk_names(self, parameter_name: str) -> list[str]:
        """Names under which checkpoints of this family store a parameter, most likely first.

        Transformers still writes many families as it did before version 5: parts at the top, the language model with
        its head as one part.
        """
        name, llm, tower = parameter_name, f"model.{self.llm_name}.", "model.vision_tower."
        older = name.removeprefix("model.")
        if name.startswith("lm_head."):
            older = f"{self.llm_name}.{name}"
        elif name.startswith(llm):
            older = f"{self.llm_name}.model.{name.removeprefix(llm)}"
        with_model = ["vision_tower.vision_model." + name.removeprefix(tower)] if name.startswith(tower) else []
        return [name, older, *with_model]

    def weight_folders(self, folder: Path) -> dict[str, Path]:
        """{part: folder of its weights} of the parts whose weights do not lie in the model folder itself."""
        return {}

    def tied(self) -> dict[str, str]:
        """Parameters that are the same tensor as another one: {name: owner}."""
        tied = self.config.tie_word_embeddings
        return {"lm_head.weight": f"model.{self.llm_name}.embed_tokens.weight"} if tied else {}

    def llm_width(self) -> int:
        """Hidden size of the language model."""
        return int(self.text_config.hidden_size)

    def llm_shape(self, num_tokens: int, end: int) -> tuple[int, ...]:
        """Shape of what leaves a language-model stage that ends before layer `end`."""
        return (num_tokens, self.llm_width())

    def position_ids(self, num_tokens: int, media: Sequence[tuple[IntArray, tuple[int, ...]]]) -> IntArray:
        """[T] or [axes, T] positions of one sample.

        Args:
            num_tokens: T.
            media: rows of the features and shape of each item; empty unless the family `reads_text_everywhere`.
        """
        return np.arange(num_tokens)

    def two_way_spans(self, feature_rows: IntArray) -> tuple[Span, ...]:
        """Rows of one sample that attend to each other in both directions, given the rows of all its features."""
        return ()

    def language_model(self, model: nn.Module) -> Any:
        return getattr(model.model, self.llm_name)

    def embed(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        """[T] -> [T, feature width]; rows of features are replaced by the caller."""
        embedded: Tensor = self.language_model(model).embed_tokens(input_ids)
        return embedded

    def decode(
        self,
        model: nn.Module,
        hidden: Tensor,
        position_ids: Tensor,
        segment_offsets: list[int],
        layers: tuple[int, int],
        spans: Sequence[Span] = (),
    ) -> Tensor:
        """Run language-model layers on one packed row: [T, W] -> [T, W], or as `embed` and `llm_shape` say.

        Args:
            position_ids: [T] or [axes, T].
            segment_offsets: of the samples in the row.
            spans: `two_way_spans` of all samples, as rows of the packed row.
        """
        language_model = self.language_model(model)
        row, positions = hidden.unsqueeze(0), position_ids.unsqueeze(-2)
        first, end = layers
        kinds = language_model.config.layer_types[first:end] if self.rotary_by_kind else [None] * (end - first)
        rotary = {
            kind: language_model.rotary_emb(row, positions, *(() if kind is None else (kind,)))
            for kind in dict.fromkeys(kinds)
        }
        for kind, layer in zip(kinds, language_model.layers[first:end], strict=True):
            row = layer(
                row,
                attention_mask=None,
                position_embeddings=rotary[kind],
                position_ids=None if positions.ndim > 2 else positions,
                use_cache=False,
                segment_offsets=segment_offsets,
                two_way_spans=tuple(spans),
            )
        return row.squeeze(0)

    def logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Final norm and head: [rows, W] -> [rows, vocabulary]."""
        whole: Any = model
        logits: Tensor = whole.lm_head(self.language_model(model).norm(hidden))
        return logits
