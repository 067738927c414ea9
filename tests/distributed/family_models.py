"""A model of a few thousand parameters for every family, media of several sizes, and the plain model's inputs."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from entrain_opt.workload.chat import EncodedSample
from entrain_opt.workload.media.anyres import AnyResolutionRule
from entrain_opt.workload.samples import MEDIA_KINDS, SampleTable

# The models are so small that threads only wait for each other.
torch.set_num_threads(1)

PLACEHOLDER, MARKER, WORDS = 3, 4, 67
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 7, "vision_use_head": False,
}  # fmt: skip
CLIP = {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 8}
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": WORDS, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
PINPOINTS = [[28, 56], [56, 28], [56, 56], [28, 84]]
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


@dataclass(frozen=True)
class Form:
    """One media item: the shape of its pixels and its counts."""

    pixels: tuple
    patches: int
    segments: int
    features: int
    markers: int = 0
    shape: tuple = ()
    groups: int = 0
    """Runs of features that stand apart where text is written around them; 0: one per segment."""


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """Attributes: config.json, forms of media (`together` where a sample has several), and the plain model's inputs."""

    config: dict[str, Any]
    forms: tuple[Form, ...]
    together: tuple[Form, ...] = ()
    module: str = "vision"
    kind: str = "image"
    vision_layers: int = 4
    plain: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    def form(self, index: int, count: int) -> Form:
        forms = self.together if self.together and count > 1 else self.forms
        return forms[index % len(forms)]


def tile_form(tiles: int, patches: int, features: int, markers: int = 0) -> Form:
    return Form((tiles, 3, 28, 28), tiles * patches, tiles, tiles * features, markers)


def any_resolution_form(width: int, height: int, patches: int, max_tiles: int | None) -> Form:
    rule = AnyResolutionRule(
        tile_side=28, grid_side=4, patches_per_tile=patches, max_tiles=max_tiles,
        resolutions=tuple((height, width) for height, width in PINPOINTS),
    )  # fmt: skip
    size = rule.image(width, height)
    return Form((size.segments, 3, 28, 28), size.patches, size.segments, size.tokens, shape=(height, width))


