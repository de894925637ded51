"""The receiving end of the relay: runs what siblings hand over, on this worker's own engine."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from pathlib import Path
from typing import cast

from service.engine.async_engine import AsyncEngine, EngineUnavailable
from service.engine.request import EngineRequest, QueueFull, RequestRejected, WorkerIdentity
from service.relay.frames import Cancel, Failed, FrameReader, Hello, Message, Output, Submit, encode

log = logging.getLogger("numaserve.relay")


class RelayServer:
    """Listens on a unix socket and runs requests on `engine` until it is drained."""

    def __init__(self, engine: AsyncEngine, identity: WorkerIdentity) -> None:
        self.engine = engine
        self.identity = identity
        self.draining = False
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task] = set()
        self._server: asyncio.Server | None = None

    async def start(self, path: str) -> None:
        """Listen on `path`; a socket that a killed predecessor left there is replaced."""
        Path(path).unlink(missing_ok=True)
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Connection(self), path)

    async def drain(self, grace: float) -> None:
        """Refuse new requests; running ones get `grace` seconds, then end as unavailable. Closes every connection."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=grace)
            for task in late:
                task.cancel()
        for connection in list(self._connections):
            connection.close()

    def opened(self, connection: _Connection) -> None:
        """A sibling has connected."""
        self._connections.add(connection)

    def closed(self, connection: _Connection) -> None:
        """A sibling is gone."""
        self._connections.discard(connection)

    def run(self, connection: _Connection, number: int, request: EngineRequest) -> asyncio.Task:
        """Start a request for a sibling."""
        task = asyncio.ensure_future(self._generate(connection, number, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: connection.ended(number))
        return task

    async def _generate(self, connection: _Connection, number: int, request: EngineRequest) -> None:
        try:
            if self.draining:
                raise EngineUnavailable("the worker is draining")
            async with aclosing(self.engine.generate(request)) as outputs:
                async for output in outputs:
                    # Outputs that a slow sibling does not take are merged by the engine meanwhile.
                    await connection.writable.wait()
                    connection.send(Output(number, output))
        except (RequestRejected, QueueFull, EngineUnavailable) as error:
            connection.send(Failed(number, error))
        except Exception as error:
            log.exception("request %r, relayed by a sibling, failed", request.request_id)
            connection.send(Failed(number, RuntimeError(str(error))))


class _Connection(asyncio.Protocol):
    """One sibling's connection."""

    def __init__(self, server: RelayServer) -> None:
        self.writable = asyncio.Event()
        self._server = server
        self._reader = FrameReader()
        self._running: dict[int, asyncio.Task] = {}
        self._outgoing: list[Message] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.writable.set()
        self._server.opened(self)
        self.send(Hello(self._server.identity))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._server.closed(self)
        for task in self._running.values():
            task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            match message:
                case Submit(number=number, request=request):
                    self._running[number] = self._server.run(self, number, request)
                case Cancel(number=number):
                    if (running := self._running.get(number)) is not None:
                        running.cancel()

    def ended(self, number: int) -> None:
        """A request has ended, in whatever way."""
        del self._running[number]

    def send(self, message: Message) -> None:
        """Send soon: what all streams of one engine step have to say leaves in one frame."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(message)

    def close(self) -> None:
        """Send what is left and close."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._transport is not None:
            self._transport.write(encode(outgoing))
