"""Audio rules equal the real extractor, processors and encoders; models with several encoders have all rules."""

import numpy as np
import pytest
from media_cases import borrowed, random_sizes, small_tokenizer, write_folder

from entrain_opt.errors import RuntimeConfigError, WorkloadError
from entrain_opt.workload.media import CombinedRule, WhisperRule, media_rule

WHISPER = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128}
TINY_AUDIO = {
    "d_model": 8,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "num_mel_bins": 16,
    "max_source_positions": 1500,
}


def audio_folder(tmp_path, **settings):
    config = {"model_type": "qwen2_audio", "audio_config": {"max_source_positions": 1500}}
    return write_folder(tmp_path, config, preprocessor_config={**WHISPER, **settings})


def omni_folder(tmp_path, *, nested=True, **settings):
    thinker = {
        "model_type": "qwen2_5_omni_thinker",
        "audio_config": {"n_window": 100},
        "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112},
    }
    config = {"model_type": "qwen2_5_omni", "thinker_config": thinker} if nested else thinker
    both = {**WHISPER, "chunk_length": 300, "image_processor_type": "Qwen2VLImageProcessor", **settings}
    return write_folder(tmp_path, config, preprocessor_config=both)


def random_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    lengths = np.exp(np.random.default_rng(seed).uniform(0, np.log(longest), size=count)).astype(int)
    return [1, 160, 161, 320, 321, 480, 481, longest - 1, longest, *map(int, lengths)]


