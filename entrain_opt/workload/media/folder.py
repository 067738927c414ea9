"""The processors' settings in a model folder, as Transformers finds them.

Version 5 writes one `processor_config.json` with a section per processor; older folders have `preprocessor_config.json`
(image processor, feature extractor or both) and `video_preprocessor_config.json`. A video processor without a file of
its own takes the image processor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrain_opt.errors import RuntimeConfigError
from entrain_opt.spec.families import COMPOSED_TYPE
from entrain_opt.spec.folder import first_value, read_json

_FALLBACK_SUFFIXES = ("Pil", "Fast")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """Configs of one folder.

    Attributes:
        folder: named in errors.
        config: config.json, or the part of it that holds encoders and language model.
        processor: the settings beside the sections of processor_config.json.
        sections: the sections of processor_config.json, and the older files by their names without suffix.
    """

    folder: Path
    config: dict[str, Any]
    processor: dict[str, Any]
    sections: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> ModelFiles:
        """All files that are there.

        Raises:
            RuntimeConfigError: no config.json, or a file is not a JSON object.
        """
        config = read_json(folder / "config.json")
        combined = _read_if_there(folder / "processor_config.json")
        names = ("image_processor", "feature_extractor", "video_processor")
        sections = {name: combined.pop(name) for name in names if isinstance(combined.get(name), dict)}
        for name in ("preprocessor_config", "video_preprocessor_config"):
            if content := _read_if_there(folder / f"{name}.json"):
                sections[name] = content
        return cls(folder=folder, config=config.get("thinker_config") or config, processor=combined, sections=sections)

    @property
    def image_processor(self) -> dict[str, Any]:
        """Settings of the image processor.

        Raises:
            RuntimeConfigError: there are none.
        """
        found = self.sections.get("image_processor") or self.sections.get("preprocessor_config")
        if found is None:
            raise RuntimeConfigError(
                f"{self.folder}: expected an image processor in preprocessor_config.json or processor_config.json, "
                "found none. Give the folder of a Hugging Face model."
            )
        return found

    @property
    def video_processor(self) -> dict[str, Any]:
        """Settings of the video processor, or the image processor's in its place."""
        own = self.sections.get("video_processor") or self.sections.get("video_preprocessor_config")
        return own or self.sections.get("preprocessor_config") or {}

    @property
    def feature_extractor(self) -> dict[str, Any]:
        """Settings of the audio feature extractor.

        Raises:
            RuntimeConfigError: there are none.
        """
        found = self.sections.get("feature_extractor") or self.sections.get("preprocessor_config") or {}
        if found.get("feature_extractor_type") != "WhisperFeatureExtractor":
            raise RuntimeConfigError(
                f"{self.folder}: feature_extractor_type: expected WhisperFeatureExtractor in preprocessor_config.json "
                f"or processor_config.json, found {found.get('feature_extractor_type')!r}."
            )
        return found

    @property
    def image_processor_name(self) -> str:
        """Class of the image processor, without the suffix of its backend."""
        name = str(first_value(self.image_processor, "image_processor_type", "feature_extractor_type"))
        for suffix in _FALLBACK_SUFFIXES:
            name = name.removesuffix(suffix)
        return name

    @property
    def family(self) -> str:
        """`model_type` of the part that holds encoders and language model."""
        return str(self.config.get("model_type"))

    @property
    def is_composed(self) -> bool:
        """Whether the config is of this project's own form."""
        return self.family == COMPOSED_TYPE

    def stack(self, projector: str, field: str = "stack") -> int:
        """Neighbours that the projector of a composed model joins into one token; 1 in other models.

        Args:
            projector: name of its settings.
            field: `stack`, or `merge` or `pool`: sides of a square.

        Raises:
            RuntimeConfigError: not a positive number.
        """
        stack = setting(setting(self.config, projector, {}), field, 1) if self.is_composed else 1
        if not isinstance(stack, int) or stack < 1:
            raise RuntimeConfigError(f"{self.folder}: {projector}.{field}: expected at least 1, found {stack!r}.")
        return stack

    @property
    def vision(self) -> dict[str, Any]:
        return self.config.get("vision_config") or {}

    @property
    def audio(self) -> dict[str, Any]:
        return self.config.get("audio_config") or {}

    def expect_equal(self, field: str, found: Any, expected: Any, owner: str) -> None:
        """Raise RuntimeConfigError unless a processor's setting is what the model makes."""
        if found != expected:
            raise RuntimeConfigError(
                f"{self.folder}: {field}: the processor has {found}, {owner} makes it {expected}. Do the files belong "
                "to one model?"
            )


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def setting(settings: dict[str, Any], name: str, default: Any) -> Any:
    """The value of a field; the default where it is absent or null, as Transformers writes what is not set."""
    value = settings.get(name)
    return default if value is None else value


def edges(settings: dict[str, Any], field: str, default: dict[str, int], folder: Path) -> dict[str, int]:
    """`shortest_edge` and `longest_edge` of a size field; from `default` where it lacks one.

    Raises:
        RuntimeConfigError: not such a size.
    """
    size = setting(settings, field, {})
    if not isinstance(size, dict) or size.keys() & {"height", "width"}:
        raise RuntimeConfigError(f"{folder}: {field}: expected shortest_edge and longest_edge, found {size!r}.")
    return {name: setting(size, name, value) for name, value in default.items()}


def square(settings: dict[str, Any], field: str, default: dict[str, int], folder: Path) -> tuple[int, int]:
    """(width, height) of a size field written as a number or as height and width."""
    size = first_value(settings, field) or default
    if isinstance(size, int):
        return size, size
    if not isinstance(size, dict) or not {"height", "width"} <= size.keys():
        raise RuntimeConfigError(f"{folder}: {field}: expected height and width, found {size!r}.")
    return int(size["width"]), int(size["height"])


def tower_side(files: ModelFiles) -> tuple[int, int]:
    """(pixels, patches) per side of the square that the vision tower takes."""
    image_side, patch_side = (_side(files.vision.get(field)) for field in ("image_size", "patch_size"))
    if image_side is None or patch_side is None:
        raise RuntimeConfigError(f"{files.folder}/config.json: vision_config: expected image_size and patch_size.")
    return image_side, image_side // patch_side


def _side(value: Any) -> int | None:
    """A side written as a number or as two equal ones."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return value if isinstance(value, int) and value > 0 else None
