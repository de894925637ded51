"""The Inference service over a fake engine: answers, errors, cancelling, draining."""

import asyncio
import logging
import threading
import time
from contextlib import aclosing

import grpc
import pytest
from serving_fakes import BOS, CONTEXT, VOCAB_SIZE, CharacterTokenizer, make_served_model

from numaserve import AsyncClient, InferenceError
from numaserve.v1 import inference_pb2, inference_pb2_grpc
from service.engine.async_engine import EngineUnavailable
from service.engine.request import QueueFull, RequestOutput, RequestRejected
from service.engine.sequence import AbortCause
from service.server import ServerOptions, start_server


async def failure(awaitable) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        await awaitable
    return caught.value


async def collect(parts) -> list[inference_pb2.InferStreamResponse]:
    return [part async for part in parts]


async def test_infer_answers_with_everything(client):
    answer = await client.infer(
        "hi", max_tokens=4, request_id="r-1", n=2, logprobs=2, prompt_logprobs=0, echo=True
    )
    assert (answer.request_id, answer.model, answer.text) == ("r-1", "tiny", "hihell")
    assert list(answer.token_ids) == list(map(ord, "hell"))
    assert answer.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert [(other.index, other.text) for other in answer.others] == [(1, "hihell")]
    assert [position.chosen.text for position in answer.logprobs] == list("hell")
    assert [token.rank for token in answer.logprobs[0].top] == [1, 2]
    assert not answer.prompt_logprobs[0].HasField("chosen")
    assert [position.chosen.text for position in answer.prompt_logprobs[1:]] == ["h", "i"]
    usage, timings = answer.usage, answer.timings
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 8, 2)
    assert (timings.queued_ms, timings.first_token_ms, timings.total_ms) == (1, 2, 4)
    served_by = answer.served_by
    assert (served_by.worker, served_by.unit, list(served_by.nodes)) == (3, "node0", [0])
    assert served_by.pid > 0


async def test_a_stream_carries_each_field_where_it_belongs(client):
    parts = await collect(client.stream("hi", max_tokens=3, n=2, prompt_logprobs=0, logprobs=0, echo=True))
    assert [(part.index, part.text) for part in parts] == [
        (0, "hih"),
        (1, "hih"),
        (0, "e"),
        (1, "e"),
        (0, "l"),
        (1, "l"),
    ]
    assert [part.HasField("served_by") for part in parts] == [True, *[False] * 4, True]
    assert [part.HasField("usage") and part.HasField("timings") for part in parts] == [*[False] * 5, True]
    assert [len(part.prompt_logprobs) for part in parts] == [3, 0, 0, 0, 0, 0]
    assert [bool(part.finish_reason) for part in parts] == [*[False] * 4, True, True]
    assert all(len(part.logprobs) == len(part.token_ids) == 1 for part in parts)
    assert len({part.request_id for part in parts}) == 1
    assert parts[0].request_id


async def test_tokenize(client):
    tokens = await client.tokenize("hé")
    assert (list(tokens.token_ids), list(tokens.tokens)) == ([BOS, 104, 233], ["\x01", "h", "é"])
    assert tokens.text == "hé"
    assert list((await client.tokenize("h", add_special_tokens=False)).token_ids) == [104]
    assert (await client.tokenize(messages=[("user", "h")])).text == "<user>h<assistant>"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "text"),
        ({"text": "a", "messages": [("user", "b")]}, "text"),
        ({"messages": [("nobody", "b")]}, "messages[0].role"),
        ({"text": "a", "model": "other"}, "model"),
    ],
)
async def test_tokenize_names_the_field_at_fault(client, arguments, field):
    error = await failure(client.tokenize(**arguments))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in error.field_violations] == [field]


async def test_model_info(client):
    info = await client.model_info()
    assert (info.model, info.model_type, info.model_path, info.dtype) == (
        "tiny",
        "llama",
        "/models/tiny",
        "float32",
    )
    assert (info.parameters, info.vocab_size, info.max_context_length) == (1000, VOCAB_SIZE, CONTEXT)
    assert (list(info.eos_token_ids), info.has_chat_template) == ([2], True)
    assert (info.weights_digest, info.weights_bytes, info.placement) == ("00ff", 4000, "bound")
    assert info.server_version
    error = await failure(client.model_info("other"))
    assert (error.code, error.field_violations[0].field) == (grpc.StatusCode.INVALID_ARGUMENT, "model")


