"""One rank's failure, told once.

A rank that fails closes its connections, and its peers then fail with messages about connections that hide the reason.
So a failing rank leaves its error in a small store, and a peer that loses a connection looks there before it speaks.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from entrain_opt.errors import EntrainError

_KEY = "first_error"


class PeerFailure(EntrainError):
    """Another rank failed first; the message names it and its error."""


class FailureBoard:
    """Where ranks tell each other why they stop.

    Args:
        rank: global rank.
        world_size: number of ranks.
        timeout_seconds: how long a rank that lost a peer waits for that peer's reason.
    """

    def __init__(self, rank: int, world_size: int, *, timeout_seconds: float = 3.0) -> None:
        self._rank = rank
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._store: dist.TCPStore | None = None
        if world_size > 1:
            timeout = timedelta(seconds=timeout_seconds)
            port = [0]
            if rank == 0:
                self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
                port = [self._store.port]
            dist.broadcast_object_list(port, src=0)
            if rank != 0:
                self._store = dist.TCPStore(host, port[0], is_master=False, timeout=timeout)

    def tell(self, error: BaseException) -> None:
        """Leave an error for the other ranks; the first one stays."""
        if self._store is None or isinstance(error, PeerFailure):
            return
        try:
            if self._store.add("failures", 1) == 1:
                self._store.set(_KEY, f"rank {self._rank}: {type(error).__name__}: {error}")
        except dist.DistError:
            return  # The rank that keeps the store is gone, so there is nobody left to tell.

    def reason(self) -> str | None:
        """The first error that another rank left, waiting a little for it."""
        if self._store is None:
            return None
        try:
            reason = self._store.get(_KEY).decode()
        except dist.DistError:
            return None  # No rank left a reason in time; the caller's own error is all there is.
        return None if reason.startswith(f"rank {self._rank}:") else reason
