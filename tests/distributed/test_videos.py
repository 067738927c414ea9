"""Videos: decoded frames, placeholders, loss and gradients are those of the plain model."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import ReaderWithTable, assert_exact, expected_gradients, make_plan, run_pipeline
from PIL import Image

from entrain_opt.errors import RuntimeConfigError, WorkloadError
from entrain_opt.runtime.families import read_family
from entrain_opt.runtime.reader import ChatReader
from entrain_opt.runtime.stages import build_rank_model
from entrain_opt.workload.conversation import MediaItem
from entrain_opt.workload.index import measure_dataset
from entrain_opt.workload.media import media_rule
from entrain_opt.workload.video import read_frames, read_video_length

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from media_cases import video_module

av = pytest.importorskip("av", reason="av is not installed: pip install '.[dev]'")
torch.set_num_threads(1)
TINY = Path(__file__).parents[2] / "models" / "tiny-qwen2_5-vl"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def write_clip(path, frames, rate, size):
    """Frames in grey, each brighter than the one before, with a bar that moves."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.bit_rate = 4_000_000
        for index in range(frames):
            picture = np.full((size[1], size[0], 3), 20 + 200 * index // frames, dtype=np.uint8)
            picture[:, 4 * index : 4 * index + 6] = (250, 40, 10)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.fixture(params=["qwen2_5-vl", "qwen3-vl"])
def folder(tmp_path, request):
    """A tiny folder with a template that knows videos, and a video processor's settings."""
    folder = tmp_path / "model"
    shutil.copytree(TINY.parent / f"tiny-{request.param}", folder)
    template = folder / "chat_template.jinja"
    known = "if part['type'] == 'image' else"
    text = template.read_text()
    assert known in text
    template.write_text(text.replace(known, f"{known} '{VIDEO}' if part['type'] == 'video' else"))
    newer = request.param == "qwen3-vl"
    # The budget is that of a frame in Qwen2.5-VL, that of the whole clip in Qwen3-VL.
    settings = {
        "video_processor_type": f"Qwen{2 + newer}VLVideoProcessor", "patch_size": 14 + 2 * newer, "merge_size": 2,
        "temporal_patch_size": 2, "do_sample_frames": True, "fps": 2,
        "size": {"shortest_edge": 4096, "longest_edge": 81920 if newer else 12544},
    }  # fmt: skip
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def samples(tmp_path):
    """A video; none; a video and an image; two videos of other sizes and rates, one of an odd number of frames."""
    clips = [
        write_clip(tmp_path / "a.mp4", 16, 4, (120, 90)),
        write_clip(tmp_path / "b.mp4", 13, 3, (64, 160)),
        write_clip(tmp_path / "c.mp4", 4, 1, (56, 56)),
    ]
    Image.new("RGB", (100, 140), (10, 200, 90)).save(tmp_path / "i.png")
    image = tmp_path / "i.png"
    return [(clips[0],), (), (clips[1], image), (clips[2], clips[0]), (image,)]


def open_reader(tmp_path, folder, samples):
    lines = []
    for index, media in enumerate(samples):
        kinds = [{"type": "image" if path.suffix == ".png" else "video", "path": str(path)} for path in media]
        content = [part for kind in kinds for part in (kind, {"type": "text", "text": "and"})]
        content.append({"type": "text", "text": f"What happens in {index}?"})
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "It moves. " * (index + 1)}]
        lines.append(json.dumps({"id": f"s{index}", "messages": messages}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    table, bad = measure_dataset(tmp_path / "data.jsonl", folder, num_workers=0)
    assert not bad
    return ChatReader.open(tmp_path / "data.jsonl", table, folder, cache_dir=tmp_path / "cache"), table


SQUARE = {"do_sample_frames": True, "num_frames": 4, "size": {"height": 112, "width": 112}}
#: Families whose frames become squares: token of features of a video, and the video processor's settings.
SQUARE_FRAMES = {
    "llava-onevision": ("<video>", {**SQUARE, "image_mean": [0.1, 0.2, 0.3]}),
    "internvl": ("<IMG_CONTEXT>", SQUARE),
    "smolvlm": (
        "<image>",
        {"video_sampling": {"fps": 1, "max_frames": 4, "video_size": {"longest_edge": 96}}, "do_sample_frames": True},
    ),
}


@pytest.fixture(params=SQUARE_FRAMES)
def square_folder(tmp_path, request):
    return with_videos(tmp_path / "model", request.param, SQUARE_FRAMES[request.param][1])


def with_videos(folder, name, settings):
    """A tiny folder whose template writes the token of a video."""
    shutil.copytree(TINY.parent / f"tiny-{name}", folder)
    template = folder / "chat_template.jinja"
    known = "if part['type'] == 'image' else"
    template.write_text(template.read_text().replace(known, f"{known} '<video>' if part['type'] == 'video' else"))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def square_inputs(reader, row, media):
    """What the plain model takes of tiles of images and frames of videos."""
    family, inputs = reader.family.config.model_type, {"input_ids": torch.from_numpy(reader.text(row).input_ids)[None]}
    pixels = [reader.pixels(row, index) for index in range(len(media))]
    if not pixels:
        return inputs
    if family != "llava_onevision":
        together = torch.cat(pixels)
        return inputs | {"pixel_values": together[None] if family == "smolvlm" else together}
    is_video = [path.suffix == ".mp4" for path in media]
    if any(is_video):
        inputs["pixel_values_videos"] = torch.stack([p for p, video in zip(pixels, is_video, strict=True) if video])
    if not all(is_video):
        shapes = [shape for shape, video in zip(reader.shapes(row), is_video, strict=True) if not video]
        inputs |= {
            "pixel_values": torch.cat([p for p, video in zip(pixels, is_video, strict=True) if not video]),
            "image_sizes": torch.tensor(shapes),
            "batch_num_images": torch.tensor([len(shapes)]),
        }
    return inputs


def plain_inputs(reader, row, media):
    """What the plain model takes: times as its processor computes them from the file's own numbers."""
    text = reader.text(row)
    ids = torch.from_numpy(text.input_ids)[None]
    tokens = reader.encoder.media_token_ids
    inputs = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == tokens["image"]).int() + 2 * (ids == tokens["video"]).int(),
    }
    for kind, names in (
        ("image", ("pixel_values", "image_grid_thw")),
        ("video", ("pixel_values_videos", "video_grid_thw")),
    ):
        items = [index for index, path in enumerate(media) if (path.suffix == ".mp4") == (kind == "video")]
        if items:
            grids = [reader.shapes(row)[index][:3] for index in items]
            inputs |= {
                names[0]: torch.cat([reader.pixels(row, index) for index in items]),
                names[1]: torch.tensor(grids),
            }
    seconds = []
    for path in media:
        if path.suffix == ".mp4":
            length = read_video_length(MediaItem(kind="video", path=path))
            sampled = len(reader.rule.video_frames(length.num_frames, length.width, length.height, length.fps).indices)
            seconds.append(2 / (sampled / length.num_frames * length.fps))
    takes_seconds = reader.family.config.model_type == "qwen2_5_vl" and seconds
    return inputs | ({"second_per_grid_ts": torch.tensor(seconds)} if takes_seconds else {})


