"""Videos with the optional package `av`: how many frames the header says, and chosen frames as pictures.

Promise: for lengths nothing is decoded; containers that do not state their frame count are walked packet by packet.
Frames are numbered as they are shown; a file with fewer than its header says raises. Price: a millisecond for a
container with a frame count, the speed of reading the file for one without; pictures cost the decoding of everything
up to the last one chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.conversation import MediaItem
from entrain_opt.workload.optional import media_package

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoLength:
    """Frames, sides in pixels and frames per second (None if unknown) of a video file."""

    num_frames: int
    width: int
    height: int
    fps: float | None


def read_video_length(item: MediaItem) -> VideoLength:
    """What the header of a video file says.

    Raises:
        WorkloadError: the file is missing or not a video.
        RuntimeConfigError: `av` is not installed.
    """
    av = media_package("av", f"{item.path}: reading videos")
    with item.open() as file:
        try:
            with av.open(file) as container:
                if not container.streams.video:
                    raise WorkloadError(f"{item.path}: no video stream.")
                stream = container.streams.video[0]
                width, height = stream.codec_context.width, stream.codec_context.height
                fps = float(stream.average_rate) if stream.average_rate else None
                num_frames = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        except (av.FFmpegError, ValueError) as error:
            raise WorkloadError(f"{item.path}: not a usable video ({error}).") from error
    if num_frames < 1 or width < 1 or height < 1:
        raise WorkloadError(f"{item.path}: expected frames, found {num_frames} of {width} x {height} pixels.")
    return VideoLength(num_frames=num_frames, width=width, height=height, fps=fps)


def read_frames(item: MediaItem, indices: Sequence[int]) -> list[Image.Image]:
    """Chosen frames of a video as RGB, in the order asked for.

    Args:
        item: the video.
        indices: of the frames, from 0; one may be asked for several times.

    Raises:
        WorkloadError: the file is missing, broken, no video, or ends before the last frame asked for.
        RuntimeConfigError: `av` is not installed.
    """
    av = media_package("av", f"{item.path}: reading videos")
    wanted = set(indices)
    last, found = max(wanted), dict[int, "Image.Image"]()
    with item.open() as file:
        try:
            with av.open(file) as container:
                if not container.streams.video:
                    raise WorkloadError(f"{item.path}: no video stream.")
                for index, frame in enumerate(container.decode(container.streams.video[0])):
                    if index in wanted:
                        found[index] = frame.to_image().convert("RGB")
                    if index == last:
                        break
        except (av.FFmpegError, ValueError) as error:
            raise WorkloadError(f"{item.path}: not a usable video ({error}).") from error
    if missing := sorted(wanted - found.keys()):
        raise WorkloadError(
            f"{item.path}: expected a frame {missing[0]}, found that the video ends before it. Leave it out (policy "
            "skip), or write the file anew with a right header."
        )
    return [found[index] for index in indices]
