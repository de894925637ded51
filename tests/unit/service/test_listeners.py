"""Leaving a port that others listen on as well."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Iterator

import pytest

from service.listeners import accept_queue_length, leave_ports, listening_sockets, refuse_connections


def listen(port: int = 0, address: str = "127.0.0.1") -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((address, port))
    listener.listen(64)
    return listener


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen() as made:
        yield made


def begin_to_connect(port: int) -> socket.socket:
    client = socket.socket()
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", port))
    return client


def connected(clients: list[socket.socket], timeout: float) -> list[socket.socket]:
    return select.select([], clients, [], timeout)[1]


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_only_listeners_on_the_port_are_found(listener: socket.socket, address: str) -> None:
    with listen(address=address) as other:
        port = other.getsockname()[1]
        with listening_sockets([port]) as found, socket.create_connection(("127.0.0.1", port)):
            assert [each.getsockname() for each in found] == [other.getsockname()]
            assert found[0].fileno() != other.fileno()
        with listening_sockets([listener.getsockname()[1]]) as found:
            assert len(found) == 1


def test_a_refusing_listener_keeps_its_queue_and_takes_no_more(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    early = socket.create_connection(("127.0.0.1", port))
    assert accept_queue_length(listener) == 1
    refuse_connections(listener)
    late = begin_to_connect(port)
    assert connected([late], 0.2) == []
    accepted, _ = listener.accept()
    early.sendall(b"still here")
    assert accepted.recv(100) == b"still here"
    assert accept_queue_length(listener) == 0
    for each in (early, late, accepted):
        each.close()


async def test_connects_move_to_another_listener_and_none_is_reset(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    early = [begin_to_connect(port) for _ in range(8)]
    with listen(port) as successor:
        leaving = asyncio.create_task(leave_ports([port]))
        await asyncio.sleep(0)
        # Its sockets are found by the port, so in this process the successor's is among them: it is made anew.
        successor.close()
        with listen(port) as fresh:
            late = [begin_to_connect(port) for _ in range(16)]
            accepted = [listener.accept()[0] for _ in early]
            await leaving
            listener.close()
            while len(connected(late, 5)) < len(late):
                pass
            served = [*accepted, *(fresh.accept()[0] for _ in late)]
            for client in [*early, *late]:
                client.setblocking(True)
                client.sendall(b"x")
            assert [each.recv(1) for each in served] == [b"x"] * 24
            for each in [*early, *late, *served]:
                each.close()
