"""Composed models with one and two encoders: loss and gradients equal the plain model's, in one process and several."""

import json
import shutil
import wave
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import (
    TOLERANCE,
    ReaderWithTable,
    assert_exact,
    expected_gradients,
    freeze,
    make_plan,
    run_pipeline,
)  # fmt: skip
from composed_models import AUDIO_ONLY, CONFIGS, IMAGES_ONLY, ROWS, TEXT_ONLY, ComposedReader
from ranks import run_ranks
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Qwen2_5_VLForConditionalGeneration,
    WhisperForConditionalGeneration,
)

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.plan import ParallelDegrees
from entrain_opt.runtime.composed import load_composed
from entrain_opt.runtime.families import UNUSED, read_family
from entrain_opt.runtime.families.composed_model import ComposedModel
from entrain_opt.runtime.reader import ChatReader
from entrain_opt.runtime.stages import build_rank_model
from entrain_opt.runtime.tensor_layers import check_tensor
from entrain_opt.spec import ModelSpec
from entrain_opt.workload.images import open_image
from entrain_opt.workload.index import measure_dataset

ROOT = Path(__file__).parents[2]
ONE, TWO = "qwen2_5-llama", "qwen2_5-whisper-llama"


def write_composed(root, name, **changes):
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    return folder


def plan_of(folder, stages, **fields):
    """Stages as "module first end rank"."""
    split = []
    for stage in stages.split(", "):
        module, first, end, rank = stage.split()
        split.append((module, (int(first), int(end)), int(rank)))
    return make_plan(folder, split, **fields)


def whole_plan(folder):
    layers = read_family(folder).num_layers()
    return plan_of(folder, ", ".join(f"{module} 0 {count} 0" for module, count in layers.items()))


@lru_cache
def expected_of(folder, name, rows, frozen=()):
    """Loss and gradients of the plain model, one sample at a time."""
    model, family = load_composed(folder, seed=7, dtype=torch.float32), read_family(folder)
    freeze(model, family, frozen)
    reader = ComposedReader(name)
    return expected_gradients(model, map(reader.plain_inputs, rows), [reader.text(row) for row in rows])


