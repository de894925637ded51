"""A worker that asks itself: what counts as an answer, when it does not ask, and what users' counters show of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import aclosing

import pytest
from serving_fakes import FakeEngine
from serving_fixtures import options, server

from service.engine.request import EngineRequest, EngineStats, QueueFull, RequestOutput, RequestRejected
from service.self_request import MOST_FAILURES, OwnRequests, SelfRequests
from service.server import RunningServer

__all__ = ["options", "server"]

ENOUGH = 4


class HeldEngine(FakeEngine):
    """A fake engine that, while `hold` is set, keeps a request from its first output."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        if self.hold:
            self.requests.append(request)
            self.started.put_nowait(request.request_id)
            try:
                await self._resumed.wait()
            except asyncio.CancelledError:
                self.ended.put_nowait((request.request_id, False))
                raise
        async with aclosing(super().generate(request)) as outputs:
            async for output in outputs:
                yield output


@pytest.fixture
def engine() -> HeldEngine:
    return HeldEngine()


class Called:
    """A function of no arguments, and a wait until it has been called `ENOUGH` times more."""

    def __init__(self, values: Callable[[], int]) -> None:
        self._values = values
        self._left = ENOUGH
        self._done = asyncio.Event()

    def __call__(self) -> int:
        self._left -= 1
        if self._left <= 0:
            self._done.set()
        return self._values()

    async def enough(self) -> None:
        self._left, self._done = ENOUGH, asyncio.Event()
        await self._done.wait()


def asking(
    own: OwnRequests,
    server: RunningServer,
    answered: Callable[[], int] | None = None,
    progress: Callable[[], Hashable] = lambda: 0,
    patience: float = 60.0,
) -> SelfRequests:
    return SelfRequests(
        lambda: own.ask(server.addresses[0]),
        answered or (lambda: server.answered),
        progress,
        interval=0.001,
        patience=patience,
    )


async def asked(engine: FakeEngine, times: int) -> None:
    for _ in range(times):
        await engine.started.get()


async def test_it_asks_as_long_as_it_is_answered(server: RunningServer, engine: FakeEngine) -> None:
    own = OwnRequests()
    running = asyncio.ensure_future(asking(own, server).run())
    await asked(engine, ENOUGH)
    assert not running.done()
    running.cancel()
    (request,) = {(each.request_id, each.prompt_token_ids) for each in engine.requests}
    assert request == (own.request_id, (0,))
    assert {each.params.max_tokens for each in engine.requests} == {1}
    assert max(each.priority for each in engine.requests) < 0


async def test_a_servicer_that_hangs_is_found_out(server: RunningServer, engine: FakeEngine) -> None:
    engine.hold = True
    trouble = await asking(OwnRequests(), server, patience=0.05).run()
    assert "was silent for 0.05 s" in trouble
    # It has let go of what it asked for.
    assert await engine.ended.get() == (engine.requests[0].request_id, False)


async def test_an_answer_that_waits_for_others_is_waited_for(
    server: RunningServer, engine: FakeEngine
) -> None:
    engine.hold = True
    steps = Called(itertools.count().__next__)
    running = asyncio.ensure_future(asking(OwnRequests(), server, progress=steps, patience=0.05).run())
    await asked(engine, 1)
    # Each look is after a quarter of what it is patient for.
    await steps.enough()
    await steps.enough()
    assert not running.done()
    engine.hold = False
    engine.resume()
    await asked(engine, 1)
    running.cancel()


async def test_it_asks_nothing_while_users_are_answered(server: RunningServer, engine: FakeEngine) -> None:
    answered = Called(itertools.count().__next__)
    running = asyncio.ensure_future(asking(OwnRequests(), server, answered).run())
    await answered.enough()
    assert engine.requests == []
    running.cancel()


@pytest.mark.parametrize("refusal", [QueueFull(9, 9, 1.0), RequestRejected("max_tokens", "is too many")])
async def test_a_refusal_is_an_answer(server: RunningServer, engine: FakeEngine, refusal: Exception) -> None:
    engine.error = refusal
    answered = Called(lambda: server.answered)
    running = asyncio.ensure_future(asking(OwnRequests(), server, answered).run())
    while len(engine.requests) < MOST_FAILURES + 1:
        await answered.enough()
    assert not running.done()
    running.cancel()


async def test_failures_in_a_row_are_too_many(server: RunningServer, engine: FakeEngine) -> None:
    engine.error = RuntimeError("broken")
    trouble = await asking(OwnRequests(), server).run()
    assert f"{MOST_FAILURES} requests of its own in a row failed: INTERNAL" in trouble
    assert len(engine.requests) == MOST_FAILURES


async def test_nobody_listening_is_a_failure(server: RunningServer) -> None:
    own = OwnRequests()
    await server.stop(0)
    trouble = await SelfRequests(
        lambda: own.ask(server.addresses[0]), lambda: 0, lambda: 0, interval=0.001, patience=60
    ).run()
    assert "UNAVAILABLE" in trouble


async def test_counters_show_users_requests_alone_and_never_fall(
    server: RunningServer, engine: FakeEngine
) -> None:
    own = OwnRequests()
    assert own.taken_out(EngineStats(requests=5, prompt_tokens=50, generated_tokens=7)).requests == 5
    await own.ask(server.addresses[0])
    # Made, but not yet in the counters.
    assert own.taken_out(EngineStats(requests=5, prompt_tokens=50, generated_tokens=7)).requests == 5
    shown = own.taken_out(EngineStats(requests=6, prompt_tokens=51, generated_tokens=8, steps=9))
    assert (shown.requests, shown.prompt_tokens, shown.generated_tokens) == (5, 50, 7)
    assert shown.steps == 9
    engine.error = QueueFull(9, 9, 1.0)
    await own.ask(server.addresses[0])
    assert own.taken_out(EngineStats(requests=7, prompt_tokens=61, generated_tokens=9)).requests == 6
