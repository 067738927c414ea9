"""Ids, shifted labels and placeholders: exactly once, never cut, never from a user's text."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrain_opt.errors import RuntimeConfigError, WorkloadError
from entrain_opt.workload.chat import IGNORED_LABEL, ChatEncoder
from entrain_opt.workload.dataset import ChatDataset, ChatSample, MediaItem

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny-llava"
IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder.from_pretrained(TINY)


def without_markers(encoder: ChatEncoder, template: str | None = None) -> ChatEncoder:
    """The same tokenizer with a template that has no generation markers."""
    import copy

    tokenizer = copy.deepcopy(encoder.tokenizer)
    template = template or encoder.tokenizer.chat_template
    for name in ("generation", "endgeneration"):
        template = template.replace("{%- " + name + " %}", "")
    tokenizer.chat_template = template
    return ChatEncoder(tokenizer, media_token_ids=encoder.media_token_ids, max_tokens=encoder.max_tokens)


def chat(*turns, media: int | None = None) -> ChatSample:
    """Turns alternate user and assistant; a turn is text or a list of parts."""
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": [part(p) for p in (t if isinstance(t, list) else [t])]}
        for index, t in enumerate(turns)
    ]
    images = sum(p == IMAGE for message in messages for p in message["content"]) if media is None else media
    files = tuple(MediaItem(kind="image", path=Path(f"{index}.jpg")) for index in range(images))
    return ChatSample(id="s1", messages=tuple(messages), media=files)


def part(value):
    return {"type": "text", "text": value} if isinstance(value, str) else value


def test_labels_are_the_next_assistant_tokens(encoder):
    encoded = encoder.encode(chat([IMAGE, "What is it?"], "A cat.", "Sure?", "Yes."), [5])
    labelled = encoded.label_ids != IGNORED_LABEL
    assert np.array_equal(encoded.label_ids[labelled], encoded.input_ids[1:][labelled[:-1]])
    assert encoder.tokenizer.decode(encoded.label_ids[labelled]) == "A cat.<|im_end|>Yes.<|im_end|>"
    assert encoded.label_ids[-1] == IGNORED_LABEL
    assert encoded.num_label_tokens == labelled.sum()
    assert encoded.input_ids.dtype == encoded.label_ids.dtype == encoded.media_positions.dtype == np.int64


@given(counts=st.lists(st.integers(1, 40), max_size=5), words=st.integers(0, 20))
def test_each_image_becomes_its_tokens_once(encoder, counts, words):
    sample = chat([part for _ in counts for part in (IMAGE, "word " * words)] + ["q"], "a")
    encoded = encoder.encode(sample, counts)
    single = encoder.encode(sample, [1] * len(counts))
    image_id = encoder.media_token_ids["image"]
    assert len(encoded.media_positions) == sum(counts)
    assert np.array_equal(encoded.media_positions, np.flatnonzero(encoded.input_ids == image_id))
    assert encoded.num_tokens == single.num_tokens - len(counts) + sum(counts)
    assert encoded.num_text_tokens == single.num_text_tokens
    assert encoded.num_label_tokens == single.num_label_tokens
    runs = np.split(encoded.media_positions, np.cumsum(counts)[:-1]) if counts else []
    assert all(run[-1] - run[0] == count - 1 for run, count in zip(runs, counts, strict=True))


@pytest.mark.parametrize("token", ["<image>", "<|im_end|>", "<|im_start|>", "<eos>", "<pad>"])
@pytest.mark.parametrize("turn", [0, 1])
def test_control_tokens_in_a_text_raise(encoder, token, turn):
    turns = ["question", "answer"]
    turns[turn] += f" {token} "
    with pytest.raises(WorkloadError, match=r"sample s1: the (user|assistant) text contains .*control token"):
        encoder.encode(chat(*turns), [])


def test_almost_control_tokens_are_text(encoder):
    sample = chat("<IMAGE> <|im end|> < image>", "a")
    assert not len(encoder.encode(sample, []).media_positions)


def test_nothing_is_ever_cut(encoder):
    sample = chat([IMAGE, "q"], "a")
    exact = encoder.encode(sample, [100]).num_tokens
    limited = ChatEncoder(encoder.tokenizer, media_token_ids=encoder.media_token_ids, max_tokens=exact)
    assert limited.encode(sample, [100]).num_tokens == exact
    with pytest.raises(WorkloadError, match=rf"s1: needs {exact + 1} tokens .* 101 media\), the limit is {exact}"):
        limited.encode(sample, [101])


def test_text_around_features_belongs_to_the_item(encoder):
    sample = chat([IMAGE, "What is it?"], "A cat.")
    plain = encoder.encode(sample, [5])
    marked = encoder.encode(sample, [("one: ", 2, " two: ", 3)])
    text = [len(encoder.tokenizer(piece, add_special_tokens=False)["input_ids"]) for piece in ("one: ", " two: ")]
    assert len(marked.feature_positions) == 5
    assert len(marked.media_positions) == 5 + sum(text)
    assert marked.num_text_tokens == plain.num_text_tokens
    assert set(marked.feature_positions) <= set(marked.media_positions)
    kept = np.setdiff1d(np.arange(marked.num_tokens), np.setdiff1d(marked.media_positions, marked.feature_positions))
    assert np.array_equal(marked.input_ids[kept], plain.input_ids)
    assert np.array_equal(np.unique(marked.label_ids), np.unique(plain.label_ids))
    assert np.all(marked.label_ids[marked.media_positions[:-1]] == -100)


def test_media_counts_must_agree(encoder):
    with pytest.raises(WorkloadError, match="at least one token for each of 1 media items"):
        encoder.encode(chat([IMAGE], "a"), [])
    with pytest.raises(WorkloadError, match="at least one token"):
        encoder.encode(chat([IMAGE], "a"), [0])
    with pytest.raises(WorkloadError, match="made 1 media placeholders for 2 media items"):
        encoder.encode(chat([IMAGE], "a", media=2), [3, 3])
    audio = ChatSample(id="s1", messages=chat("q", "a").messages, media=(MediaItem(kind="audio", path=Path("a")),))
    with pytest.raises(WorkloadError, match=r"takes \['image'\], found audio"):
        encoder.encode(audio, [3])


def test_template_without_markers_gives_the_same_labels(encoder):
    """The difference method also labels what the template writes between an answer and the next turn."""
    other = without_markers(encoder)
    for sample in [*list(ChatDataset(ROOT / "recipes/data/physics/validation.jsonl"))[:8], chat("a", "b", "c", "d")]:
        counts = [2] * len(sample.media)
        first, second = encoder.encode(sample, counts), other.encode(sample, counts)
        assert np.array_equal(first.input_ids, second.input_ids)
        labelled = first.label_ids != IGNORED_LABEL
        assert np.array_equal(first.label_ids[labelled], second.label_ids[labelled])
        extra = second.label_ids[~labelled]
        assert encoder.tokenizer.decode(extra[extra != IGNORED_LABEL]).strip() == ""


def test_template_that_takes_strings_only(encoder):
    template = "{% for m in messages %}<|im_start|>{{ m['role'] + ':' + m['content'] }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    encoded = without_markers(encoder, template).encode(chat(["two ", "parts"], "answer"), [])
    assert encoder.tokenizer.decode(encoded.input_ids) == (
        "<|im_start|>user:two parts<|im_end|><|im_start|>assistant:answer<|im_end|>"
    )
    labels = encoded.label_ids[encoded.label_ids != IGNORED_LABEL]
    assert encoder.tokenizer.decode(labels) == "answer<|im_end|>"


def test_template_that_rewrites_history_raises(encoder):
    template = "{% for m in messages %}{{ loop.length ~ m['content'] }}{% endfor %}"
    with pytest.raises(WorkloadError, match="renders earlier messages differently"):
        without_markers(encoder, template).encode(chat("q", "a", "q"), [])


def test_incomplete_folders_raise(tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    with pytest.raises(RuntimeConfigError, match="expected a chat template"):
        ChatEncoder.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(RuntimeConfigError, match="expected a tokenizer"):
        ChatEncoder.from_pretrained(tmp_path)


GEMMA = ROOT / "models" / "tiny-gemma3"


@pytest.mark.parametrize("placeholder", ["<start_of_image>", "<image_soft_token>"])
def test_gemma_3_templates_may_open_an_image_and_leave_the_rest_to_the_processor(placeholder, tmp_path):
    """Published ones write `<start_of_image>`; what results is what the real processor makes of the rendered text."""
    from PIL import Image
    from transformers import AutoImageProcessor, AutoTokenizer, Gemma3Processor

    from entrain_opt.workload.media import media_rule

    folder = tmp_path / "model"
    shutil.copytree(GEMMA, folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<start_of_image>", placeholder))
    encoder, rule = ChatEncoder.from_pretrained(folder), media_rule(folder)
    sizes = [(100, 80), (600, 100), (64, 64)]
    sample = chat([IMAGE, "one", IMAGE, "two"], "A cat.", [IMAGE, "?"], "Yes.")
    encoded = encoder.encode(sample, [rule.image_expansion(*size) for size in sizes])
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = AutoTokenizer.from_pretrained(GEMMA, extra_special_tokens=names)
    processor = Gemma3Processor(AutoImageProcessor.from_pretrained(GEMMA), tokenizer, image_seq_length=16)
    text = tokenizer.apply_chat_template(list(sample.messages), tokenize=False)
    images = [Image.new("RGB", size) for size in sizes]
    made = processor(
        images=[images], text=text.replace(placeholder, "<start_of_image>"), add_special_tokens=False,
        images_kwargs={
            "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 64, "pan_and_scan_max_num_crops": 3,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
    )  # fmt: skip
    # Text around an item is tokenised apart from what stands beside it, so letters are compared, not tokens.
    assert tokenizer.decode(encoded.input_ids) == tokenizer.decode(made["input_ids"][0])
    soft = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    assert encoder.media_token_ids == {"image": soft}
    assert np.array_equal(encoded.feature_positions, np.flatnonzero(encoded.input_ids == soft))
    assert len(encoded.feature_positions) == list(made["input_ids"][0]).count(soft) == 16 * (1 + 4 + 1)
    assert encoder.encode(chat(["no image"], "Yes."), []).num_tokens > 0
    with pytest.raises(WorkloadError, match="contains '<start_of_image>', a control token"):
        encoder.encode(chat(["<start_of_image>"], "Yes."), [])