#: Cut in one process: every module in two stages, and whole.
CUTS = {
    "qwen2_5-llama": "vision 0 1 0, vision 1 4 0, llm 0 3 0, llm 3 4 0",
    "qwen2_5-whisper-llama": "vision 0 3 0, vision 3 4 0, audio 0 1 0, audio 1 3 0, llm 0 1 0, llm 1 4 0",
    "clip-llama": "vision 0 2 0, vision 2 4 0, llm 0 2 0, llm 2 4 0",
    "siglip-qwen2_audio-mistral": "vision 0 1 0, vision 1 4 0, audio 0 2 0, audio 2 4 0, llm 0 2 0, llm 2 4 0",
    "qwen3-qwen3": "vision 0 2 0, vision 2 4 0, llm 0 1 0, llm 1 4 0",
    "whisper-qwen2": "audio 0 1 0, audio 1 3 0, llm 0 2 0, llm 2 4 0",
    "internvl-qwen2": "vision 0 1 0, vision 1 4 0, llm 0 3 0, llm 3 4 0",
    "idefics3-qwen3_moe": "vision 0 3 0, vision 3 4 0, llm 0 1 0, llm 1 4 0",
    "siglip-gemma3": "vision 0 2 0, vision 2 4 0, llm 0 1 0, llm 1 4 0",
    "smolvlm-whisper-mixtral": "vision 0 2 0, vision 2 4 0, audio 0 2 0, audio 2 3 0, llm 0 2 0, llm 2 4 0",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_cut_in_one_process(name, tmp_path):
    folder = write_composed(tmp_path, name)
    reader = ComposedReader(name)
    towers = tuple(f"{module}_tower" for module in read_family(folder).num_layers() if module != "llm")
    cases = [
        (plan_of(folder, CUTS[name], schedule="eager"), ROWS, ()),
        (plan_of(folder, CUTS[name], frozen=towers[-1:], policy="in_order", num_microbatches=3), ROWS, towers[-1:]),
        (plan_of(folder, CUTS[name], schedule="zero_bubble"), AUDIO_ONLY, ()),
        (whole_plan(folder), IMAGES_ONLY, ()),
        (whole_plan(folder), TEXT_ONLY, ()),
    ]
    for plan, rows, frozen in cases:
        assert_exact(expected_of(folder, name, rows, frozen), [run_pipeline(plan, reader, list(rows))])


#: {world size: model, stages, rows and fields of the plan}
SPLITS = {
    2: [
        (ONE, "vision 0 4 0, llm 0 4 1", ROWS, {}),
        (ONE, "vision 0 2 0, vision 2 4 1, llm 0 2 0, llm 2 4 1", ROWS, {"schedule": "eager"}),
        (TWO, "vision 0 4 0, audio 0 3 0, llm 0 4 1", ROWS, {}),  # merged
        (TWO, "vision 0 4 0, audio 0 3 1, llm 0 4 1", ROWS, {"schedule": "eager"}),
        (TWO, "vision 0 4 0, audio 0 3 0, llm 0 4 1", IMAGES_ONLY, {"frozen": ("vision_tower",)}),
        (TWO, "vision 0 4 0, audio 0 3 0, llm 0 4 0", ROWS, {"data": 2}),
        ("siglip-qwen2_audio-mistral", "vision 0 4 0, audio 0 4 0, llm 0 4 1", ROWS, {"schedule": "zero_bubble"}),
        ("internvl-qwen2", "vision 0 4 0, llm 0 4 1", ROWS, {}),
        ("idefics3-qwen3_moe", "vision 0 2 0, vision 2 4 1, llm 0 2 0, llm 2 4 1", ROWS, {"schedule": "eager"}),
        ("siglip-gemma3", "vision 0 4 0, llm 0 2 0, llm 2 4 1", ROWS, {"schedule": "zero_bubble"}),
        ("smolvlm-whisper-mixtral", "vision 0 4 0, audio 0 3 1, llm 0 3 0, llm 3 4 1", ROWS, {}),
    ],
    3: [
        (TWO, "vision 0 4 0, audio 0 3 1, llm 0 4 2", ROWS, {}),  # parallel
        (TWO, "vision 0 4 0, audio 0 3 1, llm 0 4 2", ROWS, {"schedule": "eager", "policy": "karmarkar_karp"}),
        (TWO, "vision 0 4 0, audio 0 3 1, llm 0 4 2", ROWS, {"schedule": "zero_bubble"}),
        (TWO, "vision 0 4 0, audio 0 3 1, llm 0 4 2", AUDIO_ONLY, {}),
        (TWO, "vision 0 4 0, audio 0 3 1, llm 0 4 2", TEXT_ONLY, {}),
        (TWO, "vision 0 4 0, audio 0 3 1, llm 0 4 2", ROWS, {"frozen": ("audio_tower", "projector")}),
        (TWO, "vision 0 1 0, vision 1 4 1, audio 0 2 0, audio 2 3 1, llm 0 4 2", ROWS, {"num_microbatches": 5}),
    ],
}  # fmt: skip


def run_splits(root, world_size):
    results = []
    for name, stages, rows, fields in SPLITS[world_size]:
        plan = plan_of(root / name, stages, **fields)
        results.append(run_pipeline(plan, ComposedReader(name), list(rows)))
    return results


@pytest.mark.parametrize("world_size", SPLITS)
def test_cut_over_processes(world_size, tmp_path):
    for name, *_ in SPLITS[world_size]:
        write_composed(tmp_path, name)
    of_ranks = run_ranks(run_splits, world_size, tmp_path, world_size, timeout_seconds=600)
    for index, (name, _, rows, fields) in enumerate(SPLITS[world_size]):
        expected = expected_of(tmp_path / name, name, rows, fields.get("frozen", ()))
        assert_exact(expected, [results[index] for results in of_ranks])


@pytest.mark.parametrize("name", CONFIGS)
def test_family_agrees_with_planner_and_model(name, tmp_path):
    folder = write_composed(tmp_path, name)
    model, family = load_composed(folder, seed=7, dtype=torch.float32), read_family(folder)
    spec = ModelSpec.from_pretrained(folder)
    assert family.num_layers() == {module.name: module.num_layers for module in spec.modules}
    assert sum(p.numel() for p in model.parameters()) == spec.parameters + spec.unused_parameters
    assert dict(model.all_tied_weights_keys) == family.tied()
    _, gradients = expected_of(folder, name, ROWS)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n in trained if family.place(n).position == UNUSED} == trained - set(gradients)


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_model_loads_again_whole_and_in_parts(name, tmp_path):
    folder = write_composed(tmp_path, name)
    model = load_composed(folder, seed=7, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    again = ComposedModel.from_pretrained(tmp_path / "saved")
    cut = build_rank_model(tmp_path / "saved", whole_plan(tmp_path / "saved"), 0, seed=99).model.state_dict()
    reader = ComposedReader(name)
    with torch.no_grad():
        for row in (3, 4, 5):
            assert torch.equal(model(**reader.plain_inputs(row)).logits, again(**reader.plain_inputs(row)).logits)
    for parameter_name, value in model.state_dict().items():
        assert torch.equal(cut[parameter_name], value), parameter_name
    # Each part alone, in Transformers' own classes.
    llm = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "language_model")
    assert_equal_states(llm, model.language_model)
    for tower in ("vision_tower", "audio_tower"):
        if hasattr(model, tower):
            part = getattr(model, tower)
            found = type(part) if "Whisper" in type(part).__name__ else AutoModel
            assert_equal_states(found.from_pretrained(tmp_path / "saved" / tower), part)


