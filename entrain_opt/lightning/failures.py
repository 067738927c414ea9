"""One rank's failure, told once; and a watchdog for waits that take too long.

A rank that fails closes its connections, and its peers then fail with messages about connections that hide the reason.
So a failing rank tells its error to the switchboard, which passes it on, and a peer that loses a connection asks there
before it speaks. A rank that cannot fail by itself, because it computes or waits for a third one, is ended.

Promise: every rank is gone within `GRACE_SECONDS` after the first one failed or was killed, and names that one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from entrain_opt.errors import EntrainError
from entrain_opt.lightning.switchboard import Lines, Switchboard, close_in_forked_children, keep_alive, pack
from entrain_opt.runtime.waiting import WaitLog

#: How long a rank may take to end by itself after another one failed.
GRACE_SECONDS = 8.0


class PeerFailure(EntrainError):
    """Another rank failed first; the message names it and its error."""


class FailureBoard:
    """This rank's line to the switchboard, and its watchdog.

    Args:
        rank: global rank.
        world_size: number of ranks; every one of them must make its board at the same point.
        waits: what this rank waits for.
        watchdog_seconds: a wait of this length is reported, and again whenever it has doubled.
        end_children: ends the processes that this rank started, before it is ended itself.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        waits: WaitLog,
        watchdog_seconds: float = 60.0,
        end_children: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._waits = waits
        self._watchdog_seconds = watchdog_seconds
        self._end_children = end_children
        self._first_failure: dict[str, Any] | None = None
        self._heard = threading.Event()
        self._closed = threading.Event()
        self._switchboard: Switchboard | None = None
        self._line: socket.socket | None = None
        if world_size == 1:
            return
        port = [0]
        if rank == 0:
            self._switchboard = Switchboard()
            port = [self._switchboard.port]
        dist.broadcast_object_list(port, src=0)
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._line = socket.create_connection((host, int(port[0])), timeout=60)
        self._line.settimeout(None)
        keep_alive(self._line)
        close_in_forked_children(self)
        self._send({"hello": rank, "name": f"rank {rank} (process {os.getpid()} on {socket.gethostname()})"})
        for work in (self._listen, self._watch):
            threading.Thread(target=work, name=f"entrain{work.__name__}", daemon=True).start()

    def sockets(self) -> list[socket.socket]:
        return [] if self._line is None else [self._line]

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks why this one stops; the first to tell is the cause."""
        if not isinstance(error, PeerFailure):
            self._send({"error": f"{type(error).__name__}: {error}"})

    def reason(self, wait_seconds: float = 3.0) -> str | None:
        """The first failure, if it is another rank's, waiting a little for it."""
        if self._line is None or not self._heard.wait(wait_seconds):
            return None
        failure = self._first_failure
        return None if failure is None or failure["failed"] == self._rank else _words(failure)

    def close(self) -> None:
        """Say goodbye: from here on, this rank's end is not a failure."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._line is not None:
            self._send({"bye": True})
            with contextlib.suppress(OSError):  # The other end may have hung up already.
                self._line.shutdown(socket.SHUT_RDWR)
            self._line.close()
        if self._switchboard is not None:
            self._switchboard.close()

    def _send(self, line: dict[str, Any]) -> None:
        if self._line is None:
            return
        try:
            self._line.sendall(pack(line))
        except OSError:
            return  # The first rank is gone, so there is nobody left to tell; `_listen` sees the same.

    def _listen(self) -> None:
        """Hear of failures and questions until the line ends."""
        assert self._line is not None
        lines = Lines()
        while True:
            try:
                data = self._line.recv(65536)
            except OSError:
                data = b""  # Closed here, or reset there; which one, `_closed` says.
            if self._closed.is_set():
                return
            if not data:
                text = "ended without a word: it was killed or crashed, or its host was lost"
                self._end({"failed": 0, "name": "rank 0", "text": text, "killed": True})
                return
            for line in lines.feed(data):
                if "closing" in line:
                    return
                if "asked_by" in line:
                    _say(f"rank {self._rank}, which rank {line['asked_by']} waits for, {self._waits.describe()}.")
                elif line["failed"] != self._rank:
                    self._end(line)
                    return
                else:
                    self._first_failure = line
                    self._heard.set()

    def _end(self, failure: dict[str, Any]) -> None:
        """Another rank failed: let this one end by itself, or end it."""
        self._first_failure = failure
        self._heard.set()
        if self._switchboard is not None and failure["killed"]:
            # At once: a launcher that sees the dead process may end this one before it speaks.
            _say(f"{_words(failure)}. Rank {self._rank} {self._waits.describe()}.")
        if self._closed.wait(GRACE_SECONDS):
            return
        _say(
            f"stopped because another rank failed first. {_words(failure)}. Rank {self._rank} {self._waits.describe()}."
        )
        self._end_children()
        os._exit(1)

    def _watch(self) -> None:
        """Report long waits."""
        reported, limit = None, self._watchdog_seconds
        while not self._closed.wait(min(1.0, self._watchdog_seconds / 4)):
            wait = self._waits.current
            if wait is None or self._heard.is_set():
                continue
            if wait is not reported:
                reported, limit = wait, self._watchdog_seconds
            if wait.seconds >= limit:
                limit *= 2
                _say(f"rank {self._rank} {self._waits.describe()}.")
                if wait.peer is not None:
                    self._send({"ask": wait.peer})


def _words(failure: dict[str, Any]) -> str:
    return f"{failure['name']} {failure['text']}" if failure["killed"] else f"{failure['name']}: {failure['text']}"


def _say(text: str) -> None:
    print(f"entrain: {text}", file=sys.stderr, flush=True)
