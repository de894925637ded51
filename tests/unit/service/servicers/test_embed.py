"""The Embed call over a fake engine: answers, faults by field name, engine errors, cancelling."""

import asyncio

import grpc
import pytest
from serving_fakes import BOS, CONTEXT, VOCAB_SIZE, make_served_model

from numaserve import Client, InferenceError
from numaserve._fields import embed_request
from numaserve.v1 import inference_pb2
from service.engine.request import EmbeddingParams, Pooling, QueueFull
from service.servicers.embedding import MAX_INPUTS, check_embed_request
from service.servicers.errors import InvalidRequest
from service.servicers.inference import EMBED_AT_ONCE


def check(**fields):
    request = inference_pb2.EmbedRequest(**fields)
    return check_embed_request(request, make_served_model(), request.request_id or "r1", None)


def one(**fields) -> inference_pb2.EmbedInput:
    return inference_pb2.EmbedInput(**fields)


async def test_vectors_come_in_the_order_of_the_inputs(client, engine):
    answer = await client.embed(["a", "bcd", "ef"], request_id="r-1")
    assert (answer.request_id, answer.model, answer.dimension) == ("r-1", "tiny", 3)
    assert [list(vector.values) for vector in answer.embeddings] == [
        [BOS, 2, 0.5],
        [BOS, 4, 0.5],
        [BOS, 3, 0.5],
    ]
    assert [vector.prompt_tokens for vector in answer.embeddings] == [2, 4, 3]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (9, 0, 3)
    assert (answer.served_by.worker, answer.served_by.unit) == (3, "node0")
    assert {request.embedding for request in engine.requests} == {EmbeddingParams(Pooling.MEAN, True)}


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("ab", [(BOS, 97, 98)]),
        (["ab"], [(BOS, 97, 98)]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
        (["a", [9]], [(BOS, 97), (9,)]),
    ],
)
async def test_inputs_may_be_text_or_token_ids(client, engine, inputs, expected):
    await client.embed(inputs, pooling="last", normalize=False, priority=2)
    assert sorted(request.prompt_token_ids for request in engine.requests) == sorted(expected)
    assert {request.priority for request in engine.requests} == {2}
    assert engine.requests[0].embedding == EmbeddingParams(Pooling.LAST, False)


async def test_blocking_client_embeds(server, engine):
    with Client(server.addresses[0], timeout=60) as blocking:
        answer = await asyncio.to_thread(blocking.embed, "a", pooling="last")
    assert list(answer.embeddings[0].values) == [BOS, 2, 0.5]
    assert engine.requests[0].embedding.pooling is Pooling.LAST


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({}, ["inputs"]),
        ({"inputs": [one(text="a")] * (MAX_INPUTS + 1)}, ["inputs"]),
        ({"inputs": [one(text="a"), one()]}, ["inputs[1]"]),
        ({"inputs": [one(text="a", token_ids=[1])]}, ["inputs[0]"]),
        ({"inputs": [one(token_ids=[1, VOCAB_SIZE])]}, ["inputs[0].token_ids[1]"]),
        ({"inputs": [one(token_ids=[-1])]}, ["inputs[0].token_ids[0]"]),
        ({"inputs": [one(text="x" * CONTEXT)]}, ["inputs[0].text"]),
        ({"inputs": [one(token_ids=[1] * (CONTEXT + 1))]}, ["inputs[0].token_ids"]),
        ({"inputs": [one(text="a")], "pooling": 7}, ["pooling"]),
        ({"inputs": [one(text="a")], "model": "other", "request_id": "two words"}, ["request_id", "model"]),
    ],
)
def test_faults_are_named(fields, at_fault):
    with pytest.raises(InvalidRequest) as caught:
        check(**fields)
    assert [violation.field for violation in caught.value.violations] == at_fault


def test_an_input_may_fill_the_context():
    requests = check(inputs=[one(token_ids=[1] * CONTEXT), one(text="x" * (CONTEXT - 1))])
    assert [len(request.prompt_token_ids) for request in requests] == [CONTEXT, CONTEXT]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("a", "median", {}), ValueError),
        (("a", "mean", {"prompt": "x"}), TypeError),
        (([1.5], "mean", {}), TypeError),
    ],
)
def test_client_refuses_what_no_request_can_hold(arguments, error):
    with pytest.raises(error):
        embed_request(*arguments)


@pytest.mark.parametrize(
    ("prepare", "code"),
    [
        (lambda engine: setattr(engine, "error", QueueFull(9, 9, 2.0)), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (lambda engine: setattr(engine, "error", RuntimeError("broken")), grpc.StatusCode.INTERNAL),
    ],
)
async def test_engine_errors_end_the_call_with_their_status(client, engine, prepare, code):
    prepare(engine)
    with pytest.raises(InferenceError) as caught:
        await client.embed(["a", "b"])
    assert caught.value.code == code


class HoldingEngine:
    """Ends no request by itself; counts those that run."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.full = asyncio.Event()
        self.empty = asyncio.Event()

    async def generate(self, request):
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running == EMBED_AT_ONCE:
            self.full.set()
        try:
            await asyncio.Event().wait()
            yield request
        finally:
            self.running -= 1
            if not self.running:
                self.empty.set()


class TestHeld:
    @pytest.fixture
    def engine(self):
        return HoldingEngine()

    async def test_cancelling_the_call_ends_every_input(self, client, engine):
        call = asyncio.create_task(client.embed(["a"] * 100))
        await engine.full.wait()
        call.cancel()
        await engine.empty.wait()
        assert engine.most == EMBED_AT_ONCE
        with pytest.raises(asyncio.CancelledError):
            await call

    async def test_passed_deadline_ends_every_input(self, client, engine):
        with pytest.raises(InferenceError) as caught:
            await client.embed(["a"] * 20, timeout=0.3)
        assert caught.value.code == grpc.StatusCode.DEADLINE_EXCEEDED
        await engine.empty.wait()