def assert_equal_states(found, expected):
    states = found.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_parts_come_from_folders_of_their_own(tmp_path):
    """A tower out of Qwen2.5-VL, an encoder out of Whisper and a Llama; the projectors are drawn."""
    from transformers import AutoConfig, Qwen2_5_VLConfig

    parts = CONFIGS[TWO]
    torch.manual_seed(1)
    vision = {**parts["vision_config"], "out_hidden_size": 24}
    text = {**CONFIGS["qwen2_5-llama"]["text_config"], "hidden_size": 24, "model_type": "qwen2_5_vl_text"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}
    qwen = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, text_config=text))
    whisper = AutoConfig.for_model(**parts["audio_config"], decoder_layers=1, decoder_attention_heads=2)
    whisper = WhisperForConditionalGeneration(whisper)
    llama = LlamaForCausalLM(AutoConfig.for_model(**parts["text_config"]))
    for name, model in (("qwen", qwen), ("whisper", whisper), ("llama", llama)):
        model.save_pretrained(tmp_path / name)
    # Qwen's own merger has another width, so it is not asked for.
    weights = {"vision_tower": "../qwen", "audio_tower": str(tmp_path / "whisper"), "language_model": "../llama"}
    folder = write_composed(tmp_path, TWO, weights=weights)
    found = build_rank_model(folder, whole_plan(folder), 0, seed=7).model
    drawn = load_composed(write_composed(tmp_path / "drawn", TWO), seed=7, dtype=torch.float32)
    assert_equal_states(found.language_model, llama)
    assert_equal_states(found.audio_tower, whisper.model.encoder)
    blocks = qwen.model.visual
    assert_equal_states(found.vision_tower.blocks, blocks.blocks)
    assert_equal_states(found.vision_tower.patch_embed, blocks.patch_embed)
    assert_equal_states(found.vision_tower.merger, drawn.vision_tower.merger)
    assert_equal_states(found.audio_projector, drawn.audio_projector)
    with pytest.raises(RuntimeConfigError, match=r"has no weights of \['projector'\]"):
        ComposedModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"text_config": {"model_type": "qwen3_vl_text"}},
            r"text_config.model_type: .*'llama'.* found 'qwen3_vl_text'",
        ),
        (
            {"text_config": {"model_type": "mixtral", "output_router_logits": True}},
            r"output_router_logits: expected no",
        ),
        ({"text_config": {"model_type": "gemma3_text", "final_logit_softcapping": 9.0}}, r"softcapping: .*, found 9.0"),
        ({"vision_config": {"model_type": "pixtral"}}, r"vision_config.model_type: .* found 'pixtral'. To add"),
        ({"audio_config": {"model_type": "qwen2_5_omni_audio_encoder"}}, r"audio_config.*CONTRIBUTING.md"),
        ({"weights": {"vision": "x"}}, r"weights: expected names from \['vision_tower'.* found 'vision'"),
        ({"weights": {"vision_tower": "nowhere"}}, r"weights.vision_tower: expected a folder .* found 'nowhere'"),
        ({"weights": {"vision_tower": "."}}, r"lacks \d+ parameters, the first is 'vision_tower"),
        ({"audio_token_id": None}, r"audio_token_id: expected .*0 to 66\), found None"),
        ({"image_token_id": 67}, r"image_token_id: expected .*, found 67"),
    ],
)
def test_what_cannot_be_executed_is_named(changes, message, tmp_path):
    folder = write_composed(tmp_path, TWO, **changes)
    with pytest.raises(RuntimeConfigError, match=message):
        load_composed(folder, seed=0, dtype=torch.float32)