def extractor(**settings):
    """Whisper's, without its slow filters and spectrogram, whose lengths follow from the mask."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=16, **settings)


def test_qwen2_audio_equals_the_processor(tmp_path):
    from transformers import Qwen2AudioProcessor

    rule = media_rule(audio_folder(tmp_path))
    assert rule.kinds == ("audio",)
    processor = Qwen2AudioProcessor(extractor(), small_tokenizer())
    too_short = 0
    for samples in random_lengths(8, 40 * 16_000):
        made = processor(text="<|AUDIO|>", audio=[np.zeros(samples, dtype=np.float32)], sampling_rate=16_000)
        tokens = list(made["input_ids"][0]).count(processor.audio_token_id)
        if tokens == 0:
            too_short += 1
            with pytest.raises(WorkloadError, match=r"too short for one token \(at least 0.0200625\)"):
                rule.audio(samples / 16_000)
            continue
        size = rule.audio(samples / 16_000)
        assert (size.tokens, size.features, size.segments) == (tokens, tokens, 1)
        assert size.patches == np.shape(made["input_features"])[-1] // 2
        assert rule.audio_expansion(samples / 16_000) == (tokens,)
    assert too_short >= 4


def test_two_thousand_clips_equal_the_processor(monkeypatch):
    """In a window of 3 s, without the spectrogram, whose length follows from the window."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    monkeypatch.setattr(
        WhisperFeatureExtractor,
        "_torch_extract_fbank_features",
        lambda self, clips, device: np.zeros((len(clips), 1, 1)),
    )
    processor = Qwen2AudioProcessor(extractor(chunk_length=3), small_tokenizer())
    rule = WhisperRule(max_frames=300, padded_positions=150)
    silence = np.zeros(4 * 16_000, dtype=np.float32)
    for samples in random_lengths(2000, len(silence), seed=1):
        made, texts = processor._process_audio([silence[:samples]], sampling_rate=16_000)
        tokens = texts[0].count("<|AUDIO|>")
        assert tokens == made["num_audio_tokens"][0]
        if tokens:
            assert rule.audio(samples / 16_000).tokens == tokens
        else:
            with pytest.raises(WorkloadError, match="too short"):
                rule.audio(samples / 16_000)


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000])
def test_clips_are_counted_at_the_extractor_s_rate(rate):
    """A quotient of samples and rate is as exact as the samples themselves."""
    rule = WhisperRule(max_frames=10**9)
    for samples in [*random_lengths(300, 10**8, seed=rate), 2 * rate]:
        resampled = -(-samples * 16_000 // rate)
        assert rule.mel_frames(samples / rate) == -(-resampled // 160)


def test_qwen2_audio_equals_the_features_of_the_model(tmp_path):
    import torch
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    text = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2AudioConfig(audio_config=TINY_AUDIO, text_config=text, audio_token_id=1)
    model = Qwen2AudioForConditionalGeneration(config).eval()
    rule = media_rule(audio_folder(tmp_path))
    # Where no two audio tokens stand together, the model takes the text for one that is not expanded yet.
    for samples in (1_120, 16_000, 16_001, 35 * 16_000):
        clip = np.zeros(samples, dtype=np.float32)
        made = extractor()(clip, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt")
        size = rule.audio(samples / 16_000)
        ids = torch.tensor([[2, *[1] * size.tokens, 3]])
        seen = []
        model.model.audio_tower.layers[0].register_forward_hook(
            lambda *args, seen=seen: seen.append(args[1][0].shape[1])
        )
        with torch.no_grad():
            logits = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                input_features=made["input_features"],
                feature_attention_mask=made["attention_mask"],
            ).logits
        # A count of placeholders that differs from the features raises in the model.
        assert logits.shape[1] == size.tokens + 2
        assert seen == [size.patches]


@pytest.mark.parametrize("nested", [True, False])
def test_omni_audio_equals_processor_and_encoder(nested, tmp_path):
    import torch
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder, get_audio_cu_seqlens
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor

    rule = media_rule(omni_folder(tmp_path, nested=nested))
    assert rule.kinds == ("image", "audio", "video")
    count = borrowed(Qwen2_5OmniProcessor, "_get_num_audio_tokens", feature_extractor=extractor(chunk_length=300))
    for samples in random_lengths(2000, 310 * 16_000):
        if (tokens := count(samples)) == 0:
            with pytest.raises(WorkloadError, match="too short for one token"):
                rule.audio(samples / 16_000)
        else:
            assert rule.audio(samples / 16_000).tokens == tokens
    encoder = Qwen2_5OmniAudioEncoder(Qwen2_5OmniAudioEncoderConfig(**TINY_AUDIO, n_window=100, output_dim=8)).eval()
    for frames in (3, 4, 199, 200, 201, 202, 1003):
        size = rule.audio(frames / 100)
        lengths = torch.tensor([frames])
        positions, outputs = encoder._get_feat_extract_output_lengths(lengths)
        with torch.no_grad():
            features = encoder(torch.zeros(16, frames), feature_lens=lengths, aftercnn_lens=positions).last_hidden_state
        assert len(features) == int(outputs) == size.tokens
        chunks = torch.tensor([200] * (frames // 200) + [frames % 200] * (frames % 200 > 0))
        bounds = get_audio_cu_seqlens(chunks)
        assert (1, int(bounds[-1])) == (size.segments, size.patches)


def test_omni_images_and_videos_are_those_of_the_vision_family(tmp_path):
    from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor

    omni = media_rule(omni_folder(tmp_path / "omni", min_pixels=3136, max_pixels=12_845_056))
    images = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12_845_056}
    vision = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "window_size": 112}}
    # The combined processor sets the size of videos whatever the files say.
    size = Qwen2_5OmniProcessor.videos_kwargs["size"]
    folder = write_folder(
        tmp_path / "vision", vision, preprocessor_config=images, video_preprocessor_config={"size": size}
    )
    vision_rule = media_rule(folder)
    assert isinstance(omni, CombinedRule)
    assert isinstance(vision_rule, CombinedRule)
    assert (omni.image_rule, omni.video_rule) == (vision_rule.image_rule, vision_rule.video_rule)
    for width, height in random_sizes(20):
        if max(width, height) <= 200 * min(width, height):
            assert omni.images([(width, height)] * 2) == [vision_rule.image(width, height)] * 2


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_lengths_are_refused(seconds):
    with pytest.raises(WorkloadError, match="longer than 0 seconds"):
        WhisperRule().audio(seconds)


def test_wrong_audio_folders_are_refused(tmp_path):
    with pytest.raises(RuntimeConfigError, match=r"chunk_length: the processor has 6000, .* makes it 3000"):
        media_rule(audio_folder(tmp_path, chunk_length=60))
    with pytest.raises(
        RuntimeConfigError, match=r"expected WhisperFeatureExtractor .* found 'Wav2Vec2FeatureExtractor'"
    ):
        media_rule(audio_folder(tmp_path, feature_extractor_type="Wav2Vec2FeatureExtractor"))
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(RuntimeConfigError, match=r"expected WhisperFeatureExtractor .* found None"):
        media_rule(tmp_path)


def test_an_audio_model_takes_nothing_else(tmp_path):
    rule = media_rule(audio_folder(tmp_path))
    assert rule.images([]) == []
    with pytest.raises(WorkloadError, match="the model takes audio, found an image"):
        rule.images([(5, 5)])
    with pytest.raises(WorkloadError, match="the model takes audio, found a video"):
        rule.video(5, 5, 5)


def test_settings_may_stand_in_sections_of_one_file(tmp_path):
    thinker = {"model_type": "qwen2_5_omni_thinker", "audio_config": {}, "vision_config": {"patch_size": 14}}
    sections = {
        "feature_extractor": {**WHISPER, "chunk_length": 300},
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor", "do_sample_frames": True, "fps": 2},
    }
    rule = media_rule(write_folder(tmp_path / "a", thinker, processor_config=sections))
    assert rule.audio(10.0) == media_rule(omni_folder(tmp_path / "b")).audio(10.0)
    assert (
        rule.video(600, 300, 200, 30.0).patches == media_rule(omni_folder(tmp_path / "b")).video(40, 300, 200).patches
    )


# Composed models


def composed_folder(tmp_path, *, vision=None, audio=None, images=None, **projectors):
    config = {"model_type": "entrain_composed", "text_config": {"model_type": "llama"}, **projectors}
    config |= {"vision_config": vision} if vision else {}
    config |= {"audio_config": audio} if audio else {}
    return write_folder(tmp_path, config, preprocessor_config={**WHISPER, **(images or {})})


QWEN_TOWER = {"model_type": "qwen2_5_vl_vision", "patch_size": 14, "spatial_merge_size": 2}
QWEN_IMAGES = {"image_processor_type": "Qwen2VLImageProcessor"}
SIGLIP_IMAGES = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}}
SIGLIP_TOWER = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 16}


