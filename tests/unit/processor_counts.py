"""What the real processor of a model folder makes of images of given sizes, without their pixels.

Each processor is loaded from the folder as the reader loads it, and asked through its own functions of sizes.
"""

from typing import Any

from media_cases import blank, borrowed

from entrain_opt.spec.folder import read_json

Size = tuple[int, int]


def image_counts(folder: Any, sizes: list[Size]) -> list[tuple[int, int]]:
    """(tiles or patches, features) of each image of one sample, given as (width, height)."""
    return _Counter(folder).of_sample(sizes)


class _Counter:
    def __init__(self, folder: Any) -> None:
        from transformers import AutoConfig, AutoImageProcessor

        self.processor = AutoImageProcessor.from_pretrained(folder)
        self.raw = read_json(folder / "config.json")
        self.family = self.raw["model_type"]
        self.name = type(self.processor).__name__.removesuffix("Pil").removesuffix("Fast")
        # A composed model's config is none of Transformers.
        self.config = AutoConfig.from_pretrained(folder) if self.family != "entrain_composed" else None
        path = folder / "processor_config.json"
        self.settings = read_json(path) if path.exists() else {}
        self.features = self._features()

    def of_sample(self, sizes: list[Size]) -> list[tuple[int, int]]:
        return [getattr(self, f"_{self.name}")(width, height, len(sizes)) for width, height in sizes]

    def _grid(self) -> int:
        vision = self.config.vision_config
        side, patch = (v[0] if isinstance(v, (list, tuple)) else v for v in (vision.image_size, vision.patch_size))
        return side // patch

    def _features(self) -> Any:
        """LLaVA-NeXT's and OneVision's own function of sizes, on a stand-in for their combined processors."""
        from transformers import LlavaNextProcessor, LlavaOnevisionProcessor

        owner = {"LlavaNextImageProcessor": LlavaNextProcessor, "LlavaOnevisionImageProcessor": LlavaOnevisionProcessor}
        if self.name not in owner:
            return None
        known: dict[str, Any] = {
            "image_processor": self.processor,
            "patch_size": self.config.vision_config.patch_size,
            "num_additional_image_tokens": 1,
            "num_image_tokens": self._grid() ** 2,
            "vision_feature_select_strategy": self.config.vision_feature_select_strategy,
            "vision_aspect_ratio": self.settings.get("vision_aspect_ratio", "anyres_max_9"),
        }
        known["_get_unpadded_features"] = borrowed(owner[self.name], "_get_unpadded_features", **known)
        return borrowed(owner[self.name], "_get_number_of_features", **known)

    def _tiles(self, width: int, height: int) -> int:
        """Tiles of the resolution that LLaVA-NeXT and OneVision choose, and the whole image."""
        from transformers.image_processing_utils import select_best_resolution

        side = self.config.vision_config.image_size
        best = select_best_resolution((height, width), self.processor.image_grid_pinpoints)
        return 1 + (best[0] // side) * (best[1] // side)

    def _GotOcr2ImageProcessor(self, width: int, height: int, _: int) -> tuple[int, int]:
        tiles = self.processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        per_tile = self._grid() ** 2
        if self.family == "internvl":
            per_tile = int(per_tile * self.config.downsample_ratio**2)
        return tiles, tiles * per_tile

    def _LlavaNextImageProcessor(self, width: int, height: int, _: int) -> tuple[int, int]:
        side = self.config.vision_config.image_size
        return self._tiles(width, height), self.features(height, width, side, side) - 1  # Less the class token.

    def _LlavaOnevisionImageProcessor(self, width: int, height: int, count: int) -> tuple[int, int]:
        if count > 1:
            return 1, self._grid() ** 2 + 1
        side = self.config.vision_config.image_size
        return self._tiles(width, height), self.features(height, width, side, side)

    def _Qwen2VLImageProcessor(self, width: int, height: int, _: int) -> tuple[int, int]:
        patches = self.processor.get_number_of_image_patches(height, width)
        return patches, patches // self.processor.merge_size**2

    def _SmolVLMImageProcessor(self, width: int, height: int, _: int) -> tuple[int, int]:
        tiles = max(1, self.processor.get_number_of_image_patches(height, width)[0])
        return tiles, tiles * self._grid() ** 2 // self.config.scale_factor**2

    _Idefics3ImageProcessor = _SmolVLMImageProcessor

    def _Gemma3ImageProcessor(self, width: int, height: int, _: int) -> tuple[int, int]:
        crops = 0
        if self.processor.do_pan_and_scan:
            settings = [
                getattr(self.processor, f"pan_and_scan_{name}")
                for name in ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
            ]
            crops = len(self.processor.pan_and_scan(blank(width, height), *settings))
        return 1 + crops, (1 + crops) * self.config.mm_tokens_per_image

    def _PixtralImageProcessor(self, width: int, height: int, _: int) -> tuple[int, int]:
        from transformers.image_utils import ChannelDimension
        from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

        side = self.config.vision_config.patch_size
        merged = side * self.config.spatial_merge_size
        made = get_resize_output_image_size(
            blank(width, height), self.processor.size["longest_edge"], merged, ChannelDimension.FIRST
        )
        return made[0] * made[1] // side**2, made[0] * made[1] // merged**2


def sample_counts(folder: Any, samples: list[list[Size]]) -> list[list[tuple[int, int]]]:
    """`image_counts` of many samples, with the processor loaded once."""
    counter = _Counter(folder)
    return [counter.of_sample(sizes) for sizes in samples]
