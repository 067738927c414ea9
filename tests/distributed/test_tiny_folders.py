"""Each `models/tiny-*` folder: real processors, real media, the plain model's loss, and the planner's token counts."""

import json
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import TOLERANCE, ReaderWithTable, expected_gradients, make_plan, run_pipeline
from transformers import AutoFeatureExtractor, AutoImageProcessor

from entrain_opt.runtime.families import read_family
from entrain_opt.runtime.reader import ChatReader
from entrain_opt.runtime.stages import build_rank_model
from entrain_opt.workload.images import open_image
from entrain_opt.workload.index import measure_dataset

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "recipes" / "data" / "physics" / "images").iterdir())
IMAGE_FOLDERS = sorted(path.parent.name for path in (ROOT / "models").glob("tiny-*/preprocessor_config.json"))
IMAGE_FOLDERS.remove("tiny-qwen2-audio")
RATE = 8000


def write_dataset(folder, media_of_samples, kind):
    lines = []
    for index, media in enumerate(media_of_samples):
        parts = [{"type": kind, "path": str(path)} for path in media]
        # Text between media, as real conversations have it.
        content = [piece for part in parts for piece in (part, {"type": "text", "text": "and"})]
        content.append({"type": "text", "text": f"What is shown in {index}?"})
        answer = [{"type": "text", "text": "A wave in a tube. " * (index + 1)}]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": f"s{index}", "messages": messages}))
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines))
    return path


def write_clips(folder):
    for index, samples in enumerate((900, 5000, 12_345)):
        values = np.random.default_rng(index).integers(-3000, 3000, samples).astype("<i2")
        with wave.open(str(folder / f"{index}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(values.tobytes())
    return [folder / f"{index}.wav" for index in range(3)]


def open_reader(tmp_path, name, media, kind):
    dataset = write_dataset(tmp_path, media, kind)
    table, bad = measure_dataset(dataset, ROOT / "models" / name)
    assert not bad
    return ChatReader.open(dataset, table, ROOT / "models" / name, cache_dir=tmp_path / "cache"), table


def assert_loss_is_the_plain_models(reader, table, module, plain_inputs):
    """One iteration of a cut model, and the plain model on what the processor itself makes of each sample."""
    folder, family = reader.model_folder, reader.family
    vision_layers, llm_layers = family.num_layers()[module], family.num_layers()["llm"]
    split = [(module, (0, 2), 0), (module, (2, vision_layers), 0), ("llm", (0, 1), 0), ("llm", (1, llm_layers), 0)]
    reader_table = ReaderWithTable(reader, table)
    rows = list(range(len(table)))
    loss, *_ = run_pipeline(make_plan(folder, split), reader_table, rows, training=False)
    whole = build_rank_model(folder, make_plan(folder, split), 0, seed=7)
    model = read_family(folder).new_model()
    model.load_state_dict(whole.model.state_dict())
    model.eval()
    texts = [reader.text(row) for row in rows]
    ids = [torch.from_numpy(text.input_ids)[None] for text in texts]
    with torch.no_grad():
        expected, _ = expected_gradients(
            model, [{"input_ids": ids[row], **plain_inputs(row, ids[row])} for row in rows], texts
        )
    assert loss == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("name", IMAGE_FOLDERS)
def test_images(name, tmp_path):
    media = [(IMAGES[0],), (), (IMAGES[3], IMAGES[10]), (IMAGES[20],), (IMAGES[5], IMAGES[1], IMAGES[30])]
    reader, table = open_reader(tmp_path, name, media, "image")
    processor = AutoImageProcessor.from_pretrained(reader.model_folder)
    placeholder = reader.encoder.media_token_ids["image"]

    def plain_inputs(row, ids):
        if not media[row]:
            return {}
        images = [open_image(path) for path in media[row]]
        settings = reader.family.image_settings()
        made = dict(processor(images=[images] if nested else images, return_tensors="pt", **settings))
        kept = {key: value for key, value in made.items() if key not in ("num_crops", "num_patches", "rows", "cols")}
        is_image = (ids == placeholder).int()
        if reader.family.config.model_type == "gemma3":
            kept["token_type_ids"] = is_image
        if "image_grid_thw" in kept:
            kept["mm_token_type_ids"] = is_image
        return kept

    nested = reader.family.config.model_type in ("llava_onevision", "smolvlm", "idefics3")
    assert_loss_is_the_plain_models(reader, table, "vision", plain_inputs)


def test_audio(tmp_path):
    clips = write_clips(tmp_path)
    media = [(clips[0],), (), (clips[2], clips[1]), (clips[1],)]
    reader, table = open_reader(tmp_path, "tiny-qwen2-audio", media, "audio")
    extractor = AutoFeatureExtractor.from_pretrained(reader.model_folder)

    def plain_inputs(row, ids):
        if not media[row]:
            return {}
        waves = []
        for path in media[row]:
            with wave.open(str(path)) as file:
                waves.append(np.frombuffer(file.readframes(file.getnframes()), dtype="<i2") / 32768)
        made = extractor(
            waves, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="pt"
        )
        return {
            "input_features": made["input_features"],
            "feature_attention_mask": made["attention_mask"],
            "attention_mask": torch.ones_like(ids),
        }

    assert_loss_is_the_plain_models(reader, table, "audio", plain_inputs)
