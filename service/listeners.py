"""Leaving a shared port without resetting anybody: closing a listening socket resets what waits in its accept queue.

gRPC's Python server makes its listening sockets itself and takes none from outside, so a queue cannot be handed over.
Instead a socket filter drops new SYNs first: clients send them again after a second, and by then the kernel gives them
to another listener of the SO_REUSEPORT group. Sources: socket(7) on SO_ATTACH_FILTER, tcp(7) on TCP_INFO, RFC 6298 on the
second.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import time
from collections.abc import Collection, Iterator

# From asm-generic/socket.h; Python's socket module has no name for it.
_SO_ATTACH_FILTER = 26
# For a listening socket, `tcpi_unacked` of struct tcp_info is the length of its accept queue (tcp_get_info in the kernel).
_TCPI_UNACKED = struct.Struct("24xI")
# Handshakes that had begun are through by then, and what was accepted has become a connection.
_SETTLE_SECONDS = 0.3
_LONGEST_SECONDS = 2.0
_POLL_SECONDS = 0.02

# Classic BPF over the TCP header: load its flags, keep SYN and ACK, and drop the segment if SYN alone is set.
_DROP_SYN = (
    (0x30, 0, 0, 13),
    (0x54, 0, 0, 0x12),
    (0x15, 0, 1, 0x02),
    (0x06, 0, 0, 0),
    (0x06, 0, 0, 0xFFFFFFFF),
)


@contextlib.contextmanager
def listening_sockets(ports: Collection[int]) -> Iterator[list[socket.socket]]:
    """This process's sockets that listen on some TCP ports, as duplicates that are closed afterwards."""
    found, seen = [], set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            # A duplicate made here may bear a number that the list names.
            if not target.startswith("socket:") or target in seen:
                continue
            seen.add(target)
            candidate = socket.socket(fileno=os.dup(int(name)))
            if _listens(candidate, ports):
                found.append(candidate)
            else:
                candidate.close()
    try:
        yield found
    finally:
        for duplicate in found:
            duplicate.close()


def _listens(candidate: socket.socket, ports: Collection[int]) -> bool:
    if candidate.family not in (socket.AF_INET, socket.AF_INET6) or candidate.type != socket.SOCK_STREAM:
        return False
    is_listening = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(is_listening) and candidate.getsockname()[1] in ports


def refuse_connections(listener: socket.socket) -> None:
    """Let no further connection begin on a listening socket; those that have begun go on."""
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _DROP_SYN))
    description = struct.pack("HP", len(_DROP_SYN), ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, description)


def accept_queue_length(listener: socket.socket) -> int:
    """Connections that are complete and not accepted yet."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCPI_UNACKED.size)
    return int(_TCPI_UNACKED.unpack(info)[0])


async def leave_ports(ports: Collection[int]) -> None:
    """Return once this process's listening sockets on `ports` can be closed without resetting a connection."""
    with listening_sockets(ports) as listeners:
        for listener in listeners:
            refuse_connections(listener)
        began = time.monotonic()
        while time.monotonic() - began < _LONGEST_SECONDS:
            settled = time.monotonic() - began >= _SETTLE_SECONDS
            if settled and not any(map(accept_queue_length, listeners)):
                return
            await asyncio.sleep(_POLL_SECONDS)
