"""Constant load of several kinds on a server, in threads, that notes every fault: for tests that change it meanwhile."""

from __future__ import annotations

import itertools
import socket
import threading
from types import TracebackType

import numaserve

PROMPTS = [f"{number} times the fox" for number in range(4)]
FIELDS = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}

# Between two requests of a thread: what changes meanwhile is to get some CPU time as well.
_PAUSE_SECONDS = 0.3
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


class ConstantLoad:
    """Streams over kept connections, calls over new ones, and bare connections that must see the server's preface.

    `expected` holds the right tokens of each of PROMPTS; without it any answer is right.
    """

    def __init__(self, address: str, expected: list[list[int]] | None = None) -> None:
        self.address = address
        self.expected = expected
        self.faults: list[str] = []
        self.answers = itertools.count()
        self._stop = threading.Event()
        work = [
            *(lambda n=n: self._stream(n) for n in range(len(PROMPTS))),
            self._connect_and_call,
            self._connect_alone,
        ]
        self._threads = [threading.Thread(target=one) for one in work]

    def __enter__(self) -> ConstantLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"

    def _client(self) -> numaserve.Client:
        # A subchannel pool of its own makes each client connect anew.
        return numaserve.Client(self.address, timeout=120, options=[("grpc.use_local_subchannel_pool", 1)])

    def _stream(self, number: int) -> None:
        with self._client() as client:
            while not self._stop.wait(_PAUSE_SECONDS):
                tokens: list[int] = []
                try:
                    for part in client.stream(PROMPTS[number], **FIELDS):
                        tokens += part.token_ids
                except numaserve.InferenceError as error:
                    self.faults.append(f"stream {number}, after {len(tokens)} tokens: {error}")
                    continue
                next(self.answers)
                if len(tokens) != FIELDS["max_tokens"]:
                    self.faults.append(f"stream {number}: {len(tokens)} tokens")
                elif self.expected is not None and tokens != self.expected[number]:
                    self.faults.append(f"stream {number}: wrong tokens")

    def _connect_and_call(self) -> None:
        while not self._stop.wait(_PAUSE_SECONDS):
            try:
                with self._client() as client:
                    client.infer("hello", max_tokens=1)
                next(self.answers)
            except numaserve.InferenceError as error:
                self.faults.append(f"call over a new connection: {error}")

    def _connect_alone(self) -> None:
        host, _, port = self.address.rpartition(":")
        while not self._stop.wait(_PAUSE_SECONDS):
            try:
                with socket.create_connection((host, int(port)), 60) as connection:
                    connection.sendall(_PREFACE)
                    assert connection.recv(9)
                next(self.answers)
            except (OSError, AssertionError) as error:
                self.faults.append(f"bare connection: {error!r}")


def answers_of(client: numaserve.Client) -> list[list[int]]:
    """The right tokens of each of PROMPTS."""
    return [list(client.infer(prompt, **FIELDS).token_ids) for prompt in PROMPTS]