def assert_the_plain_models(reader, table, samples, inputs_of):
    """Loss and gradients of two stages each."""
    folder, rows = reader.model_folder, list(range(len(samples)))
    split = [("vision", (0, 3), 0), ("vision", (3, 6), 0), ("llm", (0, 2), 0), ("llm", (2, 4), 0)]
    plan = make_plan(folder, split)
    result = run_pipeline(plan, ReaderWithTable(reader, table), rows)
    model = read_family(folder).new_model()
    model.load_state_dict(build_rank_model(folder, plan, 0, seed=7).model.state_dict())
    inputs = (inputs_of(reader, row, samples[row]) for row in rows)
    assert_exact(expected_gradients(model.eval(), inputs, [reader.text(row) for row in rows]), [result])


def test_square_frames_give_the_plain_models_loss_and_gradients(tmp_path, square_folder, samples):
    reader, table = open_reader(tmp_path, square_folder, samples)
    assert_the_plain_models(reader, table, samples, square_inputs)


def test_square_frames_are_scaled_as_the_settings_say(tmp_path, square_folder, samples):
    """Against the image processor, told the video processor's mean, on the frames as PIL resizes them."""
    from transformers import AutoImageProcessor

    reader, table = open_reader(tmp_path, square_folder, samples)
    name = reader.family.config.model_type.replace("_", "-")
    token, settings = SQUARE_FRAMES[name]
    media = MediaItem(kind="video", path=samples[2][0])
    length = read_video_length(media)
    chosen = reader.rule.video_frames(length.num_frames, length.width, length.height, length.fps)
    assert (len(chosen.indices), chosen.size) == (4, (112, 112))
    # The longest edge first, the other one even.
    assert chosen.first_size == ((38, 96) if name == "smolvlm" else None)
    frames = read_frames(media, chosen.indices)
    for size in filter(None, (chosen.first_size, chosen.size)):
        frames = [frame.resize(size, 1 if name == "smolvlm" else 3) for frame in frames]
    found = reader.pixels(2, 0)
    processor = AutoImageProcessor.from_pretrained(TINY.parent / "tiny-internvl")
    fields = {"image_mean": list(chosen.values.mean), "image_std": list(chosen.values.std)}
    made = processor(images=frames, do_resize=False, crop_to_patches=False, return_tensors="pt", **fields)
    assert torch.allclose(found, made["pixel_values"], atol=1e-5)
    assert chosen.values.mean[0] == settings.get("image_mean", [0.5 if name == "smolvlm" else 0.48145466])[0]
    # Placeholders: as many as the model makes features, the item's other tokens are text.
    ids, item = reader.text(0).input_ids, int(table.media_offsets[0])
    assert (ids == reader.encoder.tokenizer.convert_tokens_to_ids(token)).sum() == len(reader.text(0).feature_positions)
    assert len(reader.text(0).media_positions) == table.media_tokens[item]
    assert max(ids) < reader.family.text_config.vocab_size


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("internvl", {"size": {"height": 96, "width": 96}}, r"size: the video processor makes frames of 96 x 96"),
        ("llava-onevision", {"do_center_crop": True}, r"do_center_crop: expected false for videos"),
        ("smolvlm", {"do_normalize": False}, r"do_normalize: expected true for videos, found False"),
    ],
)
def test_settings_that_frames_do_not_follow_are_named(name, change, message, tmp_path):
    folder = with_videos(tmp_path / "model", name, {**SQUARE_FRAMES[name][1], **change})
    with pytest.raises(RuntimeConfigError, match=message):
        media_rule(folder)


