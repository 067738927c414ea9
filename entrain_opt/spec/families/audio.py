"""Audio encoders of Whisper's kind: two convolutions over mel frames (the second halves them), then plain layers.

Attention covers at most 30 seconds (`max_source_positions`); Qwen2.5-Omni's encoder attends within chunks of
`n_window` positions. Patches are positions behind the convolutions. Their embedding multiplies, per position, two
frames of three times `num_mel_bins` values and three times `d_model` values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from entrain_opt.spec.families.fields import Fields, known_type
from entrain_opt.spec.model import AttentionWindow, LayerKind, ModuleSpec

_QWEN = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "max_source_positions": 1500,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "whisper": {
        "num_mel_bins": 80,
        "encoder_layers": 4,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1536,
        "d_model": 384,
        "max_source_positions": 1500,
    },
    "qwen2_audio_encoder": _QWEN,
    "qwen2_5_omni_audio_encoder": {**_QWEN, "n_window": 100, "output_dim": 3584},
}
AUDIO_TYPES = tuple(_DEFAULTS)


def read_audio(
    given: Mapping[str, Any] | None, where: str, *, default: str, fixed: bool = False
) -> tuple[ModuleSpec, int | None]:
    """(the encoder with its last norm, the width it projects to by itself or None).

    Args:
        given: the config; of a Whisper model, only the encoder's fields are read.
        where: file and part, for messages.
        default: model type where the config has none.
        fixed: that type is the only one, whatever the config says.

    Raises:
        RuntimeConfigError: an unknown type, or a field without sense.
    """
    given = given or {}
    name = known_type(given, where, _DEFAULTS, default=default, fixed=fixed)
    audio = Fields(given, _DEFAULTS[name], where)
    layers = audio.count("encoder_layers", "num_hidden_layers")
    hidden, inner = audio.count("d_model", "hidden_size"), audio.count("encoder_ffn_dim", "intermediate_size")
    heads = audio.count("encoder_attention_heads", "num_attention_heads")
    mel, positions = audio.count("num_mel_bins"), audio.count("max_source_positions")
    # Keys have no bias.
    layer = 4 * hidden * hidden + 3 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    embedding = 3 * mel * hidden + hidden + 3 * hidden * hidden + hidden
    output, unused, width = 2 * hidden, 0, None
    keys = positions
    if name == "qwen2_5_omni_audio_encoder":
        width, keys = audio.count("output_dim"), audio.count("n_window")
        output += hidden * width + width
        unused = 2 * width  # Begin and end tokens that the forward pass does not insert.
    else:
        embedding += positions * hidden  # Fixed sinusoids, kept among the weights.
    kind = LayerKind(
        name="window",
        layers=tuple(range(layers)),
        parameters=layer,
        active_parameters=layer,
        intermediate_size=inner,
        window=AttentionWindow(shape="blocks", keys=keys),
    )
    module = ModuleSpec(
        name="audio",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_size=hidden // heads,
        gated_mlp=False,
        layer_parameters=layer,
        input_parameters=embedding,
        output_parameters=output,
        input_width=2 * 3 * mel + 3 * hidden,
        unused_parameters=unused,
        layer_kinds=(kind,),
        drops_inside=audio.drops("attention_dropout", "activation_dropout"),
    )
    return module, width
