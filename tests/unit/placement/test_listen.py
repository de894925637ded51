"""The shared port: held, shareable by our own workers, and never shared with a stranger."""

import socket

import pytest

from placement.listen import PortUnavailable, format_address, reserve_port


def listener(port: int, reuse_port: bool) -> socket.socket:
    other = socket.socket()
    if reuse_port:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    other.bind(("127.0.0.1", port))
    other.listen()
    return other


def test_port_zero_takes_a_free_port_that_workers_can_then_share() -> None:
    holder = reserve_port("127.0.0.1", 0)
    port = holder.getsockname()[1]
    workers = [listener(port, reuse_port=True) for _ in range(2)]
    for _ in range(8):
        socket.create_connection(("127.0.0.1", port)).close()
    accepted = 0
    for worker in workers:
        worker.setblocking(False)
        try:
            while True:
                worker.accept()[0].close()
                accepted += 1
        except BlockingIOError:
            continue
    assert accepted == 8


@pytest.mark.parametrize("reuse_port", [False, True], ids=["plain stranger", "stranger with SO_REUSEPORT"])
def test_a_port_that_a_stranger_listens_on_is_refused(reuse_port: bool) -> None:
    stranger = listener(0, reuse_port)
    port = stranger.getsockname()[1]
    with pytest.raises(PortUnavailable, match=rf"--port {port}: another process listens on 127.0.0.1:{port}"):
        reserve_port("127.0.0.1", port)


def test_an_address_that_is_not_ours_names_the_flag() -> None:
    with pytest.raises(PortUnavailable, match=r"--host 203\.0\.113\.1"):
        reserve_port("203.0.113.1", 0)


@pytest.mark.parametrize(("host", "text"), [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5")])
def test_addresses_as_grpc_takes_them(host: str, text: str) -> None:
    assert format_address(host, 5) == text
