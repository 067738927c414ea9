"""Composed models: each encoder is cut as in the family that it comes from, the language model as everywhere.

A tower's family sees tower and projector under the names that it knows them by, and nothing else, so how the tower is
cut, what crosses its boundaries and how it runs is not written again here. The model itself is `ComposedModel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from entrain_opt.runtime.experts import router_names
from entrain_opt.runtime.families.base import OUTPUT, Family, MediaUnit, Place
from entrain_opt.runtime.families.composed_model import ComposedModel
from entrain_opt.runtime.families.gemma3 import check_gemma3_text
from entrain_opt.runtime.families.idefics3 import Idefics3Family
from entrain_opt.runtime.families.internvl import InternVLFamily
from entrain_opt.runtime.families.qwen2_5_vl import Qwen25VLFamily
from entrain_opt.runtime.families.qwen2_audio import Qwen2AudioFamily
from entrain_opt.runtime.families.qwen3_vl import Qwen3VLFamily
from entrain_opt.runtime.families.towers import SquareTowerFamily


class _SquareTower(SquareTowerFamily):
    """CLIP or SigLIP up to the last layer, as `ComposedModel.image_features` has it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.uses_post_norm = not self.has_class_token

    def project(self, inner: Any, hidden: Tensor, unit: MediaUnit) -> Tensor:
        return super().project(inner, hidden[:, 1:] if self.has_class_token else hidden, unit)


class _Idefics3Tower(Idefics3Family):
    """The tower of Idefics3 or SmolVLM; what joins its rows is the composed model's projector."""

    def project(self, inner: Any, hidden: Tensor, unit: MediaUnit) -> Tensor:
        features: Tensor = inner.multi_modal_projector(hidden).flatten(0, 1)
        return features


class _InternVLTower(InternVLFamily):
    """InternVL's tower up to its last norm; what joins its rows is the composed model's projector."""

    def __init__(self, config: Any) -> None:
        config.vision_feature_layer, config.vision_feature_select_strategy = -1, "default"
        super().__init__(config)

    def project(self, inner: Any, hidden: Tensor) -> Tensor:
        features: Tensor = inner.multi_modal_projector(hidden[:, 1:]).flatten(0, 1)
        return features


class _Whisper(Qwen2AudioFamily):
    """Whisper's encoder: silence is not masked, and every position gives a row."""

    def encode(self, model: nn.Module, hidden: Tensor, layers: tuple[int, int], unit: MediaUnit) -> Tensor:
        inner: Any = model.model
        tower, (first, end) = inner.audio_tower, layers
        if first == 0:
            hidden = self.embed_frames(tower, hidden)
        for layer in tower.layers[first:end]:
            hidden = layer(hidden, None)
        if end < self.audio.encoder_layers:
            return hidden
        return self.of_clips(inner.multi_modal_projector(tower.layer_norm(hidden)), unit)


