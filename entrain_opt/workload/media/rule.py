"""What a media rule answers: the size of one media item, and what stands in its place in the text.

`MediaRule` has one method per media kind; a rule answers for the kinds it lists and refuses the others. `CombinedRule`
puts one rule per kind together, for models with several encoders or with videos beside images.

Text that a processor writes around the features (row and column tags, timestamps, start and end tokens) belongs to the
media item: it counts in `tokens`, and `markers` says how much of them it is. It is tokenised apart from the text around
the item, which is exact where it starts and ends with special tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.media.text import TextCounter

#: What replaces one placeholder: text to tokenise, and numbers of feature positions.
Expansion = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSize:
    """What one media item costs.

    Attributes:
        patches: what the encoder computes on (a class token counts).
        segments: parts that no layer's attention crosses: pictures, tiles, frames or clips. Windows within them belong
            to the model's layers (`ModuleSpec`), not to the item.
        tokens: what the language model sees, the processor's own text included.
        markers: how many of the tokens are that text; the others are rows that the projector makes.
    """

    patches: int
    segments: int
    tokens: int
    markers: int = 0

    @property
    def features(self) -> int:
        """Rows that go from the encoder to the language model."""
        return self.tokens - self.markers


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameValues:
    """How a video processor makes values of pixels.

    Attributes:
        mean, std: per channel, of values between 0 and 1.
        resample: PIL's number of the filter.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoFrames:
    """Frames that a processor takes of a video.

    Attributes:
        indices: of the frames.
        size: (width, height) that they are resized to.
        first_size: that they are resized to before; None if they are not.
        values: None where the image processor's settings hold.
    """

    indices: tuple[int, ...]
    size: tuple[int, int]
    first_size: tuple[int, int] | None = None
    values: FrameValues | None = None


