"""The sending end of the relay: one sibling, as an engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import cast

from service.engine.async_engine import EngineUnavailable
from service.engine.output_stream import OutputStream
from service.engine.request import EngineRequest, RequestOutput, WorkerIdentity
from service.relay.frames import Cancel, Failed, FrameReader, Hello, Message, Output, Submit, encode


class Peer:
    """A sibling, reached through its relay socket: connected when first needed, and again after a loss."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._numbers = itertools.count()
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        """As `AsyncEngine.generate`, run by the sibling. EngineUnavailable also when it cannot be reached or dies."""
        connection = await self._connected()
        number = next(self._numbers)
        stream = OutputStream(request.request_id)
        connection.streams[number] = stream
        finished = False
        try:
            connection.send(Submit(number, request))
            while not finished:
                output = await stream.take()
                output.served_by = connection.identity
                finished = output.request_finished
                yield output
        finally:
            del connection.streams[number]
            if not finished and stream.error is None:
                connection.send(Cancel(number))

    def close(self) -> None:
        """Close the connection; requests that run over it end as unavailable."""
        if self._connection is not None:
            self._connection.close()

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._connection is None or self._connection.lost:
                loop = asyncio.get_running_loop()
                try:
                    _, self._connection = await loop.create_unix_connection(_Connection, self._path)
                except OSError as error:
                    raise EngineUnavailable(f"a worker cannot be reached: {error}") from error
            return self._connection


class _Connection(asyncio.Protocol):
    """One connection to the sibling and the streams that run over it."""

    def __init__(self) -> None:
        self.streams: dict[int, OutputStream] = {}
        self.identity: WorkerIdentity | None = None
        self.lost = False
        self._reader = FrameReader()
        self._outgoing: list[Message] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.lost = True
        self._transport = None
        name = f"worker {self.identity.worker}" if self.identity is not None else "the worker"
        for stream in self.streams.values():
            stream.fail(EngineUnavailable(f"{name} ended before the answer was complete"))

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            match message:
                case Output(number=number, output=output):
                    if (stream := self.streams.get(number)) is not None:
                        stream.put(output)
                case Failed(number=number, error=error):
                    if (stream := self.streams.get(number)) is not None:
                        stream.fail(error)
                case Hello(identity=identity):
                    self.identity = identity

    def send(self, message: Message) -> None:
        """Send soon, together with all else that the event loop finds to send in this turn."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(message)

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._transport is not None:
            self._transport.write(encode(outgoing))
