"""Upgrade in place: a new launcher takes segments, port and runtime folder over from one that goes on serving meanwhile.

Over a SOCK_SEQPACKET unix socket in the runtime folder. The new one asks; the old one answers with a KeptServer and the
descriptors of lock, port and segments, and goes on as if nothing were. The new one imports, attaches, starts and tries
its workers, and only then says that it is ready. The old one answers GO, when it still is what it offered, and changes
nothing from then on; the new one's workers listen, and it says that they serve. Leaving at any point undoes all.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from placement.events import EventLoop
from placement.kept_server import Inheritance, KeptServer, NotUsable

log = logging.getLogger("numaserve.launcher")

READY = b"ready"
GO = b"go"
SERVING = b"serving"
_BUFFER_BYTES = 1 << 20
# Of lock and port; SCM_RIGHTS carries 253 at most (unix(7)).
_FIXED_DESCRIPTORS = 2
_MOST_DESCRIPTORS = 253
_ANSWER_SECONDS = 30.0


class NobodyServes(Exception):
    """There is no server to take over from."""


def hand_over_socket(runtime_dir: Path) -> Path:
    """Where a launcher waits for its successor."""
    return runtime_dir / "hand-over.sock"


def take_over(runtime_dir: Path, version: str) -> Inheritance:
    """Ask the server of a runtime folder for what it keeps.

    Raises NobodyServes where none runs, NotUsable when it refuses or its answer cannot be understood.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_ANSWER_SECONDS)
    try:
        connection.connect(str(hand_over_socket(runtime_dir)))
        connection.send(json.dumps({"version": version, "pid": os.getpid()}).encode())
        data, descriptors, _, _ = socket.recv_fds(connection, _BUFFER_BYTES, _MOST_DESCRIPTORS)
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NobodyServes(str(error)) from error
    except OSError as error:
        raise NotUsable(f"the running server does not answer: {error}") from error
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if not data.startswith(b"{"):
        raise NotUsable(data.decode(errors="replace") or "the running server has gone")
    if len(descriptors) < _FIXED_DESCRIPTORS:
        raise NotUsable("the running server handed over no descriptors")
    lock, port, *segments = descriptors
    holder = socket.socket(fileno=port)
    return Inheritance(KeptServer.from_json(data.decode()), segments, holder, lock, connection)


def claim(events: EventLoop, connection: socket.socket, answered: Callable[[str], None]) -> None:
    """Tell the server that hands over that all is ready; `answered` is called with "" to go ahead, or why not.

    A server that is gone leaves the way free.
    """

    def on_readable() -> None:
        events.unwatch(connection.fileno())
        try:
            data = connection.recv(_BUFFER_BYTES)
        except OSError:
            data = b""
        answered("" if data in (GO, b"") else data.decode(errors="replace"))

    events.watch(connection.fileno(), on_readable)
    with contextlib.suppress(OSError):
        connection.send(READY)


class HandOver:
    """The side that serves. `offer` gives what there is to hand over, or raises NotUsable to refuse.

    `begin` is called when the successor's workers are about to listen: it raises NotUsable when what was offered is no
    longer what serves. `failed` is called when a successor has gone. `done` is called with its pid when it serves.
    """

    def __init__(
        self,
        events: EventLoop,
        runtime_dir: Path,
        offer: Callable[[], tuple[KeptServer, Sequence[int]]],
        begin: Callable[[], None],
        failed: Callable[[], None],
        done: Callable[[int], None],
    ) -> None:
        self._events = events
        self._offer = offer
        self._begin = begin
        self._failed = failed
        self._done = done
        self._successor: socket.socket | None = None
        self._pid = 0
        path = hand_over_socket(runtime_dir)
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(path))
        self._listener.listen(4)
        events.watch(self._listener.fileno(), self._accept)

    @property
    def busy(self) -> bool:
        """A successor prepares, or is about to serve."""
        return self._successor is not None

    def close(self) -> None:
        """Listen no more; the path belongs to the successor by now."""
        self._events.unwatch(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            self._events.watch(connection.fileno(), lambda: self._on_readable(connection))

    def _on_readable(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_BUFFER_BYTES)
        except OSError:
            data = b""
        if not data:
            self._forget(connection)
        elif connection is not self._successor:
            self._on_request(connection, data)
        elif data == READY:
            self._on_ready(connection)
        elif data == SERVING:
            # It has all: whatever becomes of this connection means nothing any more.
            self._successor = None
            self._forget(connection)
            self._done(self._pid)

    def _forget(self, connection: socket.socket) -> None:
        self._events.unwatch(connection.fileno())
        connection.close()
        if connection is self._successor:
            self._successor = None
            log.warning("pid %d, which was to take over, is gone; this server goes on", self._pid)
            self._failed()

    def _on_request(self, connection: socket.socket, data: bytes) -> None:
        try:
            asked = json.loads(data)
            pid, version = int(asked["pid"]), str(asked["version"])
            if self._successor is not None:
                raise NotUsable(f"pid {self._pid} prepares to take over already")
            kept, descriptors = self._offer()
            socket.send_fds(connection, [kept.to_json().encode()], list(descriptors))
        except (ValueError, KeyError, TypeError, OSError) as error:
            log.warning("handed nothing over: %s", error)
            with contextlib.suppress(OSError):
                connection.send(str(error).encode())
            self._forget(connection)
            return
        log.info("pid %d, version %s, prepares to take over", pid, version)
        self._successor, self._pid = connection, pid

    def _on_ready(self, connection: socket.socket) -> None:
        try:
            self._begin()
        except NotUsable as error:
            log.warning("pid %d does not take over: %s", self._pid, error)
            with contextlib.suppress(OSError):
                connection.send(str(error).encode())
            self._successor = None
            self._forget(connection)
            return
        log.info("pid %d is about to take over", self._pid)
        with contextlib.suppress(OSError):
            connection.send(GO)
