"""The two clients against a server over a fake engine."""

import asyncio
import json
import subprocess
import sys
from contextlib import aclosing

import grpc
import pytest
from serving_fakes import FakeEngine, make_served_model

import numaserve
from numaserve import Client, InferenceError
from numaserve._channel import channel_options, channel_target
from numaserve._fields import infer_request
from numaserve.v1 import inference_pb2
from service.server import start_server


@pytest.fixture
def sync_client(server):
    with Client(server.addresses[0], timeout=60) as connected:
        yield connected


async def in_thread(function, *args, **kwargs):
    """Run the blocking client beside the server's event loop."""
    return await asyncio.to_thread(function, *args, **kwargs)


async def test_the_blocking_client_has_every_call(sync_client):
    answer = await in_thread(sync_client.infer, "hi", max_tokens=3, seed=5)
    assert answer.text == "hel"
    parts = await in_thread(lambda: list(sync_client.stream(messages=[("user", "hi")])))
    assert "".join(part.text for part in parts) == "hello"
    assert list((await in_thread(sync_client.tokenize, "a")).token_ids) == [1, 97]
    assert (await in_thread(sync_client.model_info)).model == "tiny"
    assert await in_thread(sync_client.health) == "SERVING"


async def test_closing_a_blocking_stream_cancels_the_call(sync_client, engine):
    engine.hold = True
    parts = sync_client.stream("hi", request_id="r-1")
    assert (await in_thread(next, parts)).text == "h"
    await in_thread(parts.close)
    assert await engine.ended.get() == ("r-1", False)


async def test_dropping_a_stream_cancels_the_call(client, engine):
    engine.hold = True

    async def read_one():
        async for part in client.stream("hi", request_id="r-1"):
            return part.text
        return None

    assert await read_one() == "h"
    assert await engine.ended.get() == ("r-1", False)


async def test_errors_carry_their_details(sync_client):
    with pytest.raises(InferenceError) as caught:
        await in_thread(sync_client.infer, "hi", max_tokens=0)
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [(violation.field, violation.description) for violation in error.field_violations] == [
        ("max_tokens", "is 0, must be 1 or more")
    ]
    assert error.retry_delay is None
    assert str(error) == "INVALID_ARGUMENT: max_tokens: is 0, must be 1 or more"


async def test_a_stream_raises_the_same_error(sync_client):
    with pytest.raises(InferenceError) as caught:
        await in_thread(lambda: list(sync_client.stream("hi", top_p=3.0)))
    assert caught.value.field_violations[0].field == "top_p"


async def test_the_clients_timeout_is_each_calls_deadline(server, engine):
    engine.hold = True
    async with numaserve.AsyncClient(server.addresses[0], timeout=0.2) as client:
        with pytest.raises(InferenceError) as caught:
            await client.infer("hi")
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_health_of_an_unknown_service(client):
    with pytest.raises(InferenceError) as caught:
        await client.health("some.Other")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_waiting_ends_when_the_server_serves(server, client, sync_client):
    server.health.set_not_serving()
    waiting = [asyncio.create_task(client.wait_until_serving(60))]
    waiting.append(asyncio.create_task(in_thread(sync_client.wait_until_serving, 60)))
    assert await client.health() == "NOT_SERVING"
    assert not waiting[0].done()
    server.health.set_serving()
    await asyncio.gather(*waiting)


async def test_waiting_gives_up(tmp_path):
    async with numaserve.AsyncClient(f"unix:{tmp_path}/nobody.sock") as client:
        with pytest.raises(InferenceError) as caught:
            await client.wait_until_serving(0.1)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_several_addresses_are_used_in_turn():
    engines = [FakeEngine(), FakeEngine()]
    servers = [await start_server(make_served_model(), engine, ["127.0.0.1:0"]) for engine in engines]
    address = ",".join(server.addresses[0] for server in servers)
    async with numaserve.AsyncClient(address, timeout=60) as client:
        while not all(engine.requests for engine in engines):
            await client.infer("hi")
        before = [len(engine.requests) for engine in engines]
        for _ in range(10):
            await client.infer("hi")
        after = [len(engine.requests) for engine in engines]
    assert [late - early for early, late in zip(before, after, strict=True)] == [5, 5]
    for server in servers:
        await server.stop(0)


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("localhost:50051", "localhost:50051"),
        ("unix:/run/n.sock", "unix:/run/n.sock"),
        ("dns:///models:50051", "dns:///models:50051"),
        ("127.0.0.1:1, 127.0.0.2:2", "ipv4:127.0.0.1:1,127.0.0.2:2"),
        ("[::1]:1,[::2]:2", "ipv6:[::1]:1,[::2]:2"),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", "ipv4:127.0.0.1:1,127.0.0.1:2"),
    ],
)
def test_addresses_become_targets(address, target):
    assert channel_target(address) == target


@pytest.mark.parametrize("address", ["", " , ", "a,b", "127.0.0.1:1,[::1]:1", "127.0.0.1:1,unix:/x:1"])
def test_bad_addresses_are_refused(address):
    with pytest.raises(ValueError, match="address"):
        channel_target(address)


def test_channel_options():
    options = dict(channel_options("a:1", 30, 1000))
    assert options["grpc.keepalive_time_ms"] == 30_000
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 1000
    assert "grpc.lb_policy_name" not in options
    assert "grpc.keepalive_time_ms" not in dict(channel_options("a:1", None, 1000))
    assert dict(channel_options("ipv4:a:1,b:2", None, 1))["grpc.lb_policy_name"] == "round_robin"


@pytest.mark.parametrize(
    "message",
    [
        ("user", "hi"),
        {"role": "user", "content": "hi"},
        inference_pb2.ChatMessage(role="user", content="hi"),
    ],
)
def test_messages_come_in_any_form(message):
    request = infer_request({"messages": [message], "prompt": None})
    assert [(each.role, each.content) for each in request.messages] == [("user", "hi")]
    assert not request.prompt


def test_structured_output_and_stop_come_in_plain_types():
    request = infer_request({"structured_output": {"json_schema": {"type": "object"}}, "stop": "end"})
    assert json.loads(request.structured_output.json_schema) == {"type": "object"}
    assert list(request.stop) == ["end"]
    request = infer_request({"structured_output": {"choice": ["yes", "no"]}, "stop": ["a", "b"]})
    assert list(request.structured_output.choice.choices) == ["yes", "no"]
    assert list(request.stop) == ["a", "b"]


def test_an_unknown_field_is_named():
    with pytest.raises(TypeError, match="max_new_tokens"):
        infer_request({"prompt": "hi", "max_new_tokens": 4})


def test_bad_fields_fail_before_the_stream_is_read():
    with Client("localhost:1") as client, pytest.raises(TypeError, match="colour"):
        client.stream("hi", colour="red")


async def test_a_stream_can_be_left_and_the_client_used_on(client, engine):
    engine.hold = True
    async with aclosing(client.stream("hi")) as parts:
        await anext(parts)
    engine.hold = False
    assert (await client.infer("hi")).text == "hello"


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import numaserve; numaserve.Client; numaserve.aio", ["torch", "service", "placement", "numpy"]),
        ("import numaserve", ["torch", "grpc", "service"]),
        ("import numaserve.v1.inference_pb2_grpc", ["torch", "service", "numaserve.client"]),
        ("import service.cli.chat", ["torch", "grpc", "numpy"]),
    ],
)
def test_imports_stay_light(code, absent):
    program = f"import sys\n{code}\nprint([name for name in {absent!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
