"""2,000 random media per shipped model: planner, reader and the folder's real processor count the same.

Pixels are made for a few dozen; the others are files with a header and nothing behind it, of which the real processors
are asked through their functions of sizes. `benchmarks/media_counts.py` makes the pixels of all of them.
"""

import json
import math
import shutil
import wave
import zlib
from pathlib import Path

import numpy as np
import pytest
from media_cases import random_sizes
from PIL import Image
from processor_counts import sample_counts

from entrain_opt.runtime.families import MediaUnit
from entrain_opt.runtime.reader import ChatReader
from entrain_opt.workload.index import measure_dataset
from entrain_opt.workload.media import CombinedRule, PatchRowRule, SmartResizeRule, media_rule

MODELS = Path(__file__).parents[2] / "models"
IMAGE_FOLDERS = sorted(
    path.parent.name
    for path in MODELS.glob("*/preprocessor_config.json")
    if "image_processor_type" in json.loads(path.read_text())
)
TINY = [name for name in IMAGE_FOLDERS if name.startswith("tiny-")]
COUNT, LONGEST, MAX_RATIO = 2000, 8000, 200
RATE = 8000


def images_of(rule):
    return rule.image_rule if isinstance(rule, CombinedRule) else rule


def sizes_for(rule, count, longest, seed=0):
    """Random sizes; the thinnest, which processors of native resolutions refuse, are made wider."""
    found = images_of(rule)
    thinnest = MAX_RATIO if isinstance(found, SmartResizeRule) else longest
    thinnest = found.longest_edge // 2 if isinstance(found, PatchRowRule) else thinnest
    sizes = random_sizes(count, seed=seed, longest=longest)
    return [(max(w, math.ceil(h / thinnest)), max(h, math.ceil(w / thinnest))) for w, h in sizes]


def samples_of(media):
    """Media dealt to samples of one, none, and up to eight; a context of 4,096 tokens holds eight images."""
    samples, rest, counts = [], list(media), [1, 0, 2, 8, 7, 8]
    while rest:
        count = counts[len(samples) % len(counts)]
        samples.append(rest[:count])
        rest = rest[count:]
    return samples


def png_header(path, width, height):
    """A PNG whose pixels are missing: enough for whoever reads headers."""

    def chunk(name, content=b""):
        crc = zlib.crc32(name + content)
        return len(content).to_bytes(4, "big") + name + content + crc.to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT") + chunk(b"IEND"))


