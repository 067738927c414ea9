"""A model that is not known gives an error that says what to write and where the ten steps stand."""

import json
import re
from pathlib import Path

import pytest
from media_cases import write_folder
from transformers import AutoConfig

from entrain_opt.errors import FAMILY_GUIDE, RuntimeConfigError
from entrain_opt.runtime.families import family_of, read_family
from entrain_opt.spec import ModelSpec
from entrain_opt.workload.media import media_rule

ROOT = Path(__file__).parents[2]
TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAVA = {
    "model_type": "llava",
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, **TINY},
    "text_config": {"model_type": "llama", "vocab_size": 16, **TINY},
}


def test_the_guide_is_there_and_has_ten_steps():
    file, _, anchor = FAMILY_GUIDE.split(" ")[0].partition("#")
    text = (ROOT / file).read_text(encoding="utf-8")
    sections = {
        re.sub(r"\W+", "-", title.lower()): body for title, body in re.findall(r"\n## (.+)\n([^\x00]*?)(?=\n## )", text)
    }
    steps = re.findall(r"^(\d+)\. ", sections[anchor], flags=re.MULTILINE)
    assert steps == [str(number) for number in range(1, 11)]
    # Every file that it names exists.
    for link in re.findall(r"\]\(([^)#]+)\)", sections[anchor]):
        assert (ROOT / link).exists(), link


def assert_says(error, *expected):
    for piece in (*expected, FAMILY_GUIDE):
        assert piece in str(error.value), str(error.value)


def test_a_family_that_nothing_executes(tmp_path):
    write_folder(tmp_path, {"model_type": "paligemma"})
    with pytest.raises(RuntimeConfigError) as error:
        read_family(tmp_path)
    assert_says(error, "'paligemma'", "`place_encoder`", "`encode`", "runtime/families/__init__.py")


def test_a_family_that_nothing_plans_for(tmp_path):
    write_folder(tmp_path, {"model_type": "paligemma"})
    with pytest.raises(RuntimeConfigError) as error:
        ModelSpec.from_pretrained(tmp_path)
    assert_says(error, "config.json: model_type", "'paligemma'", "a reader of its config in entrain_opt/spec/families/")


@pytest.mark.parametrize(
    ("part", "found"),
    [("vision_config", "dinov2"), ("text_config", "gpt2"), ("text_config", "cohere2")],
)
def test_a_part_of_an_unknown_type(part, found, tmp_path):
    config = {**LLAVA, part: {"model_type": found}}
    with pytest.raises(RuntimeConfigError) as error:
        ModelSpec.from_pretrained(write_folder(tmp_path, config))
    assert_says(error, f"{part}.model_type", repr(found), "formula of parameters")


@pytest.mark.parametrize(
    ("part", "given", "write"),
    [
        ("vision_config", {"model_type": "pixtral"}, "`place_encoder`, `encoder_shape` and `encode`"),
        ("text_config", {"model_type": "gemma3_text"}, "`embed`, `decode` and `logits`"),
        ("text_config", {"model_type": "mixtral"}, "`embed`, `decode` and `logits`"),
    ],
)
def test_a_part_that_is_known_elsewhere_only_is_not_run_as_another(part, given, write, tmp_path):
    """Their layers have the names that this family looks for, so that without the check something else would train."""
    config = AutoConfig.for_model(**{**LLAVA, part: {**TINY, **given}})
    with pytest.raises(RuntimeConfigError) as error:
        family_of(config)
    assert_says(error, f"{part}.model_type", repr(given["model_type"]), write, "runtime/families/llava.py")


def test_a_submodule_that_no_stage_holds():
    family = family_of(AutoConfig.for_model(**LLAVA))
    with pytest.raises(RuntimeConfigError) as error:
        family.place("model.resampler.query")
    assert_says(error, "'model.resampler.query'", "`place_encoder`", "runtime/families/llava.py")


def test_an_image_processor_without_a_rule(tmp_path):
    folder = write_folder(tmp_path, LLAVA, preprocessor_config={"image_processor_type": "FuyuImageProcessor"})
    with pytest.raises(RuntimeConfigError) as error:
        media_rule(folder)
    assert_says(error, "'FuyuImageProcessor'", "MediaRule in entrain_opt/workload/media/")


def test_an_audio_encoder_without_a_rule(tmp_path):
    config = {"model_type": "qwen2_audio", "audio_config": {"model_type": "wavlm"}}
    settings = {"feature_extractor_type": "WhisperFeatureExtractor"}
    with pytest.raises(RuntimeConfigError) as error:
        media_rule(write_folder(tmp_path, config, preprocessor_config=settings))
    assert_says(error, "audio_config.model_type", "'wavlm'", "MediaRule in entrain_opt/workload/media/")


def test_every_executed_family_is_planned_for_and_has_a_folder():
    from entrain_opt.runtime.families import _FAMILIES
    from entrain_opt.spec.families import FAMILIES

    assert set(_FAMILIES) <= set(FAMILIES)
    shipped = {json.loads(path.read_text())["model_type"] for path in (ROOT / "models").glob("tiny-*/config.json")}
    # SmolVLM's folder stands for Idefics3, which it is but for a name.
    assert set(_FAMILIES) - shipped <= {"idefics3"}
