"""Composed models: any encoder, a projector, any language model, in one config of this project.

    {"model_type": "entrain_composed",
     "vision_config": {"model_type": "qwen2_5_vl_vision", ...},   "vision_projector": {"kind": "own"},
     "audio_config": {"model_type": "whisper", ...},              "audio_projector": {"kind": "mlp", "stack": 4},
     "text_config": {"model_type": "llama", ...}}

The `*_config` are those of Transformers; at least one encoder has to be there. A projector is one of

    own      what the encoder has by itself (Qwen's merger or audio projection), as wide as the language model
    linear   one linear layer
    mlp      linear, GELU, linear

with `bias` (true) and, for the last two, one way to make fewer tokens of the patches (each 1 where it is left out)

    stack    neighbours in a row of patches or positions, whose values are joined
    merge    sides of a square of patches, whose values are joined (the pixel shuffle of InternVL, Idefics3, SmolVLM)
    pool     sides of a square of patches, of which the mean is taken (Gemma 3)

then a `norm` before the first matrix (`layer_norm` or `rms_norm`; none where it is left out), and for `mlp` the inner
`hidden_size` (the language model's width). Features are the encoder's last, behind its last norm where it has one (CLIP
has none for patches). The class token, if any, is dropped first.

To train it, the config needs `image_token_id` and `audio_token_id`, rows of the embedding that the chat template's
placeholders have. Towers that are executed: CLIP, SigLIP, InternVL's, Idefics3's, SmolVLM's, Qwen2.5-VL's, Qwen3-VL's,
Whisper's, Qwen2-Audio's; language models: Llama, Mistral, Qwen2, Qwen3, Gemma 3, Mixtral, Qwen3-MoE. The others are
planned for only. Weights of parts lie in folders of their own:

    "weights": {"vision_tower": "../Qwen2.5-VL-3B-Instruct", "language_model": "../Llama-3.2-1B"}

from `vision_tower`, `audio_tower`, `projector` (also Qwen's merger) and `language_model`, each a path relative to the
model folder or a cached hub id; a part that is not named is drawn from the seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec.families.audio import AUDIO_TYPES, read_audio
from entrain_opt.spec.families.fields import Fields, part, unknown
from entrain_opt.spec.families.parts import Parts, asks_to_tie
from entrain_opt.spec.families.qwen_vision import qwen_output_width, read_qwen2_5_vision, read_qwen3_vision
from entrain_opt.spec.families.text import TEXT_TYPES, read_text
from entrain_opt.spec.families.towers import TOWER_TYPES, read_tower
from entrain_opt.spec.model import ModuleSpec

#: `model_type` of a composed model.
COMPOSED_TYPE = "entrain_composed"

_QWEN2_5_VISION = ("qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder")
_QWEN3_VISION = ("qwen3_vl_vision", "qwen3_vl_moe_vision")
_VISION_TYPES = (*TOWER_TYPES, *_QWEN2_5_VISION, *_QWEN3_VISION)
_PROJECTORS = ("own", "linear", "mlp")
#: Ways to make fewer tokens -> the power of their number by which a joined row is wider than one patch.
_JOINS = {"stack": 1, "merge": 2, "pool": 0}
#: Norm -> learnt values per value of a row.
_NORMS = {"layer_norm": 2, "rms_norm": 1}


def read_composed(config: dict[str, Any], where: str) -> Parts:
    """A composed model.

    Raises:
        RuntimeConfigError: no encoder, an unknown type, or a projector that does not fit.
    """
    given = part(config, "text_config", where)
    if given is None or "model_type" not in given:
        raise unknown(f"{where}: text_config.model_type", TEXT_TYPES, None)
    text = read_text(given, f"{where}: text_config", default="")
    encoders = []
    for name, read in (("vision", _read_vision), ("audio", _read_audio)):
        encoder = part(config, f"{name}_config", where)
        if encoder is None:
            continue
        module, own_width = read(encoder, f"{where}: {name}_config")
        projector = Fields(part(config, f"{name}_projector", where) or {}, {"bias": True}, f"{where}: {name}_projector")
        encoders.append(_with_projector(module, own_width, projector, text.module.hidden_size))
    if not encoders:
        raise RuntimeConfigError(f"{where}: expected vision_config or audio_config, found neither.")
    return Parts(encoders=tuple(encoders), text=text, tied=asks_to_tie(config, where, default=text.tied))


def _read_vision(given: Mapping[str, Any], where: str) -> tuple[ModuleSpec, int | None]:
    name = given.get("model_type")
    if name not in _VISION_TYPES:
        raise unknown(f"{where}.model_type", _VISION_TYPES, name)
    if name in TOWER_TYPES:
        return read_tower(given, where, default=""), None
    module = read_qwen2_5_vision(given, where) if name in _QWEN2_5_VISION else read_qwen3_vision(given, where)
    if module.deepstack_layers:
        raise RuntimeConfigError(
            f"{where}: deepstack_visual_indexes: expected [] in a composed model, because only Qwen3-VL's language "
            f"model takes such features, found {list(module.deepstack_layers)}."
        )
    return module, qwen_output_width(given, where)


def _read_audio(given: Mapping[str, Any], where: str) -> tuple[ModuleSpec, int | None]:
    if given.get("model_type") not in AUDIO_TYPES:
        raise unknown(f"{where}.model_type", AUDIO_TYPES, given.get("model_type"))
    return read_audio(given, where, default="")


def _with_projector(module: ModuleSpec, own_width: int | None, projector: Fields, out: int) -> ModuleSpec:
    kind = projector.get("kind")
    if kind not in _PROJECTORS or (kind == "own") != (own_width is not None):
        expected = ("own",) if own_width is not None else _PROJECTORS[1:]
        raise RuntimeConfigError(
            f"{projector.where}: kind: expected one of {list(expected)} for this encoder, found {kind!r}."
        )
    if kind == "own":
        if own_width != out:
            raise RuntimeConfigError(
                f"{projector.where}: the encoder projects to {own_width} values, expected the language model's "
                f"hidden_size {out}. Set out_hidden_size (vision) or output_dim (audio)."
            )
        return module
    projector.values.setdefault("hidden_size", out)
    width, biased = module.hidden_size * _joined(projector, is_audio=module.name == "audio"), projector.flag("bias")
    norm = projector.get("norm")
    if norm is not None and norm not in _NORMS:
        raise RuntimeConfigError(f"{projector.where}: norm: expected one of {sorted(_NORMS)}, found {norm!r}.")
    if kind == "linear":
        parameters = width * out + biased * out
    else:
        inner = projector.count("hidden_size")
        parameters = width * inner + inner * out + biased * (inner + out)
    parameters += width * _NORMS[norm] if norm is not None else 0
    return replace(module, output_parameters=module.output_parameters + parameters)


def _joined(projector: Fields, *, is_audio: bool) -> int:
    """By how much a joined row is wider than a patch or position."""
    for name in _JOINS:
        projector.values.setdefault(name, 1)
    counts = {name: projector.count(name) for name in _JOINS}
    used = [name for name, count in counts.items() if count > 1]
    allowed = ["stack"] if is_audio else list(_JOINS)
    if len(used) > 1 or not set(used) <= set(allowed):
        raise RuntimeConfigError(
            f"{projector.where}: expected at most one of {allowed} above 1, found "
            f"{ ({name: counts[name] for name in used}) }."
        )
    return math.prod(counts[name] ** power for name, power in _JOINS.items())
