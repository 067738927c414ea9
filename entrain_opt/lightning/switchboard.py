"""One line from every rank to the first one: who is alive, who failed first, who waits for whom.

The first rank runs a `Switchboard` thread; every rank (the first as well) keeps one TCP connection to it. A rank that
fails says why and a rank that finishes says goodbye. One whose connection ends without either was killed: the kernel
closes the connection of a process that is gone, so no heartbeat is needed and a slow rank is never taken for a dead
one. The first failure is passed on to all. Lines are JSON.

Price: one thread that sleeps until a line arrives; one connection per rank. A host that loses power is noticed by TCP
keep-alive after about 25 s.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import weakref
from typing import Any

KILLED = (
    "ended without a word: it was killed or crashed (a SIGKILL, the kernel's out-of-memory killer, a segmentation "
    "fault, a lost node). Look at the kernel's and the scheduler's log of its host"
)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel notice a host that is gone, and send small lines at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def close_in_forked_children(owner: Any) -> None:
    """A loader process would inherit the connections of `owner` and hold them open after its parent was killed."""
    reference = weakref.ref(owner)

    def close() -> None:
        alive = reference()
        if alive is not None:
            for connection in alive.sockets():
                connection.close()

    os.register_at_fork(after_in_child=close)


def pack(line: dict[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


class Lines:
    """Splits the bytes of one connection into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        *complete, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in complete]


class _Caller:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = Lines()
        self.rank: int | None = None
        self.name = "an unknown rank"
        self.said_goodbye = False


class Switchboard:
    """The first rank's end of all lines; listens on `port` until `close`."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0), backlog=4096)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._callers: dict[socket.socket, _Caller] = {}
        self._failure: dict[str, Any] | None = None
        close_in_forked_children(self)
        self._thread = threading.Thread(target=self._serve, name="entrain-switchboard", daemon=True)
        self._thread.start()

    def sockets(self) -> list[socket.socket]:
        return [self._listener, self._wake_read, self._wake_write, *self._callers]

    def close(self) -> None:
        """Pass on what the first rank has said, then hang up."""
        self._wake_write.close()
        self._thread.join()

    def _serve(self) -> None:
        closing = False
        while not closing or any(caller.rank == 0 for caller in self._callers.values()):
            for key, _ in self._selector.select():
                if key.fileobj is self._wake_read:
                    closing = True
                    self._selector.unregister(self._wake_read)
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(self._callers[key.fileobj])  # type: ignore[index]
        for caller in self._callers.values():
            self._send(caller, {"closing": True})
        for connection in self.sockets():
            connection.close()
        self._selector.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        keep_alive(connection)
        self._callers[connection] = _Caller(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, caller: _Caller) -> None:
        try:
            data = caller.connection.recv(65536)
        except OSError:
            data = b""  # A reset connection is an ended one.
        if not data:
            self._selector.unregister(caller.connection)
            del self._callers[caller.connection]
            caller.connection.close()
            if caller.rank is not None and not caller.said_goodbye:
                self._fail(caller, KILLED, killed=True)
            return
        for line in caller.lines.feed(data):
            self._handle(caller, line)

    def _handle(self, caller: _Caller, line: dict[str, Any]) -> None:
        match line:
            case {"hello": rank, "name": name}:
                caller.rank, caller.name = rank, name
                if self._failure is not None:
                    self._send(caller, self._failure)
            case {"error": text}:
                self._fail(caller, text, killed=False)
            case {"bye": _}:
                caller.said_goodbye = True
            case {"ask": peer}:
                for other in list(self._callers.values()):
                    if other.rank == peer:
                        self._send(other, {"asked_by": caller.rank})

    def _fail(self, caller: _Caller, text: str, *, killed: bool) -> None:
        if self._failure is None:
            self._failure = {"failed": caller.rank, "name": caller.name, "text": text, "killed": killed}
            for other in list(self._callers.values()):
                self._send(other, self._failure)

    def _send(self, caller: _Caller, line: dict[str, Any]) -> None:
        try:
            caller.connection.sendall(pack(line))
        except OSError:
            return  # It hung up meanwhile, which the selector reports next.
