"""The shipped model folders and data are what plain Transformers and a first run need."""

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
PLANNING = ("qwen2_5-vit-llama3_2-1b", "qwen2_5-vit-llama3_2-3b")


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
    for name in PLANNING:
        for file in ("config.json", "preprocessor_config.json"):
            assert (tmp_path / name / file).read_bytes() == (ROOT / "models" / name / file).read_bytes()


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


@pytest.mark.parametrize("name", PLANNING)
def test_planning_folders_load_with_plain_transformers(name):
    from transformers import AutoConfig, AutoImageProcessor

    config = AutoConfig.from_pretrained(ROOT / "models" / name)
    assert config.vision_config.out_hidden_size == config.text_config.hidden_size
    assert config.text_config.rope_parameters["mrope_section"]
    assert AutoImageProcessor.from_pretrained(ROOT / "models" / name).merge_size == 2
    assert json.loads((ROOT / "models" / name / "config.json").read_text())["model_type"] == "qwen2_5_vl"
