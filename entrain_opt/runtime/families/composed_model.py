"""A composed model as one plain module: Transformers' own classes for the encoders and the language model.

`config.json` is described in `entrain_opt/spec/families/composed.py`; parts have the names by which they are frozen:

    vision_tower, audio_tower            a tower of Transformers (Qwen's merger inside it is its projector)
    vision_projector, audio_projector    `Projector`, for a tower that has none of its own
    language_model                       a causal language model of Transformers

Rows of the embedding at placeholders are replaced by the features, in the order of the media; then the language model
runs as it is. Saved, every part is a Transformers folder of its own beside a config that names it under `weights`, so a
tower or language model trained here loads anywhere; the projectors' weights lie in the folder `projector`.

Promise: what the runtime computes in pieces is this module's forward pass. Price: none in training, which uses its
parameters only.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.configuration_utils import SubConfigSpec

from entrain_opt.errors import FAMILY_GUIDE, RuntimeConfigError
from entrain_opt.runtime.families.base import LLAMA_LIKE
from entrain_opt.spec.families import COMPOSED_TYPE
from entrain_opt.spec.folder import find_model_folder

SQUARE_TOWERS = ("clip_vision_model", "siglip_vision_model", "idefics3_vision", "smolvlm_vision", "internvl_vision")
_CLASS_TOKEN_TOWERS = ("clip_vision_model", "internvl_vision")
NATIVE_TOWERS = ("qwen2_5_vl_vision", "qwen3_vl_vision")
AUDIO_TOWERS = ("qwen2_audio_encoder", "whisper")
LANGUAGE_MODELS = (*LLAMA_LIKE, "gemma3_text", "mixtral", "qwen3_moe")
#: Parts whose weights may lie in a folder of their own, by the names by which they are frozen.
PARTS = ("vision_tower", "audio_tower", "projector", "language_model")


class ComposedConfig(PreTrainedConfig):
    """`config.json` of a composed model; parts are configs of Transformers."""

    model_type = COMPOSED_TYPE
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "vision_config": SubConfigSpec(config_class=AutoConfig, model_type=SQUARE_TOWERS[0], optional=True),
        "audio_config": SubConfigSpec(config_class=AutoConfig, model_type=AUDIO_TOWERS[0], optional=True),
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type=LLAMA_LIKE[0]),
    }

    vision_config: dict[str, Any] | PreTrainedConfig | None = None
    audio_config: dict[str, Any] | PreTrainedConfig | None = None
    text_config: dict[str, Any] | PreTrainedConfig | None = None
    vision_projector: dict[str, Any] | None = None
    audio_projector: dict[str, Any] | None = None
    image_token_id: int | None = None
    audio_token_id: int | None = None
    weights: dict[str, str] | None = None
    tie_word_embeddings: bool | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        text: Any = self.text_config
        if self.tie_word_embeddings is None:
            self.tie_word_embeddings = bool(getattr(text, "tie_word_embeddings", False))
        text.tie_word_embeddings = self.tie_word_embeddings

    def check(self) -> None:
        """Raise RuntimeConfigError for a part that cannot be executed, or weights of a part that does not exist."""
        text: Any = self.text_config
        kinds = (("vision_config", (*SQUARE_TOWERS, *NATIVE_TOWERS)), ("audio_config", AUDIO_TOWERS))
        if self.vision_config is None and self.audio_config is None:
            raise RuntimeConfigError("model: expected vision_config or audio_config, found neither.")
        for name, known in (*kinds, ("text_config", LANGUAGE_MODELS)):
            part: Any = getattr(self, name)
            if part is not None and part.model_type not in known:
                raise RuntimeConfigError(
                    f"model: {name}.model_type: composed models are executed with one of {sorted(known)}, found "
                    f"{part.model_type!r}. To add a tower, write its family and list it in `_TOWERS` of "
                    "entrain_opt/runtime/families/composed.py and in composed_model.py beside it; a language model "
                    "needs `embed`, `decode` and `logits` of `ComposedFamily` and a place in `LANGUAGE_MODELS`: see "
                    f"{FAMILY_GUIDE}."
                )
        for name in ("output_router_logits", "router_jitter_noise"):
            if value := getattr(text, name, None):
                raise RuntimeConfigError(
                    f"model: text_config.{name}: expected none, found {value}; what it adds to the loss or the router "
                    "is not executed."
                )
        for kind, encoder in (("image", self.vision_config), ("audio", self.audio_config)):
            token, vocabulary = getattr(self, f"{kind}_token_id"), text.vocab_size
            if encoder is not None and not (isinstance(token, int) and 0 <= token < vocabulary):
                raise RuntimeConfigError(
                    f"model: {kind}_token_id: expected the placeholder's row of the embedding (0 to {vocabulary - 1}), "
                    f"found {token!r}."
                )
        for part_name in self.weights or {}:
            if part_name not in PARTS:
                raise RuntimeConfigError(f"model: weights: expected names from {list(PARTS)}, found {part_name!r}.")

    def weight_folders(self, folder: Path) -> dict[str, Path]:
        """{part: folder of its weights}, for the parts that `weights` names.

        Args:
            folder: of this config; paths are relative to it.

        Raises:
            RuntimeConfigError: a folder does not exist.
        """
        found = {}
        for part, place in (self.weights or {}).items():
            beside = folder / place
            try:
                found[part] = beside if beside.is_dir() else find_model_folder(place)
            except RuntimeConfigError as error:
                raise RuntimeConfigError(
                    f"{folder}/config.json: weights.{part}: expected a folder (relative to {folder}) or the id of a "
                    f"cached model, found {place!r}."
                ) from error
        return found


class Projector(nn.Module):
    """[items, rows, width] -> [items, tokens, out]; rows that fill no token are dropped.

    `stack` joins neighbouring rows, `merge` and `pool` take the rows as a square and join or average squares of it.
    """

    def __init__(self, settings: dict[str, Any], width: int, out: int) -> None:
        super().__init__()
        self.stack, self.merge, self.pool = (int(settings.get(name, 1)) for name in ("stack", "merge", "pool"))
        bias, width = bool(settings.get("bias", True)), width * self.stack * self.merge**2
        norms = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}
        self.norm = norms[settings["norm"]](width, eps=1e-6) if settings.get("norm") else nn.Identity()
        if settings["kind"] == "linear":
            self.layers = nn.Sequential(nn.Linear(width, out, bias=bias))
        else:
            inner = int(settings.get("hidden_size", out))
            self.layers = nn.Sequential(nn.Linear(width, inner, bias=bias), nn.GELU(), nn.Linear(inner, out, bias=bias))

    def forward(self, rows: Tensor) -> Tensor:
        items, count, width = rows.shape
        side = self.merge * self.pool
        if side > 1:
            squares = rows.unflatten(1, (math.isqrt(count), -1)).unfold(1, side, side).unfold(2, side, side)
            # [items, rows, columns, width, side, side]
            joined = squares.mean((-2, -1)) if self.pool > 1 else squares.permute(0, 1, 2, 4, 5, 3).flatten(3)
            joined = joined.flatten(1, 2)
        else:
            tokens = count // self.stack
            joined = rows[:, : tokens * self.stack].reshape(items, tokens, self.stack * width)
        projected: Tensor = self.layers(self.norm(joined))
        return projected


class ComposedModel(PreTrainedModel):
    """Encoders, projectors and a language model."""

    config_class = ComposedConfig
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: ComposedConfig) -> None:
        super().__init__(config)
        config.check()
        parts: Any = config
        out = parts.text_config.hidden_size
        if config.vision_config is not None:
            self.vision_tower = AutoModel.from_config(parts.vision_config)
            if parts.vision_config.model_type in SQUARE_TOWERS:
                self.vision_projector = Projector(parts.vision_projector, parts.vision_config.hidden_size, out)
        if config.audio_config is not None:
            self.audio_tower = _audio_tower(parts.audio_config)
            self.audio_projector = Projector(parts.audio_projector, parts.audio_config.d_model, out)
        self.language_model = AutoModelForCausalLM.from_config(parts.text_config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        input_features: Tensor | None = None,
        feature_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The language model's output.

        Args:
            input_ids: [samples, T] with one placeholder per feature.
            pixel_values: of all images: [images, channels, height, width], or [P, values] of a Qwen tower.
            image_grid_thw: [images, 3] of a Qwen tower.
            input_features: [clips, mel bins, frames] of all clips.
            feature_attention_mask: [clips, frames] 1 where a clip has sound.
            kwargs: of the language model, such as `labels` and `attention_mask`.
        """
        embedded = self.language_model.get_input_embeddings()(input_ids)
        found = []
        if pixel_values is not None:
            found.append((self.config.image_token_id, self.image_features(pixel_values, image_grid_thw)))
        if input_features is not None:
            assert feature_attention_mask is not None
            found.append((self.config.audio_token_id, self.audio_features(input_features, feature_attention_mask)))
        for token, features in found:
            is_feature = (input_ids == token)[..., None].expand_as(embedded)
            if is_feature.sum() != features.numel():
                raise ValueError(f"expected {len(features)} placeholders {token}, found {(input_ids == token).sum()}")
            embedded = embedded.masked_scatter(is_feature, features.to(embedded.dtype))
        return self.language_model(inputs_embeds=embedded, **kwargs)

    def image_features(self, pixel_values: Tensor, image_grid_thw: Tensor | None = None) -> Tensor:
        """[F, W] of all images."""
        if self.config.vision_config.model_type in NATIVE_TOWERS:
            features: Tensor = self.vision_tower(pixel_values, grid_thw=image_grid_thw).pooler_output
            return features
        rows = self.vision_tower(pixel_values).last_hidden_state
        has_class_token = self.config.vision_config.model_type in _CLASS_TOKEN_TOWERS
        projected: Tensor = self.vision_projector(rows[:, 1:] if has_class_token else rows)
        return projected.flatten(0, 1)

    def audio_features(self, input_features: Tensor, feature_attention_mask: Tensor) -> Tensor:
        """[F, W] of all clips; what is padded on is left out."""
        rows = (feature_attention_mask.sum(-1) + 1) // 2
        if self.config.audio_config.model_type == "whisper":
            encoded = self.audio_tower(input_features).last_hidden_state
        else:
            count = input_features.shape[-1] // 2
            is_sound = torch.arange(count, device=rows.device) < rows[:, None]
            mask = is_sound[:, None, None, :].expand(-1, 1, count, -1)
            encoded = self.audio_tower(input_features, attention_mask=mask).last_hidden_state
            rows = rows // 2
        tokens = rows // self.audio_projector.stack
        projected = self.audio_projector(encoded)
        return torch.cat([clip[:count] for clip, count in zip(projected, tokens.tolist(), strict=True)])

    def is_projector(self, parameter_name: str) -> bool:
        """Whether a parameter is one of the part `projector`."""
        return parameter_name.startswith(("vision_projector.", "audio_projector.", "vision_tower.merger."))

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write one folder per part and the config that names them; see `from_pretrained`."""
        from safetensors.torch import save_file

        folder = Path(save_directory)
        towers = [part for part in ("vision_tower", "audio_tower", "language_model") if hasattr(self, part)]
        for part in towers:
            getattr(self, part).save_pretrained(folder / part, **kwargs)
        (folder / "projector").mkdir(parents=True, exist_ok=True)
        projectors = {name: p.detach().contiguous() for name, p in self.named_parameters() if self.is_projector(name)}
        save_file(projectors, folder / "projector" / "model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self.config)
        config.weights = {part: part for part in (*towers, "projector")}
        config.architectures = [type(self).__name__]
        config.save_pretrained(folder)

    @classmethod
    def from_pretrained(cls, folder: Any, *, seed: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
        """Build the model and read its weights.

        Args:
            folder: as `save_pretrained` writes it, or with weights of one's own choice.
            seed: of the parts that `weights` does not name, as a run draws them; None refuses such parts.
            dtype: of the parameters.

        Raises:
            RuntimeConfigError: a part has no weights, or a parameter is missing or has another shape.
        """
        from entrain_opt.runtime.composed import load_composed

        return load_composed(Path(folder), seed=seed, dtype=dtype)


def _audio_tower(config: Any) -> Any:
    """The encoder alone; Transformers' class for Whisper's config has a decoder too."""
    if config.model_type == "whisper":
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        return WhisperEncoder._from_config(config)
    return AutoModel.from_config(config)


def register_composed() -> None:
    """Make `AutoConfig` know composed models; calling it again changes nothing."""
    AutoConfig.register(COMPOSED_TYPE, ComposedConfig, exist_ok=True)
