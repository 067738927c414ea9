"""Composed models of a few thousand parameters, and mixed samples: pictures, clips, both, or none of them."""

from functools import cached_property

import numpy as np
import torch
from family_models import CASES, CLIP, SIGLIP, TEXT, WORDS, clip_form, native_form, tile_form

from entrain_opt.workload.chat import EncodedSample
from entrain_opt.workload.samples import MEDIA_KINDS, SampleTable

IMAGE, AUDIO = 3, 4
TOKENS = {"model_type": "entrain_composed", "image_token_id": IMAGE, "audio_token_id": AUDIO}
QWEN = {"vision_config": CASES["qwen2_5_vl"].config["vision_config"], "vision_projector": {"kind": "own"}}
WHISPER = {
    "audio_config": {**CASES["qwen2_audio"].config["audio_config"], "model_type": "whisper", "encoder_layers": 3},
    "audio_projector": {"kind": "mlp", "stack": 3, "hidden_size": 20},
}


GEMMA = {
    name: CASES["gemma3"].config["text_config"][name]
    for name in ("head_dim", "sliding_window", "query_pre_attn_scalar", "layer_types")
}
#: The second layer is dense.
QWEN_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1], "head_dim": 8,
    "decoder_sparse_step": 1,
}  # fmt: skip


def text(model_type, **fields):
    return {"text_config": {"model_type": model_type, **TEXT, **fields}}


CONFIGS = {
    "qwen2_5-llama": {**TOKENS, **QWEN, **text("llama", tie_word_embeddings=True)},
    "qwen2_5-whisper-llama": {**TOKENS, **QWEN, **WHISPER, **text("llama", tie_word_embeddings=True)},
    "clip-llama": {
        **TOKENS, "vision_config": CLIP, "vision_projector": {"kind": "mlp", "stack": 2, "bias": False},
        **text("llama", attention_bias=True),
    },
    "siglip-qwen2_audio-mistral": {
        **TOKENS, "vision_config": {**SIGLIP, "vision_use_head": True}, "vision_projector": {"kind": "linear"},
        "audio_config": CASES["qwen2_audio"].config["audio_config"], "audio_projector": {"kind": "linear", "stack": 2},
        **text("mistral", sliding_window=9),
    },
    "qwen3-qwen3": {
        **TOKENS, **QWEN,
        "vision_config": {**CASES["qwen3_vl"].config["vision_config"], "deepstack_visual_indexes": []},
        **text("qwen3", head_dim=8),
    },
    "whisper-qwen2": {**TOKENS, **WHISPER, **text("qwen2")},
    "internvl-qwen2": {
        **TOKENS, "vision_config": CASES["internvl"].config["vision_config"],
        "vision_projector": {"kind": "mlp", "merge": 2, "norm": "layer_norm"}, **text("qwen2"),
    },
    "idefics3-qwen3_moe": {
        **TOKENS, "vision_config": CASES["idefics3"].config["vision_config"],
        "vision_projector": {"kind": "linear", "merge": 4, "bias": False}, **text("qwen3_moe", **QWEN_EXPERTS),
    },
    "siglip-gemma3": {
        **TOKENS, "vision_config": SIGLIP,
        "vision_projector": {"kind": "linear", "pool": 2, "norm": "rms_norm", "bias": False},
        **text("gemma3_text", **GEMMA),
    },
    "smolvlm-whisper-mixtral": {
        **TOKENS, "vision_config": CASES["smolvlm"].config["vision_config"],
        "vision_projector": {"kind": "mlp", "merge": 2, "norm": "rms_norm"}, **WHISPER,
        **text("mixtral", num_local_experts=3, num_experts_per_tok=2, sliding_window=None),
    },
}  # fmt: skip


