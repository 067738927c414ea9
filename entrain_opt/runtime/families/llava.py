"""LLaVA: a CLIP- or SigLIP-style tower on fixed-size tiles, an MLP projector, a Llama-style language model."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.attention import PACKED_ATTENTION, register_packed_attention
from entrain_opt.runtime.families.base import INPUT, OUTPUT, UNUSED, Place

TOWER, PROJECTOR, LLM = "model.vision_tower.", "model.multi_modal_projector.", "model.language_model."


class LlavaFamily:
    """`LlavaForConditionalGeneration` with one feature layer."""

    def __init__(self, config: Any) -> None:
        self.config = config
        vision, text = config.vision_config, config.text_config
        if not isinstance(config.vision_feature_layer, int):
            raise RuntimeConfigError(
                "model: config.vision_feature_layer is expected to be one layer, found "
                f"{config.vision_feature_layer}; features from several layers cannot be cut into stages."
            )
        if getattr(text, "use_sliding_window", False):
            raise RuntimeConfigError("model: sliding-window attention is not supported in packed rows.")
        layer = config.vision_feature_layer
        self.vision_layers = layer if layer >= 0 else vision.num_hidden_layers + 1 + layer
        self.llm_layers = text.num_hidden_layers

    def build(self) -> nn.Module:
        from transformers import AutoModelForImageTextToText

        register_packed_attention()
        model = AutoModelForImageTextToText.from_config(self.config)
        model.set_attn_implementation({"text_config": PACKED_ATTENTION, "vision_config": "sdpa"})
        return model

    def num_layers(self) -> dict[str, int]:
        return {"vision": self.vision_layers, "llm": self.llm_layers}

    def place(self, parameter_name: str) -> Place:
        name = parameter_name
        if name.startswith(TOWER):
            rest = name.removeprefix(TOWER).removeprefix("vision_model.")
            if match := re.match(r"encoder\.layers\.(\d+)\.", rest):
                layer = int(match[1])
                return Place("vision", layer if layer < self.vision_layers else UNUSED, "vision_tower")
            if rest.startswith(("embeddings.", "pre_layrnorm.")):
                return Place("vision", INPUT, "vision_tower")
            if rest.startswith(("post_layernorm.", "head.")):
                return Place("vision", UNUSED, "vision_tower")
        elif name.startswith(PROJECTOR):
            return Place("vision", OUTPUT, "projector")
        elif match := re.match(re.escape(LLM) + r"layers\.(\d+)\.", name):
            return Place("llm", int(match[1]), "language_model")
        elif name.startswith(LLM + "embed_tokens."):
            return Place("llm", INPUT, "language_model")
        elif name.startswith((LLM + "norm.", "lm_head.")):
            return Place("llm", OUTPUT, "language_model")
        raise RuntimeConfigError(f"model: parameter {name!r} has no place in any stage of the llava family.")

    def disk_names(self, parameter_name: str) -> list[str]:
        name = parameter_name
        older = name.removeprefix("model.")
        if name.startswith("lm_head."):
            older = "language_model." + name
        elif name.startswith(LLM):
            older = "language_model.model." + name.removeprefix(LLM)
        names = [name, older]
        if name.startswith(TOWER):
            names.append("vision_tower.vision_model." + name.removeprefix(TOWER))
        return names

    def tied(self) -> dict[str, str]:
        tied = self.config.tie_word_embeddings
        return {"lm_head.weight": LLM + "embed_tokens.weight"} if tied else {}

    def encoder_width(self) -> int:
        return self.config.vision_config.hidden_size

    def llm_width(self) -> int:
        return self.config.text_config.hidden_size

    def encoder_rows(self, num_patches: int) -> int:
        # The "default" strategy exists to drop CLIP's class token, which only CLIP-style towers have.
        return num_patches + (self.config.vision_feature_select_strategy == "default")

    def encode(self, model: nn.Module, hidden: Tensor, layers: tuple[int, int]) -> Tensor:
        inner: Any = model.model
        tower = getattr(inner.vision_tower, "vision_model", inner.vision_tower)
        first, end = layers
        if first == 0:
            hidden = tower.embeddings(hidden.to(tower.embeddings.patch_embedding.weight.dtype))
            if hasattr(tower, "pre_layrnorm"):
                hidden = tower.pre_layrnorm(hidden)
        for layer in tower.encoder.layers[first:end]:
            hidden = layer(hidden, None)
        if end < self.vision_layers:
            return hidden
        if self.config.vision_feature_select_strategy == "default":
            hidden = hidden[:, 1:]
        return inner.multi_modal_projector(hidden).flatten(0, 1)

    def embed(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        return model.model.language_model.embed_tokens(input_ids)  # type: ignore[union-attr,operator]

    def decode(
        self,
        model: nn.Module,
        hidden: Tensor,
        position_ids: Tensor,
        segment_offsets: list[int],
        layers: tuple[int, int],
    ) -> Tensor:
        language_model: Any = model.model.language_model  # type: ignore[union-attr]
        row, positions = hidden.unsqueeze(0), position_ids.unsqueeze(0)
        rotary = language_model.rotary_emb(row, position_ids=positions)
        for layer in language_model.layers[layers[0] : layers[1]]:
            row = layer(
                row,
                attention_mask=None,
                position_embeddings=rotary,
                position_ids=positions,
                use_cache=False,
                segment_offsets=segment_offsets,
            )
        return row.squeeze(0)

    def logits(self, model: nn.Module, hidden: Tensor) -> Tensor:
        whole: Any = model
        return whole.lm_head(whole.model.language_model.norm(hidden))
