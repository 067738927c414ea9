"""Model folder -> media rule: one rule per media kind that the model takes.

A composed model (`model_type: entrain_composed`) has the encoders of its `vision_config` and `audio_config`, each with
the processor of its own family and a projector that may join `stack` neighbours into one token; positions that do not
fill a token are dropped.
"""

from __future__ import annotations

from pathlib import Path

from entrain_opt.errors import FAMILY_GUIDE, RuntimeConfigError
from entrain_opt.spec.folder import find_model_folder
from entrain_opt.workload.media.audio import WhisperRule
from entrain_opt.workload.media.folder import ModelFiles, setting
from entrain_opt.workload.media.image_rules import image_rule
from entrain_opt.workload.media.rule import CombinedRule, MediaRule
from entrain_opt.workload.media.text import TextCounter
from entrain_opt.workload.media.videos import video_rule

_AUDIO_FAMILIES = {"qwen2_audio", "qwen2_5_omni", "qwen2_5_omni_thinker"}
_OMNI_ENCODER = "qwen2_5_omni_audio_encoder"
#: Encoder positions that each encoder averages into one; the others leave that to the projector.
_POOLED = {"whisper": 1, "qwen2_audio_encoder": 2, _OMNI_ENCODER: 2}


def media_rule(model_folder: str | Path) -> MediaRule:
    """The rule of a Hugging Face model folder: one for images, or a `CombinedRule` with videos or audio.

    Args:
        model_folder: with config.json and the processors' settings (preprocessor_config.json or processor_config.json).

    Raises:
        RuntimeConfigError: a file is missing, the processor is unknown, or model and processor disagree.
    """
    files = ModelFiles.read(find_model_folder(model_folder))
    text = TextCounter.of_folder(files.folder)
    takes_audio = bool(files.audio) if files.is_composed else files.family in _AUDIO_FAMILIES
    audio = whisper_rule(files) if takes_audio else None
    if audio is not None and (files.family == "qwen2_audio" or (files.is_composed and not files.vision)):
        return CombinedRule(audio_rule=audio)
    images = image_rule(files, text)
    videos = video_rule(files, images, text)
    if audio is None and videos is None:
        return images
    return CombinedRule(image_rule=images, audio_rule=audio, video_rule=videos)


def whisper_rule(files: ModelFiles) -> WhisperRule:
    """The rule of a model's audio.

    Raises:
        RuntimeConfigError: no Whisper feature extractor, or its window is not what the encoder takes.
    """
    settings = files.feature_extractor
    rate, hop = setting(settings, "sampling_rate", 16_000), setting(settings, "hop_length", 160)
    max_frames = setting(settings, "chunk_length", 30) * rate // hop
    encoder = setting(
        files.audio, "model_type", "qwen2_audio_encoder" if files.family == "qwen2_audio" else _OMNI_ENCODER
    )
    if encoder not in _POOLED:
        raise RuntimeConfigError(
            f"{files.folder}: audio_config.model_type: expected one of {sorted(_POOLED)}, found {encoder!r}. "
            f"To add it, write a MediaRule in entrain_opt/workload/media/: see {FAMILY_GUIDE}."
        )
    positions = None
    if encoder != _OMNI_ENCODER:
        positions = setting(files.audio, "max_source_positions", 1_500)
        files.expect_equal("chunk_length", max_frames, 2 * positions, "audio_config.max_source_positions (mel frames)")
    return WhisperRule(
        sampling_rate=rate,
        hop_samples=hop,
        max_frames=max_frames,
        positions_per_token=_POOLED[encoder] * files.stack("audio_projector"),
        padded_positions=positions,
        chunk_frames=2 * setting(files.audio, "n_window", 100) if encoder == _OMNI_ENCODER else None,
    )