def _clip(frames, rows_per_token):
    form = clip_form(frames)
    return type(form)(form.pixels, form.patches, 1, (frames + 1) // 2 // rows_per_token, shape=form.shape)


_NATIVE = tuple(native_form(*sides, 24) for sides in [(2, 4), (6, 10), (12, 4), (8, 8)])
_CLIPS = {stack: tuple(_clip(frames, stack) for frames in (40, 9, 22, 31)) for stack in (3, 4)}
#: {tokens of a tile: one and several tiles}
_TILES = {tokens: tuple(tile_form(tiles, 16, tokens) for tiles in (1, 3, 2)) for tokens in (1, 4)}
#: {kind: forms of its items}
FORMS = {
    "qwen2_5-llama": {"image": _NATIVE},
    "qwen2_5-whisper-llama": {"image": _NATIVE, "audio": _CLIPS[3]},
    "clip-llama": {"image": (tile_form(1, 17, 8),)},
    "siglip-qwen2_audio-mistral": {"image": (tile_form(1, 16, 16),), "audio": _CLIPS[4]},
    "qwen3-qwen3": {"image": _NATIVE},
    "whisper-qwen2": {"audio": _CLIPS[3]},
    "internvl-qwen2": {"image": tuple(tile_form(tiles, 17, 4) for tiles in (1, 3, 2))},
    "idefics3-qwen3_moe": {"image": _TILES[1]},
    "siglip-gemma3": {"image": _TILES[4]},
    "smolvlm-whisper-mixtral": {"image": _TILES[4], "audio": _CLIPS[3]},
}
#: Samples by their media. A model without one of the kinds sees the same samples without them.
MEDIA = (
    (("image", 0),), (), (("audio", 2),), (("image", 1), ("audio", 1)), (("audio", 0), ("image", 2), ("image", 3)),
    (), (("image", 3),), (("audio", 3), ("audio", 1)), (("image", 2), ("image", 0)), (("audio", 1), ("image", 1)),
)  # fmt: skip
#: Rows of MEDIA: everything, no clip at all, no picture at all, text alone.
ROWS = tuple(range(len(MEDIA)))
IMAGES_ONLY, AUDIO_ONLY, TEXT_ONLY = (0, 1, 6, 8), (1, 2, 5, 7), (1, 5)


class ComposedReader:
    """Random samples of a composed model; the content depends on the row only."""

    def __init__(self, name, media=MEDIA):
        forms = FORMS[name]
        self.items = [
            [(kind, forms[kind][index % len(forms[kind])]) for kind, index in row if kind in forms] for row in media
        ]

    def pixels(self, row, item):
        generator = torch.Generator().manual_seed(1000 * row + item)
        return torch.randn(self.items[row][item][1].pixels, generator=generator)

    def shapes(self, row):
        return [form.shape for _, form in self.items[row]]

    def text(self, row):
        rng = np.random.default_rng(row)
        pieces = []
        for kind, form in self.items[row]:
            pieces.append(rng.integers(8, WORDS, size=rng.integers(1, 5)))
            pieces.append(np.full(form.features, IMAGE if kind == "image" else AUDIO))
        words = rng.integers(8, WORDS, size=rng.integers(4, 20))
        ids = np.concatenate([*pieces, words]).astype(np.int64)
        labels = np.full(len(ids), -100, dtype=np.int64)
        answer = len(ids) - len(words) // 2
        labels[answer - 1 : -1] = ids[answer:]
        media = np.flatnonzero(np.isin(ids, (IMAGE, AUDIO)))
        return EncodedSample(input_ids=ids, label_ids=labels, media_positions=media, feature_positions=media)

    @cached_property
    def _table(self):
        texts = [self.text(row) for row in range(len(self.items))]
        media = [item for items in self.items for item in items]
        column = lambda name: np.array([getattr(form, name) for _, form in media], dtype=np.int64)  # noqa: E731
        return SampleTable(
            sample_ids=np.array([f"s{row}" for row in range(len(self.items))]),
            text_tokens=np.array([text.num_text_tokens for text in texts]),
            label_tokens=np.array([text.num_label_tokens for text in texts]),
            media_offsets=np.concatenate([[0], np.cumsum([len(items) for items in self.items])]),
            media_kind=np.array([MEDIA_KINDS.index(kind) for kind, _ in media], dtype=np.int64),
            media_patches=column("patches"),
            media_segments=column("segments"),
            media_tokens=column("features"),
        )

    def table(self):
        return self._table

    def plain_inputs(self, row):
        """Arguments of the plain model's forward for one sample."""
        inputs = {"input_ids": torch.from_numpy(self.text(row).input_ids)[None]}
        of_kind = {
            kind: [(index, form) for index, (one, form) in enumerate(self.items[row]) if one == kind]
            for kind in ("image", "audio")
        }
        content = {kind: [self.pixels(row, index) for index, _ in items] for kind, items in of_kind.items()}
        if content["image"]:
            inputs["pixel_values"] = torch.cat(content["image"])
            if of_kind["image"][0][1].shape:
                inputs["image_grid_thw"] = torch.tensor([form.shape for _, form in of_kind["image"]])
        if content["audio"]:
            frames = torch.tensor([form.shape[0] for _, form in of_kind["audio"]])
            inputs["input_features"] = torch.cat(content["audio"])
            inputs["feature_attention_mask"] = (torch.arange(40) < frames[:, None]).int()
        return inputs
