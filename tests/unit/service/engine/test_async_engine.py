"""The engine behind an event loop: streams, cancellation, lagging consumers, draining and failures."""

import asyncio
import threading
from contextlib import aclosing

import pytest
from engine_fakes import HashModel, expected_greedy, letters, make_engine, make_request

from service.engine.async_engine import AsyncEngine, EngineUnavailable
from service.engine.block_pool import PoolCorrupt
from service.engine.request import (
    FinishReason,
    QueueFull,
    RequestRejected,
    StructuredKind,
    StructuredOutput,
)
from service.engine.sequence import AbortCause
from service.models.batch import nothing


class GatedModel(HashModel):
    """Computes a step only when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def forward(self, batch, cache, before_computing=nothing):
        before_computing()
        self.entered.release()
        assert self.gate.acquire(timeout=60)
        return super().forward(batch, cache)

    async def let(self, steps: int) -> None:
        """Lets so many steps run, and returns once the step after them has begun."""
        for _ in range(steps):
            self.gate.release()
            await asyncio.to_thread(self.entered.acquire)

    def open(self) -> None:
        self.gate.release(100_000)


class Watched(AsyncEngine):
    """Tells when nothing is left to do; looks after each step and each heartbeat."""

    def __init__(self, engine, **options) -> None:
        super().__init__(engine, on_stats=self._look, heartbeat_seconds=0.01, **options)
        self._looked = asyncio.Event()

    def _look(self, _stats) -> None:
        self._loop.call_soon_threadsafe(self._looked.set)

    async def until_idle(self) -> None:
        while self._arrivals or self._aborts or self._engine.has_work:
            self._looked.clear()
            await self._looked.wait()


@pytest.fixture
async def started():
    """Makes started engines, and stops them afterwards."""
    engines = []

    def start(engine, **options) -> Watched:
        running = Watched(engine, **options)
        running.start()
        engines.append((running, engine))
        return running

    yield start
    for running, engine in engines:
        if isinstance(engine._model, GatedModel):
            engine._model.open()
        running.stop()


async def collect(stream):
    return [output async for output in stream]


def joined(outputs) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_streams_answer_with_the_clients_own_request_id(started):
    running = started(make_engine())
    outputs = await collect(running.generate(make_request("r", [1, 2], 6)))
    assert joined(outputs) == expected_greedy([1, 2], 6)
    assert {output.request_id for output in outputs} == {"r"}
    assert outputs[-1].request_finished
    assert outputs[-1].summary.completion_tokens == 6


async def test_many_streams_at_once_also_of_one_request_id(started):
    running = started(make_engine(blocks=20, max_sequences=6))
    streams = [running.generate(make_request("same", [number], 20)) for number in range(30)]
    answers = await asyncio.gather(*map(collect, streams))
    assert [joined(answer) for answer in answers] == [expected_greedy([number], 20) for number in range(30)]
    assert running.stats().requests == 30


async def test_one_wake_up_per_step(started, monkeypatch):
    model = GatedModel()
    running = started(make_engine(model=model))
    tasks = [asyncio.create_task(collect(running.generate(make_request("r", [n], 5)))) for n in range(5)]
    await asyncio.to_thread(model.entered.acquire)
    wake_ups = []
    loop = asyncio.get_running_loop()
    call = loop.call_soon_threadsafe

    def count(callback, *arguments, **options):
        if threading.current_thread() is running._thread and callback != running._looked.set:
            wake_ups.append(callback)
        return call(callback, *arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    model.open()
    await asyncio.gather(*tasks)
    assert len(wake_ups) <= running.stats().steps


async def test_outputs_are_merged_when_the_consumer_lags(started):
    model = GatedModel()
    engine = make_engine(model=model, max_batch_tokens=32)
    running = started(engine)
    request = make_request("r", [1, 2], 9, n=2, temperature=1.0, logprobs=0, prompt_logprobs=0)
    stream = running.generate(request)
    first = asyncio.create_task(anext(stream))
    await asyncio.to_thread(model.entered.acquire)
    await model.let(1)
    outputs = [await first]
    assert len(outputs[0].token_ids) == 1
    assert len(outputs[0].prompt_logprobs) == 2
    model.open()
    await running.until_idle()
    await asyncio.sleep(0)
    outputs += await collect(stream)
    # One part for each completion holds all that came meanwhile, and the request's end comes last.
    assert sorted(output.index for output in outputs[1:]) == [0, 1]
    assert [output.request_finished for output in outputs] == [False, False, True]
    for index in range(2):
        parts = [output for output in outputs if output.index == index]
        assert len(joined(parts)) == 9
        assert "".join(part.text for part in parts) == letters(joined(parts))
        assert [entry.chosen.token_id for part in parts for entry in part.logprobs] == joined(parts)
        assert parts[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].summary.completion_tokens == 18


async def test_closing_a_stream_frees_its_blocks_at_the_next_step(started):
    model = GatedModel()
    engine = make_engine(model=model)
    running = started(engine)
    async with aclosing(running.generate(make_request("r", [1] * 9, 50))) as stream:
        first = asyncio.create_task(anext(stream))
        await asyncio.to_thread(model.entered.acquire)
        await model.let(1)
        await first
    steps = engine.stats().steps
    model.gate.release()
    await running.until_idle()
    assert engine.pool.free_count == engine.pool.num_blocks
    assert engine.stats().steps == steps + 1


async def test_cancelling_the_consumers_task_aborts_its_request(started):
    model = GatedModel()
    engine = make_engine(model=model)
    running = started(engine)
    task = asyncio.create_task(collect(running.generate(make_request("r", [1] * 9, 50))))
    await asyncio.to_thread(model.entered.acquire)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    model.open()
    await running.until_idle()
    assert engine.pool.free_count == engine.pool.num_blocks
    assert engine.stats().steps == 1


async def test_thousand_cancelled_streams_leave_nothing(started):
    engine = make_engine(blocks=40, max_queue=100)
    running = started(engine)

    async def take(number: int) -> None:
        async with aclosing(running.generate(make_request("r", [number % 60] * 9, 12))) as stream:
            async for _ in stream:
                if number % 3:
                    return

    for start in range(0, 1000, 50):
        tasks = [asyncio.create_task(take(number)) for number in range(start, start + 50)]
        await asyncio.sleep(0)
        for task in tasks[::7]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results), results
        await running.until_idle()
    assert running._streams == {}
    assert engine.pool.free_count == engine.pool.num_blocks
    engine.scheduler.check()


async def test_refusals_come_before_the_first_output(started):
    model = GatedModel()
    running = started(make_engine(model=model, max_sequences=1, max_queue=1))
    with pytest.raises(RequestRejected, match="no tokens"):
        await anext(running.generate(make_request("r", [])))
    wanted = StructuredOutput(StructuredKind.JSON_OBJECT)
    with pytest.raises(RequestRejected, match="structured_output"):
        await anext(running.generate(make_request("r", [1], structured_output=wanted)))
    with pytest.raises(RequestRejected, match="logit_bias"):
        await anext(running.generate(make_request("r", [1], logit_bias={99: 1.0})))
    runs = asyncio.create_task(collect(running.generate(make_request("runs", [1], 3))))
    await asyncio.to_thread(model.entered.acquire)
    waits = asyncio.create_task(collect(running.generate(make_request("waits", [2], 3))))
    await asyncio.sleep(0)
    # Refused although the engine's thread is busy in a step.
    with pytest.raises(QueueFull) as caught:
        await anext(running.generate(make_request("refused", [3], 3)))
    assert caught.value.retry_after_seconds > 0
    model.open()
    assert len(joined(await runs)) == len(joined(await waits)) == 3


async def test_constraint_is_compiled_once_and_away_from_the_loop(started):
    compiled = []

    class Anything:
        mask_words = 2
        is_finished = False

        def copy(self):
            return self

        def fill_mask(self, row):
            row[:] = -1

        def accept(self, token_id):
            pass

    def compile_grammar(wanted):
        compiled.append((wanted, threading.current_thread()))
        return Anything()

    running = started(make_engine(), compile_grammar=compile_grammar)
    wanted = StructuredOutput(StructuredKind.REGEX, "a*")
    outputs = await collect(running.generate(make_request("r", [1], 3, n=2, structured_output=wanted)))
    assert len(joined(outputs)) == 6
    assert [entry[0] for entry in compiled] == [wanted]
    assert compiled[0][1] not in (threading.main_thread(), running._thread)


async def test_deadline_reaches_the_consumer(started):
    engine = make_engine()
    running = started(engine)
    outputs = await collect(running.generate(make_request("r", [1], 5, deadline=engine._clock() - 1)))
    assert [(o.finish_reason, o.stop_reason) for o in outputs] == [(FinishReason.ABORT, AbortCause.DEADLINE)]


async def test_drain_waits_for_running_requests_and_refuses_new_ones(started):
    model = GatedModel()
    running = started(make_engine(model=model))
    task = asyncio.create_task(collect(running.generate(make_request("r", [1], 5))))
    await asyncio.to_thread(model.entered.acquire)
    draining = asyncio.create_task(running.drain(60))
    await asyncio.sleep(0)
    with pytest.raises(EngineUnavailable, match="draining"):
        await anext(running.generate(make_request("late", [1])))
    model.open()
    assert await draining
    assert len(joined(await task)) == 5


async def test_drain_ends_what_is_left_when_time_is_up(started):
    model = GatedModel()
    running = started(make_engine(model=model))
    task = asyncio.create_task(collect(running.generate(make_request("r", [1], 5))))
    await asyncio.to_thread(model.entered.acquire)
    assert not await running.drain(0)
    model.open()
    last = (await task)[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.ABORT, AbortCause.SHUTDOWN)
    assert last.request_finished


async def test_stop_ends_streams_and_thread(started):
    model = GatedModel()
    running = started(make_engine(model=model))
    task = asyncio.create_task(collect(running.generate(make_request("r", [1], 50))))
    await asyncio.to_thread(model.entered.acquire)
    model.gate.release()
    running.stop()
    assert not running._thread.is_alive()
    with pytest.raises(EngineUnavailable, match="stopped"):
        await task
    with pytest.raises(EngineUnavailable, match="stopped"):
        await anext(running.generate(make_request("late", [1])))


async def test_failed_step_ends_all_streams_and_is_reported(started):
    model = HashModel()
    model.fail_at_step = 3
    fatal = asyncio.get_running_loop().create_future()
    running = started(make_engine(model=model, max_sequences=2), on_fatal=fatal.set_result)
    tasks = [asyncio.create_task(collect(running.generate(make_request("r", [n], 9)))) for n in range(5)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineUnavailable) for result in results)
    assert "the model broke" in str(results[0])
    assert str(await fatal) == "the model broke"
    with pytest.raises(EngineUnavailable, match="has failed"):
        await anext(running.generate(make_request("late", [1])))


async def test_what_a_step_made_comes_although_the_next_one_fails(started):
    model = HashModel()
    model.fail_at_step = 2
    running = started(make_engine(model=model))
    outputs = []

    async def read() -> None:
        async for output in running.generate(make_request("a", [1, 2, 3], 5)):
            outputs.append(output)

    with pytest.raises(EngineUnavailable, match="the model broke"):
        await read()
    assert len(joined(outputs)) == 1


async def test_a_step_is_handed_over_while_the_next_one_computes(started):
    model = GatedModel()
    running = started(make_engine(model=model))
    async with aclosing(running.generate(make_request("a", [1, 2, 3], 3))) as outputs:
        first = asyncio.ensure_future(anext(outputs))
        await asyncio.to_thread(model.entered.acquire)
        await model.let(1)
        # The model holds the second step.
        assert len((await first).token_ids) == 1
        model.open()
        assert [len(output.token_ids) async for output in outputs]


async def test_corrupt_pool_is_found_while_idle(started):
    engine = make_engine()
    fatal = asyncio.get_running_loop().create_future()
    running = started(engine, on_fatal=fatal.set_result)
    engine.pool._blank.pop()
    assert isinstance(await fatal, PoolCorrupt)
    with pytest.raises(EngineUnavailable):
        await anext(running.generate(make_request("late", [1])))


async def test_stats_come_after_steps_and_while_idle():
    loop = asyncio.get_running_loop()
    seen: asyncio.Queue = asyncio.Queue()
    running = AsyncEngine(
        make_engine(),
        on_stats=lambda stats: loop.call_soon_threadsafe(seen.put_nowait, stats),
        heartbeat_seconds=0.01,
    )
    running.start()
    assert (await seen.get()).steps == 0
    await collect(running.generate(make_request("r", [1], 4)))
    while (stats := await seen.get()).steps < 4:
        pass
    assert stats.generated_tokens == 4
    assert (await seen.get()) == stats
    running.stop()


async def test_engine_that_was_not_started_refuses():
    with pytest.raises(EngineUnavailable, match="not started"):
        await anext(AsyncEngine(make_engine()).generate(make_request("r", [1])))
