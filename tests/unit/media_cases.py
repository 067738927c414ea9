"""What the tests of media rules share: random sizes, model folders, a small tokenizer, images that cost no memory."""

import json
import math
import sys
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from entrain_opt.workload.media import Expansion

SPECIAL_TOKENS = [
    "<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<img>", "</img>",
    "<IMG_CONTEXT>", "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<|image_pad|>", "<|video_pad|>",
    "<|vision_start|>", "<|vision_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip


def random_sizes(count: int, seed: int = 0, longest: int = 10_000) -> list[tuple[int, int]]:
    """Log-uniform sides from 1 to `longest`, so that small and thin images are frequent."""
    sides = np.exp(np.random.default_rng(seed).uniform(0, math.log(longest + 1), size=(count, 2))).astype(int)
    return [(int(width), int(height)) for width, height in np.clip(sides, 1, longest)]


def write_folder(folder: Path, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    """A model folder with config.json and the other files by their names without suffix."""
    folder.mkdir(exist_ok=True, parents=True)
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def small_tokenizer(image_token: str = "<image>") -> Any:
    """A byte-level BPE of a few hundred tokens that knows the special tokens of every family."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    texts = ["Here are the frames of a video, 12.5 seconds\n\nFrame from 00:01: some crops\n"]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<image>",
        extra_special_tokens={
            "image_token": image_token,
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )


def as_text(expansion: Expansion, placeholder: str) -> str:
    """An expansion as the text that a processor writes."""
    return "".join(placeholder * piece if isinstance(piece, int) else piece for piece in expansion)


def blank(width: int, height: int) -> NDArray[np.uint8]:
    """[3, height, width] zeros that occupy one byte."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


def video_module(family: str) -> ModuleType:
    """Transformers' video processing of a family."""
    return processing_module(family, "video_processing")


@cache
def processing_module(family: str, kind: str) -> ModuleType:
    """A module of a family's processing; some import torchvision, which the functions used here never call."""
    import transformers.image_utils
    import transformers.video_processing_utils  # noqa: F401

    names = (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    )
    stand_ins = {name: ModuleType(name) for name in names}
    for parent, child in pairwise(names):
        setattr(stand_ins[parent], child.rpartition(".")[2], stand_ins[child])
    with patch.dict(sys.modules, stand_ins):
        return import_module(f"transformers.models.{family}.{kind}_{family}")


def borrowed(owner: type, name: str, **attributes: Any) -> Any:
    """A method of a class that cannot be built here (it needs torchvision), on a stand-in with these attributes."""
    return lambda *arguments, **settings: getattr(owner, name)(SimpleNamespace(**attributes), *arguments, **settings)
