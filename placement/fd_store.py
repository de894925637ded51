"""systemd's side of a restart: readiness and status by sd_notify(3), and segments kept in its descriptor store.

Sources: sd_notify(3), sd_listen_fds(3), systemd.service(5) on FileDescriptorStoreMax=. No library is needed for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence

from placement.kept_server import Inheritance, KeptServer, NotUsable

log = logging.getLogger("numaserve.launcher")

_FIRST_DESCRIPTOR = 3
_STATE = "numaserve-state-"
_PORT = "numaserve-port-"
_SEGMENT = "numaserve-segment-"


class Notifier:
    """Talks to whoever started this process with NOTIFY_SOCKET; does nothing without it."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._stored: list[str] = []

    def tell(self, *assignments: str, descriptors: Sequence[int] = ()) -> None:
        """Send assignments such as "READY=1"; what nobody receives is lost."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.connect(self._address)
            socket.send_fds(sender, ["\n".join(assignments).encode()], list(descriptors))

    def assume(self, kept: KeptServer) -> None:
        """What another launcher stored for this server is to be dropped by the next `keep`."""
        self._stored = sorted({*self._stored, *_names(kept)})

    def keep(self, kept: KeptServer, port: int, segments: Sequence[int]) -> None:
        """Store what a successor needs, then drop what was stored before: at any time one whole set is there."""
        if not self._address:
            return
        before, names = self._stored, _names(kept)
        document = os.memfd_create("numaserve-state", os.MFD_CLOEXEC)
        os.write(document, kept.to_json().encode())
        for name, descriptor in zip(names, [*segments, port, document], strict=True):
            # What lies in the store has no end-of-file that could be waited for.
            self.tell("FDSTORE=1", "FDPOLL=0", f"FDNAME={name}", descriptors=[descriptor])
        os.close(document)
        self.forget(before)
        self._stored = names

    def forget(self, names: Sequence[str]) -> None:
        """Drop descriptors from the store by name."""
        for name in names:
            self.tell("FDSTOREREMOVE=1", f"FDNAME={name}")

    def inherit(self, environment: dict[str, str]) -> Inheritance | None:
        """What lies in the store, None when nothing does. Raises NotUsable for a set that is not whole.

        Takes LISTEN_* out of `environment`: children have nothing to do with them.
        """
        given = _listen_descriptors(environment)
        self._stored = [name for name in given if name.startswith("numaserve-")]
        generations = sorted(
            int(match[1]) for name in given if (match := re.fullmatch(re.escape(_STATE) + r"(\d+)", name))
        )
        if not generations:
            return None
        newest = generations[-1]
        state = given[f"{_STATE}{newest}"]
        kept = KeptServer.from_json(os.pread(state, os.fstat(state).st_size, 0).decode())
        if missing := [name for name in _names(kept) if name not in given]:
            raise NotUsable(f"the descriptor store lacks {', '.join(missing)}")
        names = _names(kept)[: len(kept.segments)]
        holder = socket.socket(fileno=given.pop(f"{_PORT}{newest}"))
        segments = [given.pop(name) for name in names]
        for name, descriptor in given.items():
            if name.startswith("numaserve-"):
                os.close(descriptor)
        return Inheritance(kept, segments, holder)


def _names(kept: KeptServer) -> list[str]:
    """Of the segments, the port and the document, in that order: a document is stored when all else is."""
    generation = kept.generation
    segments = [f"{_SEGMENT}{generation}-{number}" for number in range(len(kept.segments))]
    return [*segments, f"{_PORT}{generation}", f"{_STATE}{generation}"]


def _listen_descriptors(environment: dict[str, str]) -> dict[str, int]:
    """Descriptors passed at the start, by name."""
    pid, count = environment.pop("LISTEN_PID", ""), environment.pop("LISTEN_FDS", "")
    names = environment.pop("LISTEN_FDNAMES", "")
    environment.pop("LISTEN_PIDFDID", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return {}
    descriptors = range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count))
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return dict(zip(names.split(":"), descriptors, strict=False))
