"""The shipped model folders and data are what plain Transformers and a first run need."""

import dataclasses
import filecmp
import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from entrain_opt.workload.chat import ChatEncoder
from entrain_opt.workload.dataset import ChatDataset
from entrain_opt.workload.images import open_image
from entrain_opt.workload.index import index_dataset
from entrain_opt.workload.media import media_rule

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny-llava"
PHYSICS = ROOT / "recipes" / "data" / "physics"
COMPOSED = ("qwen2_5-vit-llama3_2-1b", "qwen2_5-vit-llama3_2-3b", "qwen2_5-vit-whisper-llama3_1-8b")
PUBLISHED = (
    "gemma-3-4b", "internvl3-8b", "llava-onevision-7b", "mistral-small-3_1-24b", "qwen2-audio-7b", "qwen2_5-vl-3b",
    "qwen2_5-vl-7b", "qwen3-vl-4b", "smolvlm2-2_2b", "smolvlm2-500m",
)  # fmt: skip


def test_tiny_llava_loads_with_plain_transformers():
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    config = AutoConfig.from_pretrained(TINY)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForImageTextToText.from_config(config)
    assert 5e6 <= model.num_parameters() <= 15e6
    assert config.image_token_id == tokenizer.convert_tokens_to_ids("<image>")
    assert len(tokenizer) == config.text_config.vocab_size
    assert min(config.vision_config.num_hidden_layers, config.text_config.num_hidden_layers) >= 6
    assert config.text_config.attention_dropout == config.vision_config.attention_dropout == 0
    assert config.text_config.max_position_embeddings == 4096
    for token in ("bos", "eos", "pad"):
        assert getattr(tokenizer, f"{token}_token_id") == getattr(config.text_config, f"{token}_token_id")


@pytest.mark.parametrize("text", ["", "a", "naïve 🙂 שלום\n\n  tabs\t", "P\u03c0r\u00b2 = 3.14", "\x00\x7f"])
def test_tokenizer_round_trips(text):
    tokenizer = ChatEncoder.from_pretrained(TINY).tokenizer
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_model_makes_as_many_features_as_the_rule_says():
    import torch
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

    processor = AutoImageProcessor.from_pretrained(TINY)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(TINY)).eval()
    path = sorted((PHYSICS / "images").iterdir())[0]
    image = open_image(path)
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    size = media_rule(TINY).image(*image.size)
    with torch.no_grad():
        features = torch.cat(list(model.model.get_image_features(pixel_values=pixels).pooler_output))
    assert len(features) == size.tokens
    assert len(pixels) == size.segments


def test_script_writes_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_tiny_llava.py", "--output", str(tmp_path)])
    runpy.run_path(str(ROOT / "models" / "scripts" / "make_tiny_llava.py"), run_name="__main__")
    names = [path.name for path in TINY.iterdir()]
    _, differing, missing = filecmp.cmpfiles(TINY, tmp_path, names, shallow=False)
    assert not differing
    assert not missing


def test_planning_script_writes_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_planning_folders.py", "--output", str(tmp_path)])
    runpy.run_path(str(ROOT / "models" / "scripts" / "make_planning_folders.py"), run_name="__main__")
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert {path.parts[0] for path in written} == {*COMPOSED, *PUBLISHED}
    shipped = {path: (ROOT / "models" / path).read_bytes() for path in written}
    assert written == shipped
    for name in (*COMPOSED, *PUBLISHED):
        assert all(Path(name, path.name) in written for path in (ROOT / "models" / name).iterdir())


def test_shipped_data_fits_the_repository_and_the_model():
    files = [path for path in PHYSICS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8 * 2**20
    assert "CC BY 4.0" in (PHYSICS / "README.md").read_text(encoding="utf-8")
    pictures = {}
    for split, expected in (("train", 160), ("validation", 24)):
        path = PHYSICS / f"{split}.jsonl"
        samples = index_dataset(path, TINY)
        assert len(samples) >= expected
        assert samples.text_tokens.max() <= 1500
        assert samples.total_tokens.max() <= 4096
        assert set(np.minimum(samples.media_counts, 2)) == {0, 1, 2}
        pictures[split] = {item.path.name for sample in ChatDataset(path) for item in sample.media}
    assert not pictures["train"] & pictures["validation"]
    assert pictures["train"] | pictures["validation"] == {path.name for path in (PHYSICS / "images").iterdir()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_planning_folders_load_with_plain_transformers(name):
    """They hold no field that Transformers does not know: a misspelled one would be taken for its default."""
    from transformers import AutoConfig, AutoFeatureExtractor, AutoImageProcessor

    folder = ROOT / "models" / name
    config = AutoConfig.from_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    for part, fields in {"": written, **{k: v for k, v in written.items() if k.endswith("_config")}}.items():
        known = getattr(config, part) if part else config
        # Read from the keyword arguments of older configs: the last two.
        names = {field.name for field in dataclasses.fields(known)} | {"model_type", *known.attribute_map}
        assert set(fields) <= names | {"sliding_window_pattern", "tie_word_embeddings"}, part
    if name == "qwen2-audio-7b":
        assert AutoFeatureExtractor.from_pretrained(folder).nb_max_frames == 3000
    else:
        processor = AutoImageProcessor.from_pretrained(folder)
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        assert type(processor).__name__ == settings["image_processor_type"]
        assert set(settings) <= {*dir(type(processor)), *processor.valid_kwargs.__annotations__, "image_processor_type"}


@pytest.mark.parametrize("name", COMPOSED)
def test_parts_of_composed_folders_load_with_plain_transformers(name):
    from transformers import AutoConfig, AutoImageProcessor

    config = json.loads((ROOT / "models" / name / "config.json").read_text())
    assert config["model_type"] == "entrain_composed"
    text = AutoConfig.for_model(**config["text_config"])
    assert config["vision_config"]["out_hidden_size"] == text.hidden_size
    assert text.rope_parameters["rope_type"] == "llama3"
    if "audio_config" in config:
        assert AutoConfig.for_model(**config["audio_config"]).encoder_layers == 32
    else:
        assert AutoImageProcessor.from_pretrained(ROOT / "models" / name).merge_size == 2
