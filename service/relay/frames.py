"""What siblings say to each other: frames of a length and a pickled list of messages.

Pickle, because both ends are the same program and the socket lies in a folder that only its user may enter.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from service.engine.request import EngineRequest, RequestOutput, WorkerIdentity

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Hello:
    """First words of the worker that runs requests: who it is."""

    identity: WorkerIdentity


@dataclass(frozen=True, slots=True)
class Submit:
    """Run this request; `number` names it on this connection."""

    number: int
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants its outputs any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Output:
    """What a step added to a request."""

    number: int
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has ended with an error; nothing more of it will come."""

    number: int
    error: Exception


Message = Hello | Submit | Cancel | Output | Failed


def encode(messages: Sequence[Message]) -> bytes:
    """One frame."""
    body = pickle.dumps(list(messages), protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Puts frames together again from pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages of all frames that are complete with `data`."""
        self._buffer += data
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages += pickle.loads(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]
        return messages
