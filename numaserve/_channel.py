"""Where a client connects to, and with which channel options."""

from __future__ import annotations

import json
import socket

DEFAULT_ADDRESS = "localhost:50051"
DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
DEFAULT_KEEPALIVE_SECONDS = 30.0

# A call that got no answer yet is safe to send again: nothing of it was seen. gRPC does so by itself, on another
# connection if need be, and stops as soon as the first part has come (gRPC proposal A6). CANCELLED is what gRPC's server
# says to a call that arrives while it leaves; a call that the client itself cancels is not sent again.
_RETRIES = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{"service": "numaserve.v1.Inference"}],
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 3,
                    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
                },
            }
        ]
    }
)


def channel_target(address: str) -> str:
    """gRPC's name for `address`, which may list several servers as "host:port,host:port".

    One address stays as it is ("host:port", "unix:/path" or any gRPC target). Several are resolved now, to
    literal addresses of one family, as gRPC has no other static list. Raises ValueError naming what is wrong.
    """
    parts = [part.strip() for part in address.split(",") if part.strip()]
    if not parts:
        raise ValueError("address is empty")
    if len(parts) == 1 or parts[0].startswith(("ipv4:", "ipv6:")):
        return ",".join(parts)
    resolved: dict[socket.AddressFamily, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    reachable = dict.fromkeys(resolved, 0)
    for part in parts:
        found = _resolve(part)
        for family, literals in found.items():
            resolved[family].extend(literals)
            reachable[family] += 1
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        if reachable[family] == len(parts):
            return f"{scheme}:{','.join(dict.fromkeys(resolved[family]))}"
    raise ValueError(f"address {address!r}: the servers have no address family in common")


def channel_options(
    target: str, keepalive_seconds: float | None, max_message_bytes: int
) -> list[tuple[str, int | str]]:
    """Options for a channel to `target`; `keepalive_seconds` None sends no pings. Calls without an answer are retried."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.service_config", _RETRIES),
    ]
    if keepalive_seconds is not None:
        options += [
            ("grpc.keepalive_time_ms", round(keepalive_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    if "," in target:
        options.append(("grpc.lb_policy_name", "round_robin"))
    return options


def _resolve(part: str) -> dict[socket.AddressFamily, list[str]]:
    host, colon, port = part.rpartition(":")
    if not colon or not port.isdigit() or part.startswith("unix:"):
        raise ValueError(f"address {part!r} must be host:port when several are given")
    try:
        entries = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"address {part!r}: {error}") from error
    found: dict[socket.AddressFamily, list[str]] = {}
    for family, _, _, _, location in entries:
        if family == socket.AF_INET:
            found.setdefault(family, []).append(f"{location[0]}:{port}")
        elif family == socket.AF_INET6:
            found.setdefault(family, []).append(f"[{location[0]}]:{port}")
    return found
