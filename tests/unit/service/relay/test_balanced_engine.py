"""Requests handed from one worker's event loop to another's engine, over real sockets in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from serving_fakes import FakeEngine

from placement.board import Board, BoardRow, WorkerState
from service.engine.async_engine import EngineUnavailable
from service.engine.request import (
    EngineRequest,
    QueueFull,
    RequestOutput,
    RequestRejected,
    SamplingParams,
    WorkerIdentity,
)
from service.relay.balanced_engine import BalancedEngine
from service.relay.server import RelayServer


class FakeLocal(FakeEngine):
    """A fake engine that knows the hash of every prompt block."""

    def prefix_hashes(self, request: EngineRequest, most_blocks: int) -> list[bytes]:
        size = 4
        blocks = (len(request.prompt_token_ids) - 1) // size
        return [bytes([block + 1]) * 16 for block in range(min(blocks, most_blocks))]


class Pair:
    """Worker 0, which clients are connected to, and worker 1, which takes from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.board = Board.create(3)
        for worker in (0, 1):
            self.board.write(worker, BoardRow(state=WorkerState.SERVING, kv_blocks_free=100))
        self.here, self.there = FakeLocal(), FakeLocal()
        self.server = RelayServer(self.there, WorkerIdentity(1, 77, "node0", (0,)))  # type: ignore[arg-type]
        self.engine = BalancedEngine(self.here, 0, self.board, self.path, {0: 10}, block_size=4)

    def path(self, worker: int) -> str:
        return str(self.folder / f"relay-{worker}.sock")

    def busy(self, here: int) -> None:
        """Make worker 0 look busy, so that requests go to worker 1."""
        self.board.place(0, 0, here)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    made = Pair(tmp_path)
    await made.server.start(made.path(1))
    yield made
    made.engine.close()
    await made.server.drain(0)


def request(request_id: str = "r", tokens: int = 3, **params: object) -> EngineRequest:
    return EngineRequest(request_id, (1,) * tokens, SamplingParams(5, **params), 0.0)  # type: ignore[arg-type]


async def collect(engine: BalancedEngine, wanted: EngineRequest) -> list[RequestOutput]:
    async with aclosing(engine.generate(wanted)) as outputs:
        return [output async for output in outputs]


def joined(outputs: list[RequestOutput], index: int) -> str:
    return "".join(output.text for output in outputs if output.index == index)


async def test_a_relayed_answer_equals_a_direct_one_and_says_who_served(pair: Pair) -> None:
    wanted = request(n=2, logprobs=1, prompt_logprobs=1)
    direct = await collect(pair.engine, wanted)
    assert {output.served_by for output in direct} == {None}
    pair.busy(5)
    relayed = await collect(pair.engine, wanted)
    assert {output.served_by for output in relayed} == {WorkerIdentity(1, 77, "node0", (0,))}
    assert pair.there.requests == [wanted]
    for index in (0, 1):
        assert joined(relayed, index) == joined(direct, index) == "hello"
    last, expected = relayed[-1], direct[-1]
    assert last.request_finished
    assert last.summary == expected.summary
    assert pair.board.placed(1) == 0


@pytest.mark.parametrize("error", [RequestRejected("prompt", "is too long"), QueueFull(9, 8, 2.5)])
async def test_a_refusal_is_carried_over(pair: Pair, error: Exception) -> None:
    pair.busy(5)
    pair.there.error = error
    with pytest.raises(type(error), match=str(error)) as raised:
        await collect(pair.engine, request())
    assert vars(raised.value) == vars(error)
    assert pair.here.requests == []


async def test_closing_the_stream_ends_the_request_at_the_sibling(pair: Pair) -> None:
    pair.busy(5)
    pair.there.hold = True
    stream = pair.engine.generate(request())
    assert (await anext(stream)).text == "h"
    assert pair.board.placed(1) == 1
    await stream.aclose()
    assert await pair.there.ended.get() == ("r", False)
    assert pair.board.placed(1) == 0


