"""What a consumer gets of a stream's outputs, whether it waits for them, lags, or goes away."""

import asyncio
import gc
import logging

import pytest

from service.engine.output_stream import OutputStream
from service.engine.request import FinishReason, RequestOutput, RequestSummary


def output(index: int, token: int, **more: object) -> RequestOutput:
    return RequestOutput("key", index, chr(token), (token,), **more)


async def test_a_waiting_consumer_is_handed_each_output_under_the_clients_id() -> None:
    stream = OutputStream("r")
    for token in (97, 98):
        taken = asyncio.ensure_future(stream.take())
        await asyncio.sleep(0)
        assert not taken.done()
        stream.put(output(0, token))
        assert await taken == RequestOutput("r", 0, chr(token), (token,))


async def test_what_comes_before_a_woken_consumer_runs_is_kept_in_order() -> None:
    stream = OutputStream("r")
    first = stream.take()
    for token in (97, 98, 99):
        stream.put(output(0, token))
    assert (await first).text == "a"
    assert await stream.take() == RequestOutput("r", 0, "bc", (98, 99))


async def test_a_lagging_consumer_gets_one_output_of_each_completion_the_last_one_last() -> None:
    stream = OutputStream("r")
    summary = RequestSummary(1, 4)
    for item in (
        output(0, 97),
        output(1, 98),
        output(1, 99, finish_reason=FinishReason.LENGTH),
        output(0, 100, finish_reason=FinishReason.STOP, summary=summary),
    ):
        stream.put(item)
    assert await stream.take() == RequestOutput("r", 1, "bc", (98, 99), finish_reason=FinishReason.LENGTH)
    last = await stream.take()
    assert last == RequestOutput("r", 0, "ad", (97, 100), finish_reason=FinishReason.STOP, summary=summary)
    assert last.request_finished


@pytest.mark.parametrize("waits", [True, False])
async def test_an_error_comes_after_everything_that_was_made(waits: bool) -> None:
    stream = OutputStream("r")
    taken = stream.take() if waits else None
    stream.put(output(0, 97))
    stream.fail(RuntimeError("gone"))
    assert (await (taken or stream.take())).text == "a"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="gone"):
            await stream.take()


async def test_an_error_wakes_who_waits() -> None:
    stream = OutputStream("r")
    taken = stream.take()
    stream.fail(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        await taken


async def test_a_consumer_that_was_cancelled_takes_nothing_from_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def consume(stream: OutputStream) -> RequestOutput:
        return await stream.take()

    stream = OutputStream("r")
    consumer = asyncio.create_task(consume(stream))
    await asyncio.sleep(0)
    consumer.cancel()
    await asyncio.wait([consumer])
    stream.put(output(0, 97))
    assert (await stream.take()).text == "a"

    # An error that its consumer does not wait for any more is nothing to complain of.
    consumer = asyncio.create_task(consume(stream))
    await asyncio.sleep(0)
    stream.fail(RuntimeError("gone"))
    consumer.cancel()
    await asyncio.wait([consumer])
    assert consumer.cancelled()
    del consumer, stream
    with caplog.at_level(logging.ERROR, logger="asyncio"):
        gc.collect()
    assert not caplog.records
