"""A server over a fake engine, in the test's own event loop, and a client of it."""

from collections.abc import AsyncIterator

import pytest
from serving_fakes import FakeEngine, make_served_model

from numaserve import AsyncClient
from service.server import RunningServer, ServerOptions, start_server


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def options() -> ServerOptions:
    return ServerOptions()


@pytest.fixture
async def server(engine: FakeEngine, options: ServerOptions) -> AsyncIterator[RunningServer]:
    running = await start_server(make_served_model(), engine, ["127.0.0.1:0"], options)
    yield running
    await running.stop(0)


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.addresses[0], timeout=60) as connected:
        yield connected
