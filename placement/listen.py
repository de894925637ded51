"""The shared TCP port: checked and held by the launcher, listened on by every worker. Source: socket(7) on SO_REUSEPORT."""

from __future__ import annotations

import errno
import socket


class PortUnavailable(OSError):
    """The address cannot be listened on; the message names it and says why."""


def _bound(family: int, address: tuple[str, int], reuse_port: bool) -> socket.socket:
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        holder.bind(address)
    except OSError:
        holder.close()
        raise
    return holder


def reserve_port(host: str, port: int) -> socket.socket:
    """Hold `host:port` without listening, so that workers can share it and nobody else takes it; port 0 picks a free one.

    A stranger that listens with SO_REUSEPORT would silently take part of the connections, so the port is first bound
    without that option, which fails while anybody listens. Raises PortUnavailable.
    """
    try:
        family, _, _, _, resolved = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        address = (str(resolved[0]), port)
        probe = _bound(family, address, reuse_port=False)
        address = (address[0], probe.getsockname()[1])
        probe.close()
        return _bound(family, address, reuse_port=True)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortUnavailable(
                error.errno, f"--port {port}: another process listens on {host}:{port}"
            ) from error
        if error.errno == errno.EACCES:
            raise PortUnavailable(error.errno, f"--port {port}: this user may not listen on it") from error
        raise PortUnavailable(error.errno or 0, f"--host {host}: {error.strerror or error}") from error


def check_free(host: str, port: int, flag: str) -> None:
    """Raises PortUnavailable, naming the flag, where nobody could listen on `host:port` now."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        _bound(family, (host, port), reuse_port=False).close()
    except OSError as error:
        raise PortUnavailable(error.errno or 0, f"{flag} {port}: {error.strerror or error}") from error


def format_address(host: str, port: int) -> str:
    """`host:port` as gRPC takes it, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
