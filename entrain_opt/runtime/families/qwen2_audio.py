"""Qwen2-Audio: a Whisper-style encoder on windows of 30 seconds, of which each clip fills its own part.

Every clip is padded to the whole window and computed on all of it; padding is masked as keys and left out of the
features. How many mel frames a clip has says where its padding starts, so every encoder stage knows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.runtime.families.base import INPUT, LLAMA_LIKE, OUTPUT, Family, MediaUnit, Place


class Qwen2AudioFamily(Family):
    """`Qwen2AudioForConditionalGeneration`."""

    needs_shapes = True
    text_types = LLAMA_LIKE
    encoder_types = ("qwen2_audio_encoder",)
    encoder_configs = ("audio_config",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.audio = config.audio_config
        if self.audio.encoder_layerdrop:
            raise RuntimeConfigError(
                f"model: audio_config.encoder_layerdrop: expected 0, found {self.audio.encoder_layerdrop}; layers that "
                "are left out at random have no place in a plan."
            )

    def new_model(self) -> Any:
        from transformers import Qwen2AudioForConditionalGeneration

        return Qwen2AudioForConditionalGeneration(self.config)

    def tied(self) -> dict[str, str]:
        return {}

    def num_layers(self) -> dict[str, int]:
        return {"audio": self.audio.encoder_layers, "llm": self.llm_layers}

    def place_encoder(self, name: str) -> Place | None:
        rest = name.removeprefix("model.audio_tower.")
        if rest == name:
            return Place("audio", OUTPUT, "projector") if name.startswith("model.multi_modal_projector.") else None
        if rest.startswith("layers."):
            return Place("audio", int(rest.split(".")[1]), "audio_tower")
        if rest.startswith(("conv1.", "conv2.", "embed_positions.")):
            return Place("audio", INPUT, "audio_tower")
        return Place("audio", OUTPUT, "audio_tower") if rest.startswith("layer_norm.") else None

    def encoder_shape(self, unit: MediaUnit, end: int) -> tuple[int, ...]:
        return (sum(unit.segments), self.audio.max_source_positions, self.audio.d_model)

    def row_shape(self, module: str) -> tuple[int, ...]:
        return (self.audio.num_mel_bins, 2 * self.audio.max_source_positions)

    def encode(self, model: nn.Module, hidden: Tensor, layers: tuple[int, int], unit: MediaUnit) -> Tensor:
        inner: Any = model.model
        tower = inner.audio_tower
        first, end = layers
        if first == 0:
            hidden = self.embed_frames(tower, hidden)
        positions = torch.tensor([(frames + 1) // 2 for (frames,) in unit.shapes], device=hidden.device)
        is_sound = torch.arange(hidden.shape[1], device=hidden.device) < positions[:, None]
        mask = is_sound[:, None, None, :].expand(-1, 1, hidden.shape[1], -1)
        for layer in tower.layers[first:end]:
            hidden = layer(hidden, mask)
        if end < self.audio.encoder_layers:
            return hidden
        pooled = tower.layer_norm(tower.avg_pooler(hidden.transpose(1, 2)).transpose(1, 2))
        return self.of_clips(inner.multi_modal_projector(pooled), unit)

    def embed_frames(self, tower: Any, frames: Tensor) -> Tensor:
        """[clips, mel bins, frames] -> [clips, positions, width]."""
        hidden = nn.functional.gelu(tower.conv1(frames.to(tower.conv1.weight.dtype)))
        embedded: Tensor = nn.functional.gelu(tower.conv2(hidden)).transpose(1, 2) + tower.embed_positions.weight
        return embedded

    def of_clips(self, rows: Tensor, unit: MediaUnit) -> Tensor:
        """[clips, rows of the whole window, W] -> [F, W], without those of the padding."""
        return torch.cat([clip[:tokens] for clip, tokens in zip(rows, unit.features, strict=True)])
