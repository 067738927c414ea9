"""Frames of a video from its header, with the optional package `av`.

Promise: nothing is decoded; containers that do not state their frame count are walked packet by packet. Price: a
millisecond for a container with a frame count, the speed of reading the file for one without.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrain_opt.errors import WorkloadError
from entrain_opt.workload.conversation import MediaItem
from entrain_opt.workload.optional import media_package


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
