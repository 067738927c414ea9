"""Checkpoints written while training goes on.

`save` copies this rank's part to host memory and returns; a thread writes it, over a process group of its own, so that
its messages never meet those of training. One write at a time: the next `save` waits for the last one.

Promise: a failed write raises on every rank at its next `save`, `check` or `wait`. A removal asked for meanwhile is
done after the write, so that an older checkpoint never goes before the newer one is complete.
Price: host memory of the size of this rank's part; the copy takes the time that training stands still.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch.distributed as dist

from entrain_opt.runtime import checkpoint, checkpoint_files
from entrain_opt.runtime.checkpoint import Snapshot


class CheckpointWriter:
    """Writes and removes checkpoints; every rank must call `save` alike.

    Args:
        background: write in a thread; False writes within `save`.
    """

    def __init__(self, *, background: bool) -> None:
        self.background = background
        self._group: dist.ProcessGroup | None = None
        if background and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._removals: list[Path] = []

    def save(self, path: Path, snapshot: Snapshot) -> None:
        """Write a checkpoint, or begin to.

        Raises:
            CheckpointError: this write failed, or in the background the one before it.
        """
        if not self.background:
            checkpoint.write(path, snapshot)
            return
        self.wait()
        self._thread = threading.Thread(
            target=self._write, args=(path, snapshot), name="entrain-checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, path: Path, snapshot: Snapshot) -> None:
        try:
            checkpoint.write(path, snapshot, self._group)
        except BaseException as error:  # Raised again by `check`, in the thread that trains.
            self._error = error

    def remove(self, path: Path) -> None:
        """Delete a checkpoint; only the first rank may call this."""
        if self._thread is None:
            checkpoint_files.remove(path)
        else:
            self._removals.append(path)

    def check(self) -> None:
        """Raise what a finished write raised, and do the removals that waited for it."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for a running write.

        Raises:
            CheckpointError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._removals.clear()  # The older checkpoint is the last good one.
            raise error
        while self._removals:
            checkpoint_files.remove(self._removals.pop())