class MediaRule:
    """Sizes of the media items that one model takes; a rule of this class itself refuses all of them."""

    __slots__ = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The media kinds that have a rule."""
        return ("image",)

    def image(self, width: int, height: int) -> MediaSize:
        """The cost of an image of `width` x `height` pixels that is the only one of its sample.

        Raises:
            WorkloadError: the processor refuses this size, or the model takes no images.
        """
        raise self._refusal("an image")

    def images(self, sizes: Sequence[tuple[int, int]]) -> list[MediaSize]:
        """The costs of all images of one sample, given as (width, height), in order.

        Some models spend less on each image where a sample has several.

        Raises:
            WorkloadError: as in `image`.
        """
        return [self.image(width, height) for width, height in sizes]

    def audio(self, seconds: float) -> MediaSize:
        """The cost of an audio clip of `seconds` (samples divided by their rate) before resampling.

        Raises:
            WorkloadError: the clip is too short to make a token, or the model takes no audio.
        """
        raise self._refusal("audio")

    def video(self, num_frames: int, width: int, height: int, fps: float | None = None) -> MediaSize:
        """The cost of a video.

        Args:
            num_frames: of the file, before any are left out.
            width, height: of the file, in pixels.
            fps: frames per second of the file; None if unknown.

        Raises:
            WorkloadError: the processor refuses it or needs fps, or the model takes no videos.
        """
        raise self._refusal("a video")

    def image_shape(self, width: int, height: int) -> tuple[int, ...]:
        """What a model must know of an image to place its features: (height, width) in pixels, here."""
        return height, width

    def audio_shape(self, seconds: float) -> tuple[int, ...]:
        """What a model must know of a clip: nothing, here."""
        return ()

    def video_shape(self, num_frames: int, width: int, height: int, fps: float | None = None) -> tuple[int, ...]:
        """What a model must know of a video: nothing, here. Raises as `video` does."""
        return ()

    def video_frames(self, num_frames: int, width: int, height: int, fps: float | None = None) -> VideoFrames:
        """Which frames a processor takes of a video, and their size. Raises as `video` does."""
        raise self._refusal("a video")

    def image_expansion(self, width: int, height: int) -> Expansion:
        """What replaces the placeholder of a sample's only image. Raises as `image` does."""
        return (self.image(width, height).tokens,)

    def audio_expansion(self, seconds: float) -> Expansion:
        """What replaces the placeholder of a clip. Raises as `audio` does."""
        return (self.audio(seconds).tokens,)

    def video_expansion(self, num_frames: int, width: int, height: int, fps: float | None = None) -> Expansion:
        """What replaces the placeholder of a video. Raises as `video` does."""
        return (self.video(num_frames, width, height, fps).tokens,)

    def _refusal(self, found: str) -> WorkloadError:
        return WorkloadError(f"the model takes {', '.join(self.kinds)}, found {found}. Use another model.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CombinedRule(MediaRule):
    """One rule per media kind; None where the model has no such encoder."""

    image_rule: MediaRule | None = None
    audio_rule: MediaRule | None = None
    video_rule: MediaRule | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        rules = {"image": self.image_rule, "audio": self.audio_rule, "video": self.video_rule}
        return tuple(kind for kind, rule in rules.items() if rule is not None)

    def image(self, width: int, height: int) -> MediaSize:
        return self._rule(self.image_rule, "an image").image(width, height)

    def images(self, sizes: Sequence[tuple[int, int]]) -> list[MediaSize]:
        return self._rule(self.image_rule, "an image").images(sizes) if sizes else []

    def audio(self, seconds: float) -> MediaSize:
        return self._rule(self.audio_rule, "audio").audio(seconds)

    def video(self, num_frames: int, width: int, height: int, fps: float | None = None) -> MediaSize:
        return self._rule(self.video_rule, "a video").video(num_frames, width, height, fps)

    def image_shape(self, width: int, height: int) -> tuple[int, ...]:
        return self._rule(self.image_rule, "an image").image_shape(width, height)

    def audio_shape(self, seconds: float) -> tuple[int, ...]:
        return self._rule(self.audio_rule, "audio").audio_shape(seconds)

    def video_shape(self, num_frames: int, width: int, height: int, fps: float | None = None) -> tuple[int, ...]:
        return self._rule(self.video_rule, "a video").video_shape(num_frames, width, height, fps)

    def video_frames(self, num_frames: int, width: int, height: int, fps: float | None = None) -> VideoFrames:
        return self._rule(self.video_rule, "a video").video_frames(num_frames, width, height, fps)

    def image_expansion(self, width: int, height: int) -> Expansion:
        return self._rule(self.image_rule, "an image").image_expansion(width, height)

    def audio_expansion(self, seconds: float) -> Expansion:
        return self._rule(self.audio_rule, "audio").audio_expansion(seconds)

    def video_expansion(self, num_frames: int, width: int, height: int, fps: float | None = None) -> Expansion:
        return self._rule(self.video_rule, "a video").video_expansion(num_frames, width, height, fps)

    def _rule(self, rule: MediaRule | None, found: str) -> MediaRule:
        if rule is None:
            raise self._refusal(found)
        return rule


def expansion_size(pieces: Iterable[str | int], text: TextCounter, *, patches: int, segments: int) -> MediaSize:
    """The size of an item from what replaces its placeholder."""
    features = markers = 0
    for piece in pieces:
        if isinstance(piece, int):
            features += piece
        else:
            markers += text.count(piece)
    return MediaSize(patches=patches, segments=segments, tokens=features + markers, markers=markers)


def check_sides(width: int, height: int, max_aspect_ratio: float | None = None, *, what: str = "image") -> None:
    """Raise WorkloadError unless both sides are positive and the aspect ratio is within the limit."""
    if width < 1 or height < 1:
        raise WorkloadError(f"{what}: expected sides of at least 1 pixel, found {width} x {height}.")
    ratio = max(width, height) / min(width, height)
    if max_aspect_ratio is not None and ratio > max_aspect_ratio:
        raise WorkloadError(
            f"{what}: expected an aspect ratio of at most {max_aspect_ratio:g}, found {width} x {height} "
            f"({ratio:.1f}). Crop the {what} or leave it out (policy skip)."
        )