async def test_streams_of_one_sibling_share_frames(pair: Pair) -> None:
    pair.busy(50)
    answers = await asyncio.gather(*(collect(pair.engine, request(f"r{number}")) for number in range(20)))
    assert all(joined(outputs, 0) == "hello" for outputs in answers)
    assert sorted(sent.request_id for sent in pair.there.requests) == sorted(f"r{n}" for n in range(20))


async def test_equal_ids_on_one_sibling_do_not_mix(pair: Pair) -> None:
    pair.busy(50)
    first, second = await asyncio.gather(
        collect(pair.engine, request("same", n=1)), collect(pair.engine, request("same", n=2))
    )
    assert {output.index for output in first} == {0}
    assert {output.index for output in second} == {0, 1}


async def test_a_worker_that_is_gone_costs_no_request(pair: Pair) -> None:
    pair.busy(5)
    await pair.server.drain(0)
    Path(pair.path(1)).unlink(missing_ok=True)
    outputs = await collect(pair.engine, request())
    assert joined(outputs, 0) == "hello"
    assert outputs[-1].served_by is None


async def test_a_request_without_output_moves_on_when_its_worker_dies(pair: Pair) -> None:
    pair.busy(5)
    reached = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        reached.set()
        writer.close()

    Path(pair.path(2)).unlink(missing_ok=True)
    dying = await asyncio.start_unix_server(accept, pair.path(2))
    pair.board.write(1, BoardRow(state=WorkerState.DRAINING))
    pair.board.write(2, BoardRow(state=WorkerState.SERVING, kv_blocks_free=100))
    outputs = await collect(pair.engine, request())
    assert reached.is_set()
    assert joined(outputs, 0) == "hello"
    dying.close()


async def test_a_request_that_has_begun_ends_unavailable_when_its_worker_dies(pair: Pair) -> None:
    pair.busy(5)
    pair.there.hold = True
    stream = pair.engine.generate(request())
    assert (await anext(stream)).text == "h"
    await pair.server.drain(0)
    with pytest.raises(EngineUnavailable):
        await anext(stream)
    assert pair.here.requests == []
    assert pair.board.placed(1) == 0


@pytest.mark.parametrize(
    "row",
    [
        BoardRow(state=WorkerState.DRAINING, kv_blocks_free=100),
        BoardRow(state=WorkerState.STARTING, kv_blocks_free=100),
        BoardRow(state=WorkerState.SERVING, kv_blocks_free=100, generation=1),
    ],
)
async def test_siblings_that_leave_start_or_serve_other_weights_are_not_chosen(
    pair: Pair, row: BoardRow
) -> None:
    pair.busy(5)
    pair.board.write(1, row)
    await collect(pair.engine, request())
    assert pair.there.requests == []


async def test_an_own_engine_that_fails_leaves_the_request_to_a_sibling(pair: Pair) -> None:
    pair.here.error = EngineUnavailable("has failed")
    assert joined(await collect(pair.engine, request()), 0) == "hello"
    pair.board.write(1, BoardRow(state=WorkerState.STOPPED))
    with pytest.raises(EngineUnavailable, match="has failed"):
        await collect(pair.engine, request())


async def test_a_sibling_that_has_the_prefix_is_preferred_among_equals(pair: Pair) -> None:
    wanted = request(tokens=17)
    for digest in pair.here.prefix_hashes(wanted, 100):
        pair.board.prefixes(1).add(digest)
    await collect(pair.engine, wanted)
    assert pair.there.requests == [wanted]
    await collect(pair.engine, request(tokens=3))
    assert len(pair.here.requests) == 1


async def test_a_workers_own_request_stays_with_it(pair: Pair) -> None:
    engine = BalancedEngine(pair.here, 0, pair.board, pair.path, {0: 10}, 4, own_request_id="self")
    pair.busy(9)
    await collect(engine, request("self"))
    await collect(engine, request("other"))
    assert [each.request_id for each in pair.here.requests] == ["self"]
    pair.here.error = EngineUnavailable("is draining")
    with pytest.raises(EngineUnavailable):
        await collect(engine, request("self"))
    engine.close()
