"""grpc.health.v1: Check by name, and a Watch that stays open and tells every change to every watcher."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NAMES = ["", "numaserve.v1.Inference"]


@pytest.fixture
async def stub(server):
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def request_for(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.parametrize("name", NAMES)
async def test_check_follows_the_state(stub, server, name):
    assert (await stub.Check(request_for(name))).status == SERVING
    server.health.set_not_serving()
    assert (await stub.Check(request_for(name))).status == NOT_SERVING


async def test_check_of_an_unknown_service_is_not_found(stub):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(request_for("some.Other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_every_watcher_learns_every_change(stub, server):
    watches = [stub.Watch(request_for(NAMES[number % 2])) for number in range(20)]
    for change, status in (
        (lambda: None, SERVING),
        (server.health.set_not_serving, NOT_SERVING),
        (server.health.set_serving, SERVING),
    ):
        change()
        answers = await asyncio.gather(*(watch.read() for watch in watches))
        assert [answer.status for answer in answers] == [status] * 20
    assert not any(watch.done() for watch in watches)
    for watch in watches:
        watch.cancel()


async def test_a_watch_of_an_unknown_service_stays_open(stub, server):
    watch = stub.Watch(request_for("some.Other"))
    assert (await watch.read()).status == SERVICE_UNKNOWN
    server.health.set_not_serving()
    known = stub.Watch(request_for(""))
    assert (await known.read()).status == NOT_SERVING
    assert not watch.done()
    watch.cancel()


async def test_a_watcher_that_leaves_is_forgotten(stub, server):
    watch = stub.Watch(request_for(""))
    await watch.read()
    assert len(server.health._watchers) == 1
    watch.cancel()
    while server.health._watchers:
        await asyncio.sleep(0)
    server.health.set_not_serving()
    assert (await stub.Check(request_for(""))).status == NOT_SERVING


async def test_watchers_do_not_hold_up_a_stop_and_see_it_coming(stub, server):
    watch = stub.Watch(request_for(""))
    assert (await watch.read()).status == SERVING
    await asyncio.wait_for(server.stop(grace=3600), 60)
    assert (await watch.read()).status == NOT_SERVING
    assert await watch.read() is grpc.aio.EOF
    assert await watch.code() is grpc.StatusCode.OK


async def test_a_watch_runs_beside_a_stream(stub, server, client, engine):
    engine.hold = True
    watch = stub.Watch(request_for(""))
    await watch.read()
    parts = client.stream("hi")
    await anext(parts)
    server.health.set_not_serving()
    assert (await watch.read()).status == NOT_SERVING
    engine.resume()
    assert "".join([part.text async for part in parts]) == "ello"
    watch.cancel()