def test_loss_and_gradients_are_the_plain_models(tmp_path, folder, samples):
    reader, table = open_reader(tmp_path, folder, samples)
    assert_the_plain_models(reader, table, samples, plain_inputs)


def test_rows_and_placeholders_are_the_processors(tmp_path, folder, samples):
    """The video processor's own layout of the same frames, and its count of placeholders."""
    reader, table = open_reader(tmp_path, folder, samples)
    newer = reader.family.config.model_type == "qwen3_vl"
    module = video_module("qwen3_vl" if newer else "qwen2_vl")
    processor = module.Qwen3VLVideoProcessor if newer else module.Qwen2VLVideoProcessor
    for row, item in ((0, 0), (2, 0), (3, 0)):
        media = MediaItem(kind="video", path=samples[row][item])
        length = read_video_length(media)
        chosen = reader.rule.video_frames(length.num_frames, length.width, length.height, length.fps)
        frames = [frame.resize(chosen.size, 3) for frame in read_frames(media, chosen.indices)]
        pixels = np.stack([np.asarray(frame, dtype=np.float32).transpose(2, 0, 1) / 255 for frame in frames])
        clip = (torch.from_numpy(pixels)[None] - 0.5) / 0.5
        rows, groups, height, width = processor.patchify(
            None, clip, patch_size=reader.family.vision.patch_size, merge_size=2, temporal_patch_size=2
        )
        found = reader.pixels(row, item)
        assert torch.allclose(found, rows[0], atol=1e-5)
        assert reader.shapes(row)[item][:3] == (groups, height, width)
        assert len(found) == table.media_patches[table.media_offsets[row] + item]
        placeholders = reader.text(row).input_ids == reader.encoder.media_token_ids["video"]
        if len(samples[row]) == 1:
            assert placeholders.sum() == len(found) // 4


def test_an_odd_number_of_frames_ends_with_its_last_one_twice(folder):
    from transformers import AutoImageProcessor

    family, images = read_family(folder), AutoImageProcessor.from_pretrained(folder)
    side = family.vision.patch_size
    frames = [Image.new("RGB", (4 * side, 2 * side), (40 * index, 10, 200)) for index in range(3)]
    odd, even = family.video_rows(frames, images, None), family.video_rows([*frames, frames[-1]], images, None)
    assert torch.equal(odd, even)
    assert not torch.equal(odd[:8], odd[8:])
    assert len(odd) == 2 * 2 * 4


def test_families_that_execute_no_videos_say_so(tmp_path):
    folder = with_videos(tmp_path / "model", "compose-qwen2_5-vit-llama", {"temporal_patch_size": 2})
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<video>", "<eos>"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "video_token_id": 2}))
    clip = write_clip(tmp_path / "a.mp4", 4, 4, (64, 48))
    reader, _ = open_reader(tmp_path, folder, [(clip,)])
    with pytest.raises(WorkloadError, match=r"sample s0: .*a\.mp4: training on videos .* entrain_composed.*video_rows"):
        reader.pixels(0, 0)


def test_frames_are_those_asked_for(tmp_path):
    clip = MediaItem(kind="video", path=write_clip(tmp_path / "a.mp4", 10, 5, (64, 48)))
    frames = read_frames(clip, [7, 0, 7, 3])
    brightness = [float(np.asarray(frame)[:, -8:].mean()) for frame in frames]
    assert brightness == pytest.approx([20 + 200 * index // 10 for index in (7, 0, 7, 3)], abs=6)
    with pytest.raises(WorkloadError, match=r"a\.mp4: expected a frame 10, found that the video ends before it"):
        read_frames(clip, [2, 10])
    (tmp_path / "b.mp4").write_text("no video")
    with pytest.raises(WorkloadError, match=r"b\.mp4: not a usable video"):
        read_frames(MediaItem(kind="video", path=tmp_path / "b.mp4"), [0])