def silent_wave(path, samples):
    """A clip of 8-bit silence that occupies no room on disk."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 1, RATE, samples, "NONE", ""))
        file.writeframes(b"\x80")
    header = path.read_bytes()[:-2]
    header = header[:4] + (36 + samples).to_bytes(4, "little") + header[8:40] + samples.to_bytes(4, "little")
    with path.open("wb") as file:
        file.write(header)
        file.truncate(44 + samples)


def write_dataset(folder, samples, kind, suffix):
    """One line per sample of paths `<number>.<suffix>`, numbered through."""
    lines, number = [], 0
    for index, media in enumerate(samples):
        content = [{"type": "text", "text": "See"}]
        for _ in media:
            content.append({"type": kind, "path": f"{number}.{suffix}"})
            number += 1
        answer = {"role": "assistant", "content": "Yes."}
        lines.append(json.dumps({"id": f"s{index}", "messages": [{"role": "user", "content": content}, answer]}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


def open_reader(folder, name, samples, kind, suffix):
    dataset = write_dataset(folder, samples, kind, suffix)
    table, bad = measure_dataset(dataset, MODELS / name, num_workers=0)
    assert not bad
    return ChatReader.open(dataset, table, MODELS / name, cache_dir=folder / "cache"), table


@pytest.mark.parametrize("name", IMAGE_FOLDERS)
def test_rules_of_shipped_folders_equal_their_processors(name):
    rule = media_rule(MODELS / name)
    samples = samples_of(sizes_for(rule, COUNT, 10_000))
    assert sum(map(len, samples)) == COUNT
    for sizes, expected in zip(samples, sample_counts(MODELS / name, samples), strict=True):
        of_rule = rule.images(sizes)
        is_native = isinstance(images_of(rule), (SmartResizeRule, PatchRowRule))
        found = [(size.patches if is_native else size.segments, size.features) for size in of_rule]
        assert found == expected, sizes


@pytest.mark.parametrize("name", TINY)
def test_the_reader_places_as_many_features_as_the_processor_says(name, tmp_path):
    """Through the whole path of data: index, sample table, tokenizer and template."""
    rule = media_rule(MODELS / name)
    samples = samples_of(sizes_for(rule, COUNT, LONGEST, seed=1))
    for number, size in enumerate(size for sizes in samples for size in sizes):
        png_header(tmp_path / f"{number}.png", *size)
    reader, table = open_reader(tmp_path, name, samples, "image", "png")
    placeholder = reader.encoder.media_token_ids["image"]
    for row, expected in enumerate(sample_counts(MODELS / name, samples)):
        text = reader.text(row)
        media = slice(table.media_offsets[row], table.media_offsets[row + 1])
        assert len(text.media_positions) == table.media_tokens[media].sum(), samples[row]
        assert len(text.feature_positions) == sum(features for _, features in expected), samples[row]
        assert np.flatnonzero(text.input_ids == placeholder).tolist() == text.feature_positions.tolist()
        sizes = zip(table.media_patches[media], table.media_segments[media], table.media_tokens[media], strict=True)
        assert [reader.family.features(*map(int, size)) for size in sizes] == [features for _, features in expected]


@pytest.mark.parametrize("name", TINY)
def test_real_pixels_are_what_the_index_says(name, tmp_path):
    rule = media_rule(MODELS / name)
    samples = samples_of(sizes_for(rule, 36, 700, seed=2))
    for number, (width, height) in enumerate(size for sizes in samples for size in sizes):
        Image.new("RGB", (width, height), (number, 90, 200)).save(tmp_path / f"{number}.png")
    reader, table = open_reader(tmp_path, name, samples, "image", "png")
    for row, expected in enumerate(sample_counts(MODELS / name, samples)):
        for item, (rows, features) in enumerate(expected):
            media = int(table.media_offsets[row]) + item
            columns = (table.media_patches, table.media_segments, table.media_tokens)
            patches, segments, tokens = (int(column[media]) for column in columns)
            assert reader.family.features(patches, segments, tokens) == features
            unit = MediaUnit(module="vision", segments=(segments,), patches=(patches,), features=(features,))
            assert len(reader.pixels(row, item)) == rows == reader.family.input_rows(unit)[0], samples[row][item]


def test_internvl_tiles_whatever_the_image_processors_file_says(tmp_path):
    """As its combined processor does; published folders say `crop_to_patches: false`."""
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "tiny-internvl", folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "crop_to_patches": False}))
    Image.new("RGB", (300, 100)).save(tmp_path / "0.png")
    dataset = write_dataset(tmp_path, [[(300, 100)]], "image", "png")
    table, bad = measure_dataset(dataset, folder, num_workers=0)
    assert not bad
    reader = ChatReader.open(dataset, table, folder, cache_dir=tmp_path / "cache")
    assert len(reader.pixels(0, 0)) == int(table.media_segments[0]) == 4  # Three tiles and the whole.


def test_the_reader_places_as_many_audio_tokens_as_the_processor(tmp_path, monkeypatch):
    """Clips of 0.1 to 60 s; the spectrogram, whose length follows from the window, is left out."""
    from transformers import AutoFeatureExtractor, AutoTokenizer, Qwen2AudioProcessor, WhisperFeatureExtractor

    monkeypatch.setattr(
        WhisperFeatureExtractor,
        "_torch_extract_fbank_features",
        lambda self, clips, device: np.zeros((len(clips), 1, 1)),
    )
    lengths = np.exp(np.random.default_rng(3).uniform(math.log(0.1), math.log(60), COUNT)) * RATE
    samples = samples_of(lengths.astype(int).tolist())
    for number, length in enumerate(length for sample in samples for length in sample):
        silent_wave(tmp_path / f"{number}.wav", length)
    folder = MODELS / "tiny-qwen2-audio"
    reader, _ = open_reader(tmp_path, folder.name, samples, "audio", "wav")
    processor = Qwen2AudioProcessor(AutoFeatureExtractor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    # The extractor cuts what exceeds its window of two seconds.
    silence = np.zeros(60 * RATE, dtype=np.float32)
    for row, clips in enumerate(samples):
        texts = [
            processor._process_audio([silence[:length]], sampling_rate=RATE, truncation=True)[1][0] for length in clips
        ]
        expected = sum(text.count("<|AUDIO|>") for text in texts)
        assert len(reader.text(row).feature_positions) == expected, clips
