"""Frames between siblings."""

import pytest

from service.engine.async_engine import EngineUnavailable
from service.engine.request import (
    EngineRequest,
    FinishReason,
    PositionLogprobs,
    QueueFull,
    RequestOutput,
    RequestRejected,
    RequestSummary,
    SamplingParams,
    StructuredKind,
    StructuredOutput,
    TokenLogprob,
    WorkerIdentity,
)
from service.relay.frames import Cancel, Failed, FrameReader, Hello, Output, Submit, encode

REQUEST = EngineRequest(
    "r",
    (1, 2, 3),
    SamplingParams(
        7,
        logit_bias={4: -1.5},
        stop=("a", "b"),
        stop_token_ids=frozenset({9}),
        structured_output=StructuredOutput(StructuredKind.CHOICE, choices=("x", "y")),
    ),
    arrived_at=12.5,
    deadline=13.5,
    priority=2,
    lora_name="l",
)
OUTPUT = RequestOutput(
    "r",
    1,
    "é",
    (5,),
    (PositionLogprobs(TokenLogprob(5, -0.5, 1), ()),),
    finish_reason=FinishReason.STOP,
    summary=RequestSummary(prompt_tokens=3, cached_tokens=2, total_seconds=0.25),
)
MESSAGES = [Hello(WorkerIdentity(1, 2, "node0", (0,))), Submit(0, REQUEST), Cancel(3), Output(0, OUTPUT)]


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_messages_come_out_as_they_went_in_however_the_stream_is_cut(piece: int) -> None:
    data = encode(MESSAGES[:2]) + encode(MESSAGES[2:])
    reader, got = FrameReader(), []
    for start in range(0, len(data), piece):
        got += reader.feed(data[start : start + piece])
    assert got == MESSAGES


@pytest.mark.parametrize(
    "error",
    [
        RequestRejected("prompt", "is empty"),
        QueueFull(9, 8, 1.5),
        EngineUnavailable("gone"),
        RuntimeError("x"),
    ],
)
def test_errors_keep_their_kind_and_what_they_hold(error: Exception) -> None:
    (message,) = FrameReader().feed(encode([Failed(5, error)]))
    assert isinstance(message, Failed)
    assert type(message.error) is type(error)
    assert str(message.error) == str(error)
    assert vars(message.error) == vars(error)