def test_composed_models_have_the_rules_of_their_encoders(tmp_path):
    audio = {"model_type": "qwen2_audio_encoder"}
    both = media_rule(composed_folder(tmp_path / "a", vision=QWEN_TOWER, audio=audio, images=QWEN_IMAGES))
    vision = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14}}
    alone = media_rule(write_folder(tmp_path / "b", vision, preprocessor_config=QWEN_IMAGES))
    assert both.kinds == ("image", "audio", "video")
    assert both.image(640, 480) == alone.image(640, 480)
    assert both.video(9, 640, 480) == alone.video(9, 640, 480)
    assert both.audio(7.0) == media_rule(audio_folder(tmp_path / "c")).audio(7.0)
    assert media_rule(composed_folder(tmp_path / "d", audio=audio)).kinds == ("audio",)


@pytest.mark.parametrize(("stack", "tokens", "audio_tokens"), [(1, 576, 500), (4, 144, 125), (9, 64, 55)])
def test_projectors_that_stack(stack, tokens, audio_tokens, tmp_path):
    projectors = {f"{name}_projector": {"kind": "mlp", "stack": stack} for name in ("vision", "audio")}
    folder = composed_folder(
        tmp_path, vision=SIGLIP_TOWER, audio={"model_type": "whisper"}, images=SIGLIP_IMAGES, **projectors
    )
    rule = media_rule(folder)
    assert rule.kinds == ("image", "audio")
    image, clip = rule.image(100, 900), rule.audio(10.0)
    assert (image.patches, image.tokens, clip.patches, clip.tokens) == (576, tokens, 1500, audio_tokens)


@pytest.mark.parametrize(("join", "tokens"), [({"merge": 2}, 144), ({"pool": 3}, 64), ({"pool": 24}, 1)])
def test_projectors_that_join_squares(join, tokens, tmp_path):
    projector = {"vision_projector": {"kind": "linear", **join}}
    rule = media_rule(composed_folder(tmp_path, vision=SIGLIP_TOWER, images=SIGLIP_IMAGES, **projector))
    assert (rule.image(100, 900).patches, rule.image(100, 900).tokens) == (576, tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_projector": {"stack": 5}}, "stack: expected a divisor of 576 patches, found 5"),
        ({"vision_projector": {"merge": 5}}, "merge: expected a divisor of 24 patches per side, found 5"),
        ({"vision_projector": {"pool": 7}}, "pool: expected a divisor of 24 patches per side, found 7"),
        ({"vision_projector": {"stack": 0}}, "vision_projector.stack: expected at least 1, found 0"),
        ({"images": QWEN_IMAGES}, "for the tower 'siglip_vision_model' of a composed model, found 'Qwen2VL"),
        ({"audio": {"model_type": "wavlm"}}, r"audio_config\.model_type: expected one of .*, found 'wavlm'"),
    ],
)
def test_wrong_composed_folders_are_refused(change, message, tmp_path):
    with pytest.raises(RuntimeConfigError, match=message):
        media_rule(composed_folder(tmp_path, **{"vision": SIGLIP_TOWER, "images": SIGLIP_IMAGES, **change}))