#: Tower -> (its family, the attribute of `model.model` that the family finds it under).
_TOWERS: dict[str, tuple[type[Family], str]] = {
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model"), (_SquareTower, "vision_tower")),
    **dict.fromkeys(("idefics3_vision", "smolvlm_vision"), (_Idefics3Tower, "vision_model")),
    "internvl_vision": (_InternVLTower, "vision_tower"),
    "qwen2_5_vl_vision": (Qwen25VLFamily, "visual"),
    "qwen3_vl_vision": (Qwen3VLFamily, "visual"),
    "qwen2_audio_encoder": (Qwen2AudioFamily, "audio_tower"),
    "whisper": (_Whisper, "audio_tower"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoder:
    """One encoder of a composed model.

    Attributes:
        family: of its tower.
        attribute: of `model.model` that the family finds the tower under.
        tower, projector: names in the composed model.
    """

    family: Family
    attribute: str
    tower: str
    projector: str

    def view(self, model: nn.Module) -> nn.Module:
        """The composed model as the tower's family knows its own."""
        view, inner = nn.Module(), nn.Module()
        inner.add_module(self.attribute, model.get_submodule(self.tower))
        if hasattr(model, self.projector):
            inner.add_module("multi_modal_projector", model.get_submodule(self.projector))
        view.add_module("model", inner)
        return view

    def place(self, name: str) -> Place | None:
        """Where a parameter of the composed model lives; None if it is not of this encoder."""
        if name.startswith(f"{self.tower}."):
            return self.family.place_encoder(f"model.{self.attribute}.{name.removeprefix(f'{self.tower}.')}")
        if name.startswith(f"{self.projector}."):
            return Place(self.tower.removesuffix("_tower"), OUTPUT, "projector")
        return None


class ComposedFamily(Family):
    """`ComposedModel`."""

    needs_shapes = True
    encoder_configs = ("vision_config", "audio_config")

    def __init__(self, config: Any) -> None:
        config.check()
        super().__init__(config)
        if self.text_config.model_type == "gemma3_text":
            check_gemma3_text(self.text_config)
        self.encoders: dict[str, _Encoder] = {}
        for name in ("vision", "audio"):
            part = getattr(config, f"{name}_config")
            if part is not None:
                family, attribute = _TOWERS[part.model_type]
                alone = SimpleNamespace(**{f"{name}_config": part}, text_config=config.text_config)
                self.encoders[name] = _Encoder(
                    family=family(alone), attribute=attribute, tower=f"{name}_tower", projector=f"{name}_projector"
                )

    def new_model(self) -> Any:
        return ComposedModel(self.config)

    def num_layers(self) -> dict[str, int]:
        of_encoders = {name: encoder.family.num_layers()[name] for name, encoder in self.encoders.items()}
        return {**of_encoders, "llm": self.llm_layers}

    def place_encoder(self, name: str) -> Place | None:
        places = (encoder.place(name) for encoder in self.encoders.values())
        return next((place for place in places if place is not None), None)

    def _place_llm(self, name: str) -> Place | None:
        rest = name.removeprefix("language_model.")
        if rest == name:
            return None
        return super()._place_llm(rest.replace("model.", f"model.{self.llm_name}.", 1))

    def encoder_shape(self, unit: MediaUnit, end: int) -> tuple[int, ...]:
        return self.encoders[unit.module].family.encoder_shape(unit, end)

    def input_rows(self, unit: MediaUnit) -> tuple[int, ...]:
        return self.encoders[unit.module].family.input_rows(unit)

    def row_shape(self, module: str) -> tuple[int, ...]:
        return self.encoders[module].family.row_shape(module)

    def encode(self, model: nn.Module, hidden: Tensor, layers: tuple[int, int], unit: MediaUnit) -> Tensor:
        encoder = self.encoders[unit.module]
        return encoder.family.encode(encoder.view(model), hidden, layers, unit)

    @property
    def rotary_by_kind(self) -> bool:  # type: ignore[override]
        return bool(self.text_config.model_type == "gemma3_text")

    def tied(self) -> dict[str, str]:
        head, embedding = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
        return {head: embedding} if self.config.tie_word_embeddings else {}

    def language_model(self, model: nn.Module) -> Any:
        whole: Any = model
        return whole.language_model.model

    def logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        whole: Any = model
        logits: Tensor = whole.language_model.lm_head(self.language_model(model).norm(hidden))
        return logits

    def weight_folders(self, folder: Path) -> dict[str, Path]:
        found: dict[str, Path] = self.config.weight_folders(folder)
        return found

    def disk_names(self, parameter_name: str) -> list[str]:
        """As in this model, in a folder of the part alone, and in those of models that the part may come from."""
        part, _, rest = parameter_name.partition(".")
        prefixes = {
            "vision_tower": ("", "vision_model.", "visual.", "vision_tower.", "vision_tower.vision_model."),
            "audio_tower": ("", "encoder.", "audio_tower."),
            "language_model": ("", "language_model."),
        }.get(part, ())
        alone = [f"{prefix}{rest}" for prefix in prefixes]
        if part == "language_model":
            alone.append(rest.replace("model.", "model.language_model.", 1))
            alone += [other for name in alone for other in router_names(name)]
        return [parameter_name, *alone, *(f"model.{name}" for name in alone)]