def native_form(rows: int, columns: int, values: int) -> Form:
    patches = rows * columns
    return Form((patches, values), patches, 1, patches // 4, shape=(1, rows, columns))


def row_form(rows: int, columns: int) -> Form:
    """Patches of 7 x 7 pixels, 2 x 2 of them to a token, a break after every row of tokens."""
    patches = rows * columns
    return Form((patches, 147), patches, 1, patches // 4, rows, shape=(rows, columns), groups=rows // 2)


def clip_form(frames: int) -> Form:
    positions = (frames + 1) // 2
    return Form((1, 8, 40), 20, 1, positions // 2, shape=(frames,))


def pixels_only(pixels, forms, ids):
    return {"pixel_values": torch.cat(pixels)}


def with_sizes(pixels, forms, ids):
    return {"pixel_values": torch.cat(pixels), "image_sizes": torch.tensor([form.shape for form in forms])}


def with_counts(pixels, forms, ids):
    return with_sizes(pixels, forms, ids) | {"batch_num_images": torch.tensor([len(forms)])}


def with_pictures(pixels, forms, ids):
    """Rows of patches put together again, and padded to one size."""
    sizes = [(7 * form.shape[0], 7 * form.shape[1]) for form in forms]
    fold = torch.nn.functional.fold
    pictures = [fold(p.T[None], size, kernel_size=7, stride=7) for p, size in zip(pixels, sizes, strict=True)]
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    padded = [torch.nn.functional.pad(p, (0, width - p.shape[3], 0, height - p.shape[2])) for p in pictures]
    return {"pixel_values": torch.cat(padded), "image_sizes": torch.tensor(sizes)}


def with_grids(pixels, forms, ids):
    kinds = (ids == PLACEHOLDER).int()
    grids = torch.tensor([form.shape for form in forms])
    return {"pixel_values": torch.cat(pixels), "image_grid_thw": grids, "mm_token_type_ids": kinds}


def with_images(pixels, forms, ids):
    return {"pixel_values": torch.cat(pixels)[None]}


def with_types(pixels, forms, ids):
    return {"pixel_values": torch.cat(pixels), "token_type_ids": (ids == PLACEHOLDER).int()}


def with_frames(pixels, forms, ids):
    frames = torch.tensor([form.shape[0] for form in forms])
    mask = (torch.arange(40) < frames[:, None]).int()
    return {"input_features": torch.cat(pixels), "feature_attention_mask": mask, "attention_mask": torch.ones_like(ids)}


QWEN_IDS = {
    "image_token_id": PLACEHOLDER, "video_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7,
}  # fmt: skip
CASES = {
    "llava": FamilyCase(
        config={
            "model_type": "llava", "vision_config": CLIP, "text_config": {"model_type": "llama", **TEXT},
            "image_token_id": PLACEHOLDER, "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
            "tie_word_embeddings": False,
        },
        forms=(tile_form(1, 17, 16), tile_form(3, 17, 16), tile_form(2, 17, 16)),
        plain=pixels_only,
        vision_layers=3,
    ),
    "llava_next": FamilyCase(
        config={
            "model_type": "llava_next", "vision_config": CLIP, "text_config": {"model_type": "mistral", **TEXT},
            "image_token_id": PLACEHOLDER, "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
            "image_grid_pinpoints": PINPOINTS, "tie_word_embeddings": False,
        },
        forms=tuple(any_resolution_form(*size, 17, None) for size in [(40, 20), (30, 30), (11, 50), (90, 25)]),
        plain=with_sizes,
        vision_layers=3,
    ),
    "llava_onevision": FamilyCase(
        config={
            "model_type": "llava_onevision", "vision_config": SIGLIP, "text_config": {"model_type": "qwen2", **TEXT},
            "image_token_id": PLACEHOLDER, "video_token_id": 5, "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full", "image_grid_pinpoints": PINPOINTS,
            "vision_aspect_ratio": "anyres_max_2", "tie_word_embeddings": False,
        },
        forms=tuple(any_resolution_form(*size, 16, 2) for size in [(40, 20), (56, 56), (11, 50), (90, 25)]),
        together=(
            Form((1, 3, 28, 28), 16, 1, 17, shape=(40, 20)),
            Form((1, 3, 28, 28), 16, 1, 17, shape=(9, 30)),
        ),
        plain=with_counts,
    ),
    "qwen2_5_vl": FamilyCase(
        config={
            "model_type": "qwen2_5_vl", **QWEN_IDS, "tie_word_embeddings": True,
            "vision_config": {
                "model_type": "qwen2_5_vl_vision", "depth": 4, "hidden_size": 32, "intermediate_size": 48,
                "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 8,
                "fullatt_block_indexes": [1, 3], "out_hidden_size": 32, "tokens_per_second": 2,
            },
            "text_config": {
                "model_type": "qwen2_5_vl_text", **TEXT, "rope_parameters": ROPE, "tie_word_embeddings": True,
            },
        },
        forms=tuple(native_form(*sides, 24) for sides in [(2, 4), (6, 10), (12, 4), (8, 8)]),
        plain=with_grids,
    ),
    "qwen3_vl": FamilyCase(
        config={
            "model_type": "qwen3_vl", **QWEN_IDS, "tie_word_embeddings": False,
            "vision_config": {
                "model_type": "qwen3_vl_vision", "depth": 4, "hidden_size": 32, "intermediate_size": 48,
                "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2,
                "num_position_embeddings": 25, "out_hidden_size": 32, "deepstack_visual_indexes": [0, 2],
            },
            "text_config": {
                "model_type": "qwen3_vl_text", **TEXT, "head_dim": 8,
                "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]},
            },
        },
        forms=tuple(native_form(*sides, 24) for sides in [(2, 4), (6, 10), (12, 4), (8, 8)]),
        plain=with_grids,
    ),
    "idefics3": FamilyCase(
        config={
            "model_type": "idefics3", "vision_config": {**SIGLIP, "model_type": "idefics3_vision"},
            "text_config": {"model_type": "llama", **TEXT}, "image_token_id": PLACEHOLDER, "scale_factor": 2,
            "tie_word_embeddings": False, "pad_token_id": 0,
        },
        forms=(tile_form(1, 16, 4, 3), tile_form(5, 16, 4, 9), tile_form(3, 16, 4, 6)),
        plain=with_images,
    ),
    "smolvlm": FamilyCase(
        config={
            "model_type": "smolvlm", "vision_config": {**SIGLIP, "model_type": "smolvlm_vision"},
            "text_config": {"model_type": "llama", **TEXT}, "image_token_id": PLACEHOLDER, "scale_factor": 4,
            "tie_word_embeddings": True, "pad_token_id": 0,
        },
        forms=(tile_form(1, 16, 1, 3), tile_form(5, 16, 1, 9)),
        plain=with_images,
    ),
    "internvl": FamilyCase(
        config={
            "model_type": "internvl", "text_config": {"model_type": "qwen3", **TEXT, "head_dim": 8},
            "image_token_id": PLACEHOLDER,
            "vision_config": {
                "model_type": "internvl_vision", "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 4,
                "num_attention_heads": 2, "image_size": [28, 28], "patch_size": [7, 7], "use_qk_norm": True,
            },
            "downsample_ratio": 0.5, "vision_feature_layer": -1, "tie_word_embeddings": True,
        },
        forms=(tile_form(1, 17, 4, 2), tile_form(5, 17, 4, 2), tile_form(3, 17, 4, 2)),
        plain=pixels_only,
    ),
    "mistral3": FamilyCase(
        config={
            "model_type": "mistral3", "image_token_id": PLACEHOLDER, "image_token_index": PLACEHOLDER,
            "spatial_merge_size": 2, "vision_feature_layer": -1, "tie_word_embeddings": False,
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 4,
                "num_attention_heads": 2, "image_size": 84, "patch_size": 7,
            },
            "text_config": {"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None},
        },
        forms=(row_form(2, 4), row_form(6, 10), row_form(12, 4), row_form(4, 4)),
        plain=with_pictures,
    ),
    "qwen2_audio": FamilyCase(
        config={
            "model_type": "qwen2_audio", "text_config": {"model_type": "qwen2", **TEXT},
            "audio_token_index": PLACEHOLDER,
            "audio_config": {
                "model_type": "qwen2_audio_encoder", "d_model": 24, "encoder_ffn_dim": 48, "encoder_layers": 4,
                "encoder_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 20,
            },
        },
        forms=(clip_form(40), clip_form(9), clip_form(22), clip_form(31)),
        plain=with_frames,
        module="audio",
        kind="audio",
    ),
    "gemma3": FamilyCase(
        config={
            "model_type": "gemma3", "vision_config": SIGLIP, "image_token_id": 70, "image_token_index": 70,
            "text_config": {
                "model_type": "gemma3_text", **TEXT, "head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            },
            "mm_tokens_per_image": 4,
        },
        forms=(tile_form(1, 16, 4, 2), tile_form(3, 16, 4, 6)),
        plain=with_types,
    ),
}  # fmt: skip

#: Samples by the forms of their media: none, one, several.
MEDIA = ((0,), (), (2, 1), (1,), (), (0, 1, 2, 3), (3,), (1, 1))


class FamilyReader:
    """Random samples of a family; the content depends on the row only."""

    def __init__(self, name, media=MEDIA):
        self.case, self.media = CASES[name], media
        self.placeholder = self.case.config.get("image_token_id", PLACEHOLDER)

    def forms(self, row):
        return [self.case.form(index, len(self.media[row])) for index in self.media[row]]

    def pixels(self, row, item):
        generator = torch.Generator().manual_seed(1000 * row + item)
        return torch.randn(self.forms(row)[item].pixels, generator=generator)

    def shapes(self, row):
        return [form.shape for form in self.forms(row)]

    def text(self, row):
        rng = np.random.default_rng(row)
        pieces, kinds = [], []
        for form in self.forms(row):
            before = form.markers // 2
            pieces += [rng.integers(8, WORDS, size=rng.integers(1, 5)), np.full(before, MARKER)]
            # Segments of one item stand apart where text is written around them, as tiles with tags do.
            groups = form.groups or (form.segments if form.markers > form.segments else 1)
            run = [np.full(form.features // groups, self.placeholder)] * groups
            text = [np.full(1, MARKER)] * (groups - 1)
            pieces += [piece for pair in zip(run, [*text, None], strict=True) for piece in pair if piece is not None]
            pieces.append(np.full(form.markers - before - len(text), MARKER))
            kinds += [0] * len(pieces[-2 * groups - 2]) + [1] * (form.features + form.markers)
        words = rng.integers(8, WORDS, size=rng.integers(4, 20))
        ids = np.concatenate([*pieces, words]).astype(np.int64)
        kinds = np.array([*kinds, *[0] * len(words)])
        labels = np.full(len(ids), -100, dtype=np.int64)
        answer = len(ids) - len(words) // 2
        labels[answer - 1 : -1] = ids[answer:]
        return EncodedSample(
            input_ids=ids,
            label_ids=labels,
            media_positions=np.flatnonzero(kinds),
            feature_positions=np.flatnonzero(ids == self.placeholder),
        )

    @cached_property
    def _table(self):
        texts = [self.text(row) for row in range(len(self.media))]
        forms = [form for row in range(len(self.media)) for form in self.forms(row)]
        column = lambda name: np.array([getattr(form, name) for form in forms], dtype=np.int64)  # noqa: E731
        return SampleTable(
            sample_ids=np.array([f"s{row}" for row in range(len(self.media))]),
            text_tokens=np.array([text.num_text_tokens for text in texts]),
            label_tokens=np.array([text.num_label_tokens for text in texts]),
            media_offsets=np.concatenate([[0], np.cumsum([len(sample) for sample in self.media])]),
            media_kind=np.full(len(forms), MEDIA_KINDS.index(self.case.kind)),
            media_patches=column("patches"),
            media_segments=column("segments"),
            media_tokens=column("features") + column("markers"),
        )

    def table(self):
        return self._table

    def plain_inputs(self, row):
        """Arguments of the plain model's forward for one sample."""
        ids = torch.from_numpy(self.text(row).input_ids)[None]
        forms = self.forms(row)
        if not forms:
            return {"input_ids": ids}
        pixels = [self.pixels(row, item) for item in range(len(forms))]
        marked = torch.where(ids == self.placeholder, PLACEHOLDER, ids)
        return {"input_ids": ids, **self.case.plain(pixels, forms, marked)}
