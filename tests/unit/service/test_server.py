"""Starting and stopping the gRPC server: addresses, sharing of a port, channel options, channelz."""

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from serving_fakes import FakeEngine, make_served_model

from numaserve import AsyncClient, InferenceError
from service.server import AddressInUse, ServerOptions, start_server


async def start(*addresses: str, **options):
    return await start_server(make_served_model(), FakeEngine(), addresses, ServerOptions(**options))


async def test_it_listens_on_every_address(tmp_path):
    server = await start("127.0.0.1:0", f"unix:{tmp_path}/worker.sock")
    assert server.addresses[1] == f"unix:{tmp_path}/worker.sock"
    for address in server.addresses:
        async with AsyncClient(address) as client:
            assert await client.health() == "SERVING"
            assert (await client.infer("hi")).text == "hello"
    await server.stop(0)


async def test_a_stale_socket_file_is_replaced(tmp_path):
    address = f"unix:{tmp_path}/worker.sock"
    first = await start(address)
    second = await start(address)
    async with AsyncClient(address) as client:
        assert await client.health() == "SERVING"
    await first.stop(0)
    await second.stop(0)


async def test_two_servers_share_a_port():
    first = await start("127.0.0.1:0")
    second = await start(first.addresses[0])
    assert second.addresses == first.addresses
    await first.stop(0)
    async with AsyncClient(first.addresses[0]) as client:
        assert await client.health() == "SERVING"
    await second.stop(0)


async def test_a_port_in_use_is_named():
    first = await start("127.0.0.1:0", reuse_port=False)
    with pytest.raises(AddressInUse, match=first.addresses[0]):
        await start(first.addresses[0])
    await first.stop(0)


async def test_a_stopped_server_answers_no_more():
    server = await start("127.0.0.1:0")
    async with AsyncClient(server.addresses[0], timeout=60) as client:
        await client.health()
        await server.stop(grace=3600)
        with pytest.raises(InferenceError) as caught:
            await client.infer("hi")
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    await server.wait_for_termination()


async def test_stopping_twice_is_harmless():
    server = await start("127.0.0.1:0")
    await server.stop(1)
    await server.stop(1)
    assert server.addresses


@pytest.mark.parametrize(("wanted", "found"), [(True, True), (False, False)])
async def test_channelz_is_a_choice(wanted, found):
    server = await start("127.0.0.1:0", channelz=wanted)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        call = channelz_pb2_grpc.ChannelzStub(channel).GetServers(channelz_pb2.GetServersRequest())
        if found:
            assert len((await call).server) >= 1
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(0)


def test_pings_of_ten_seconds_are_accepted_without_calls():
    arguments = dict(ServerOptions().channel_arguments())
    assert arguments["grpc.http2.min_ping_interval_without_data_ms"] < 10_000
    assert arguments["grpc.keepalive_permit_without_calls"] == 1
    assert arguments["grpc.http2.max_ping_strikes"] > 0
    assert "grpc.max_connection_age_ms" not in arguments


async def test_pings_above_the_interval_do_no_harm_where_those_below_it_end_the_connection():
    servers, calls = [], []
    for interval in (0.02, 5.0):
        engine = FakeEngine()
        engine.hold = True
        server = await start_server(
            make_served_model(), engine, ["127.0.0.1:0"], ServerOptions(min_ping_interval_seconds=interval)
        )
        client = AsyncClient(server.addresses[0], keepalive_seconds=0.1)
        parts = client.stream("hi")
        await anext(parts)
        servers.append(server)
        calls.append((client, engine, parts))
    patient, strict = calls
    with pytest.raises(InferenceError) as caught:
        await anext(strict[2])
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert "ping" in caught.value.details
    patient[1].resume()
    assert "".join([part.text async for part in patient[2]]) == "ello"
    for (client, _, _), server in zip(calls, servers, strict=True):
        await client.close()
        await server.stop(0)