@pytest.mark.parametrize("streaming", [False, True])
async def test_bad_fields_travel_in_a_bad_request(client, engine, streaming):
    fields = {"prompt": "hi", "max_tokens": 0, "temperature": float("nan")}
    error = await failure(collect(client.stream(**fields)) if streaming else client.infer(**fields))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in error.field_violations] == ["max_tokens", "temperature"]
    assert all(violation.description for violation in error.field_violations)
    assert "temperature" in error.details
    assert engine.requests == []


async def test_more_violations_than_a_trailer_holds(client):
    error = await failure(client.infer("hi", stop=[""] * 64, stop_token_ids=[-1] * 9, request_id="é" * 4000))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.field_violations[0].field == "request_id"
    assert len(error.field_violations) > 20


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (RequestRejected("max_tokens", "is too much"), grpc.StatusCode.INVALID_ARGUMENT),
        (QueueFull(9, 9, 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (EngineUnavailable("the engine is draining"), grpc.StatusCode.UNAVAILABLE),
        (ZeroDivisionError("the secret"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_what_the_engine_raises_becomes_a_status(client, engine, raised, code, streaming, caplog):
    engine.error = raised
    call = (
        collect(client.stream("hi", request_id="r-7")) if streaming else client.infer("hi", request_id="r-7")
    )
    error = await failure(call)
    assert error.code is code
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            assert [violation.field for violation in error.field_violations] == ["max_tokens"]
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            assert error.retry_delay == 2.5
        case grpc.StatusCode.UNAVAILABLE:
            assert error.retry_delay > 0
        case grpc.StatusCode.INTERNAL:
            assert error.request_id == "r-7"
            assert "secret" not in str(error)
            assert "the secret" in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("cause", "code"),
    [
        (AbortCause.DEADLINE, grpc.StatusCode.DEADLINE_EXCEEDED),
        (AbortCause.ERROR, grpc.StatusCode.INTERNAL),
        (AbortCause.SHUTDOWN, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_an_answer_that_the_engine_cut_short_is_no_success(client, engine, cause, code, streaming):
    engine.abort_cause = cause
    error = await failure(collect(client.stream("hi")) if streaming else client.infer("hi"))
    assert error.code is code


async def test_an_engine_that_never_finishes_is_an_internal_error(client, engine):
    engine._outputs = lambda request: [RequestOutput(request.request_id, text="a", token_ids=(97,))]
    assert (await failure(client.infer("hi"))).code is grpc.StatusCode.INTERNAL


async def test_cancelling_a_unary_call_reaches_the_engine(client, engine):
    engine.hold = True
    call = asyncio.create_task(client.infer("hi", request_id="r-1"))
    await engine.started.get()
    call.cancel()
    assert await engine.ended.get() == ("r-1", False)


async def test_leaving_a_stream_reaches_the_engine(client, engine):
    engine.hold = True
    async with aclosing(client.stream("hi", request_id="r-1")) as parts:
        assert (await anext(parts)).text == "h"
    assert await engine.ended.get() == ("r-1", False)


async def test_closing_the_client_reaches_the_engine(server, engine):
    engine.hold = True
    client = AsyncClient(server.addresses[0])
    parts = client.stream("hi", request_id="r-1")
    await anext(parts)
    await client.close()
    assert await engine.ended.get() == ("r-1", False)
    with pytest.raises(asyncio.CancelledError):
        await anext(parts)


async def test_the_clients_deadline_reaches_the_engine(client, engine):
    before = time.monotonic()
    await client.infer("hi", timeout=30)
    await client.infer("hi", timeout=3000)
    near, far = (request.deadline - before for request in engine.requests)
    assert 0 < near <= 31
    # gRPC rounds long timeouts up on the wire.
    assert 2900 < far <= 3100


async def test_a_deadline_that_passes_ends_the_request(client, engine):
    engine.hold = True
    error = await failure(client.infer("hi", timeout=0.3))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await engine.ended.get())[1] is False


class TestRequestLimit:
    @pytest.fixture
    def options(self):
        return ServerOptions(max_request_seconds=50)

    async def test_it_bounds_requests_without_a_nearer_deadline(self, server, engine):
        async with AsyncClient(server.addresses[0]) as client:
            before = time.monotonic()
            await client.infer("hi")
            await client.infer("hi", timeout=9000)
            await client.infer("hi", timeout=20)
        limits = [request.deadline - before for request in engine.requests]
        assert limits[0] == pytest.approx(50, abs=9)
        assert limits[1] == pytest.approx(50, abs=9)
        assert limits[2] <= 21


class TestStalledClient:
    @pytest.fixture
    def options(self):
        return ServerOptions(stalled_client_seconds=0.3)

    async def test_an_abandoned_stream_frees_its_request(self, server, engine, caplog):
        # More than a client's flow-control window holds, to a client that reads one part and no more.
        engine._outputs = lambda request: [
            RequestOutput(request.request_id, text="x" * 100_000, token_ids=(120,)) for _ in range(1000)
        ]
        channel = grpc.aio.insecure_channel(server.addresses[0])
        call = inference_pb2_grpc.InferenceStub(channel).InferStream(
            inference_pb2.InferRequest(prompt="hi", request_id="r-1")
        )
        await call.read()
        assert await engine.ended.get() == ("r-1", False)
        assert "the client took no part" in caplog.text
        await channel.close()


async def test_no_deadline_is_none(server, engine):
    async with AsyncClient(server.addresses[0]) as client:
        await client.infer("hi")
    assert engine.requests[0].deadline is None


async def test_draining_finishes_what_runs_and_refuses_what_comes(server, engine, client):
    engine.hold = True
    running = asyncio.create_task(collect(client.stream("hi", max_tokens=5)))
    await engine.started.get()
    states = server.health
    stopping = asyncio.create_task(server.stop(grace=30))
    await asyncio.sleep(0)
    assert (await failure(client.infer("hi"))).code is grpc.StatusCode.UNAVAILABLE
    assert not stopping.done()
    engine.resume()
    parts = await running
    assert "".join(part.text for part in parts) == "hello"
    await stopping
    assert states is server.health
    assert [request.request_id for request in engine.requests] == [parts[0].request_id]


@pytest.mark.parametrize("streaming", [False, True])
async def test_what_outlasts_the_grace_is_ended_as_unavailable(server, engine, client, streaming):
    engine.hold = True
    call = collect(client.stream("hi")) if streaming else client.infer("hi")
    running = asyncio.create_task(call)
    await engine.started.get()
    await server.stop(grace=0.1)
    error = await failure(running)
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert (await engine.ended.get())[1] is False


class NotingTokenizer(CharacterTokenizer):
    """Notes in which thread it works."""

    def __init__(self):
        self.threads = []

    def encode(self, text, add_special_tokens=True):
        self.threads.append(threading.current_thread())
        return super().encode(text, add_special_tokens)


async def test_long_prompts_leave_the_event_loop_alone(engine):
    tokenizer = NotingTokenizer()
    model = make_served_model(max_context_length=100_000, tokenizer=tokenizer)
    server = await start_server(model, engine, ["127.0.0.1:0"])
    async with AsyncClient(server.addresses[0], timeout=60) as client:
        await client.infer("short")
        await client.tokenize("short")
        await client.infer("x" * 10_000)
        await client.infer(messages=[("user", "x" * 10_000)])
        await client.tokenize("x" * 10_000)
    await server.stop(0)
    in_loop = [thread is threading.main_thread() for thread in tokenizer.threads]
    assert in_loop == [True, True, False, False, False]


async def test_a_prompt_beyond_grpcs_own_limit(engine, caplog):
    caplog.set_level(logging.INFO)
    model = make_served_model(max_context_length=8_000_000)
    server = await start_server(model, engine, ["127.0.0.1:0"])
    async with AsyncClient(server.addresses[0], timeout=60) as client:
        answer = await client.infer("x" * 5_000_000, max_tokens=2, echo=True)
    await server.stop(0)
    assert answer.usage.prompt_tokens == 5_000_001
    assert len(answer.text) == 5_000_002


async def test_a_message_over_the_limit_is_told_as_such(engine):
    server = await start_server(
        make_served_model(), engine, ["127.0.0.1:0"], ServerOptions(max_receive_message_bytes=1000)
    )
    async with AsyncClient(server.addresses[0], timeout=60) as client:
        error = await failure(client.infer("x" * 2000))
    await server.stop(0)
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details
