"""A stream that breaks off goes on with prompt and tokens so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc
import pytest
from serving_fakes import FakeEngine, make_served_model

import numaserve
from numaserve import InferenceError
from service.engine.async_engine import EngineUnavailable
from service.engine.request import EngineRequest, RequestOutput
from service.server import start_server

ANSWER = "abcdefgh"


class BreakingEngine(FakeEngine):
    """Goes on with the answer where the prompt ends, and breaks off after as many outputs as `breaks` says in turn."""

    def __init__(self, breaks: list[int]) -> None:
        super().__init__()
        self.breaks = breaks
        self.prompt = "hi"

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        given = "".join(map(chr, request.prompt_token_ids[1:]))
        self.answer = ANSWER[len(given) - len(self.prompt) :]
        stop_after = self.breaks.pop(0) if self.breaks else len(ANSWER) + 1
        async with aclosing(super().generate(request)) as outputs:
            async for output in outputs:
                if stop_after == 0:
                    raise EngineUnavailable("the worker is gone")
                stop_after -= 1
                yield output
        if stop_after == 0:
            raise EngineUnavailable("the worker is gone")


async def ask(engine: FakeEngine, kind: str, **fields: object) -> list:
    server = await start_server(make_served_model(), engine, ["127.0.0.1:0"])
    try:
        if kind == "aio":
            async with numaserve.AsyncClient(server.addresses[0], timeout=60) as client:
                return [part async for part in client.stream("hi", resume=True, **fields)]
        with numaserve.Client(server.addresses[0], timeout=60) as blocking:
            return await asyncio.to_thread(lambda: list(blocking.stream("hi", resume=True, **fields)))
    finally:
        await server.stop(0)


@pytest.mark.parametrize("kind", ["aio", "sync"])
@pytest.mark.parametrize("breaks", [[], [3], [1, 1, 4], [7]])
async def test_the_parts_are_those_of_an_answer_in_one_go(kind: str, breaks: list[int]) -> None:
    engine = BreakingEngine(list(breaks))
    parts = await ask(engine, kind, max_tokens=8)
    assert "".join(part.text for part in parts) == ANSWER
    assert [token for part in parts for token in part.token_ids] == list(map(ord, ANSWER))
    assert (parts[-1].usage.prompt_tokens, parts[-1].usage.completion_tokens) == (3, 8)
    assert len(engine.requests) == len(breaks) + 1
    left = [8 - sum(breaks[:place]) for place in range(len(breaks) + 1)]
    assert [request.params.max_tokens for request in engine.requests] == left


@pytest.mark.parametrize("kind", ["aio", "sync"])
async def test_when_only_the_end_is_lost_the_end_alone_is_made_again(kind: str) -> None:
    class EndLost(BreakingEngine):
        async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
            last_wanted = len(self.requests) > 0
            async with aclosing(super().generate(request)) as outputs:
                async for output in outputs:
                    if output.request_finished and not last_wanted:
                        yield RequestOutput(output.request_id, 0, output.text, output.token_ids)
                        raise EngineUnavailable("the worker is gone")
                    yield output

    parts = await ask(EndLost([]), kind, max_tokens=8)
    assert "".join(part.text for part in parts) == ANSWER
    assert [token for part in parts for token in part.token_ids] == list(map(ord, ANSWER))
    assert (parts[-1].usage.prompt_tokens, parts[-1].usage.completion_tokens) == (3, 8)


async def test_an_outage_ends_with_its_error_after_a_few_attempts() -> None:
    with pytest.raises(InferenceError) as raised:
        await ask(BreakingEngine([2] + [0] * 100), "aio", max_tokens=8)
    assert raised.value.code is grpc.StatusCode.UNAVAILABLE


async def test_other_errors_are_not_resumed() -> None:
    with pytest.raises(InferenceError) as raised:
        await ask(BreakingEngine([]), "aio", max_tokens=-1)
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("stop", ["x"]),
        ("structured_output", {"choice": ["a"]}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
    ],
)
def test_what_cannot_be_resumed_is_refused_at_once(field: str, value: object) -> None:
    with (
        numaserve.Client("127.0.0.1:1") as client,
        pytest.raises(ValueError, match=f"{field}: a stream with it cannot be resumed"),
    ):
        client.stream("hi", resume=True, **{field: value})