def test_tiny_folder_with_its_own_processors(tmp_path):
    """The shipped mixed data through the folder's processors, cut, against the plain model on what they make."""
    folder = ROOT / "models" / "tiny-compose-qwen2_5-vit-whisper-llama"
    data = ROOT / "recipes" / "data" / "mixed" / "train.jsonl"
    table, bad = measure_dataset(data, folder)
    assert not bad
    reader = ChatReader.open(data, table, folder, cache_dir=tmp_path)
    kinds = [
        set(table.media_kind[table.media_offsets[row] : table.media_offsets[row + 1]]) for row in range(len(table))
    ]
    rows = [kinds.index(wanted) for wanted in (set(), {0}, {1}, {0, 1})]
    rows += [row for row in range(len(table)) if kinds[row] == {0, 1} and row not in rows][:2]
    plan = plan_of(folder, "vision 0 2 0, vision 2 6 0, audio 0 3 0, audio 3 6 0, llm 0 1 0, llm 1 4 0")
    loss, *_ = run_pipeline(plan, ReaderWithTable(reader, table), rows, training=False)
    model = load_composed(folder, seed=7, dtype=torch.float32)
    images, audio = AutoImageProcessor.from_pretrained(folder), AutoFeatureExtractor.from_pretrained(folder)

    def plain_inputs(row):
        media = reader.dataset[reader.dataset.row_of(str(table.sample_ids[row]))].media
        inputs = {"input_ids": torch.from_numpy(reader.text(row).input_ids)[None]}
        if pictures := [open_image(item) for item in media if item.kind == "image"]:
            inputs |= images(images=pictures, return_tensors="pt")
        if clips := [read_wave(item.path) for item in media if item.kind == "audio"]:
            made = audio(
                clips, sampling_rate=8000, padding="max_length", return_attention_mask=True, return_tensors="pt"
            )
            inputs |= {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
        return inputs

    with torch.no_grad():
        expected, _ = expected_gradients(model, map(plain_inputs, rows), [reader.text(row) for row in rows])
    assert loss == pytest.approx(expected, rel=TOLERANCE)


def test_tiles_of_a_composed_model(tmp_path):
    """InternVL's tower with its processor, cut, against the plain model on the tiles that the processor makes."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "models" / "tiny-internvl", folder)
    config = json.loads((folder / "config.json").read_text())
    parts = {name: config[name] for name in ("vision_config", "text_config", "image_token_id")}
    projector = {"kind": "mlp", "merge": 2, "norm": "layer_norm"}
    composed = {"model_type": "entrain_composed", "vision_projector": projector, **parts}
    (folder / "config.json").write_text(json.dumps(composed))
    data = ROOT / "recipes" / "data" / "physics" / "train.jsonl"
    table, bad = measure_dataset(data, folder)
    assert not bad
    reader = ChatReader.open(data, table, folder, cache_dir=tmp_path)
    tiles = [int(table.media_segments[table.media_offsets[row]]) for row in range(len(table))]
    rows = [tiles.index(count) for count in sorted(set(tiles))]
    assert len(rows) > 1
    plan = plan_of(folder, "vision 0 2 0, vision 2 6 0, llm 0 1 0, llm 1 4 0")
    loss, *_ = run_pipeline(plan, ReaderWithTable(reader, table), rows, training=False)
    images = AutoImageProcessor.from_pretrained(folder)

    def plain_inputs(row):
        media = reader.dataset[reader.dataset.row_of(str(table.sample_ids[row]))].media
        ids = torch.from_numpy(reader.text(row).input_ids)[None]
        made = images(images=[open_image(item) for item in media], return_tensors="pt")
        return {"input_ids": ids, "pixel_values": made["pixel_values"]}

    with torch.no_grad():
        model = load_composed(folder, seed=7, dtype=torch.float32)
        expected, _ = expected_gradients(model, map(plain_inputs, rows), [reader.text(row) for row in rows])
    assert loss == pytest.approx(expected, rel=TOLERANCE)


def read_wave(path):
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2") / 32768


SHARED = (ONE, TWO, "internvl-qwen2", "siglip-gemma3")


def shared_plan(folder):
    return replace(whole_plan(folder), degrees=ParallelDegrees(tensor=2))


def on_two_devices(root):
    """Composed models on this pair, which shares every layer."""
    return [run_pipeline(shared_plan(root / name), ComposedReader(name), list(ROWS)) for name in SHARED]


def test_experts_are_not_shared_by_devices(tmp_path):
    folder = write_composed(tmp_path, "idefics3-qwen3_moe")
    with pytest.raises(RuntimeConfigError, match="experts"):
        check_tensor(folder, shared_plan(folder))


def test_two_devices_share_all_layers(tmp_path):
    for name in SHARED:
        write_composed(tmp_path, name)
    of_ranks = run_ranks(on_two_devices, 2, tmp_path)
    for index, name in enumerate(SHARED):
        results = [results[index] for results in of_ranks]
        assert_exact(expected_of(tmp_path / name, name, ROWS), results)
