"""An engine, a tokenizer and a model that need no weights, for tests of what stands before the engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from service.engine.request import (
    EngineRequest,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    RequestSummary,
    TokenLogprob,
)
from service.engine.sequence import AbortCause
from service.served_model import ServedModel
from service.text.chat_template import ChatTemplate

BOS = 1
VOCAB_SIZE = 256
CONTEXT = 64
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)


class CharacterTokenizer:
    """A token per character, its code point; 1 is the BOS."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids if token != BOS or not skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        return chr(token_id)


class FakeEngine:
    """Answers each request with `answer`, one character an output, and notes what is asked of it.

    While `hold` is set, a request waits after its first output until `resume` is called. `error` is raised
    instead of answering. `abort_cause` ends requests after their first output, as the engine does. `started`
    gives the id of each request that began, `ended` those that ended and whether they were complete.
    """

    def __init__(self) -> None:
        self.answer = "hello"
        self.hold = False
        self.error: Exception | None = None
        self.abort_cause: AbortCause | None = None
        self.requests: list[EngineRequest] = []
        self.started: asyncio.Queue[str] = asyncio.Queue()
        self.ended: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
        self._resumed = asyncio.Event()

    def resume(self) -> None:
        """Let held requests go on."""
        self._resumed.set()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        finished = False
        try:
            outputs = self._outputs(request)
            self.started.put_nowait(request.request_id)
            for output in outputs:
                finished = output.request_finished
                yield output
                if self.hold and not finished:
                    await self._resumed.wait()
                if self.abort_cause is not None and not finished:
                    finished = True
                    yield RequestOutput(
                        request.request_id,
                        finish_reason=FinishReason.ABORT,
                        stop_reason=self.abort_cause,
                        summary=RequestSummary(),
                    )
                    return
        finally:
            self.ended.put_nowait((request.request_id, finished))

    def _outputs(self, request: EngineRequest) -> list[RequestOutput]:
        params = request.params
        if request.embedding is not None:
            return [self._embedding(request)]
        text = self.answer[: params.max_tokens]
        outputs = []
        for place, character in enumerate(text):
            for index in range(params.n):
                output = RequestOutput(request.request_id, index, character, (ord(character),))
                if params.logprobs is not None:
                    output.logprobs = (self._position(ord(character), params.logprobs),)
                if place == 0 and index == 0 and params.prompt_logprobs is not None:
                    rest = request.prompt_token_ids[1:]
                    output.prompt_logprobs = (
                        PositionLogprobs(None, ()),
                        *(self._position(token, params.prompt_logprobs) for token in rest),
                    )
                if place == len(text) - 1:
                    output.finish_reason = FinishReason.LENGTH
                outputs.append(output)
        outputs[-1].summary = RequestSummary(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=len(text) * params.n,
            cached_tokens=2,
            queued_seconds=0.001,
            first_token_seconds=0.002,
            total_seconds=0.004,
        )
        return outputs

    def _embedding(self, request: EngineRequest) -> RequestOutput:
        prompt = request.prompt_token_ids
        return RequestOutput(
            request.request_id,
            finish_reason=FinishReason.STOP,
            summary=RequestSummary(
                prompt_tokens=len(prompt),
                cached_tokens=1,
                embedding=[float(prompt[0]), float(len(prompt)), 0.5],
            ),
        )

    def _position(self, token: int, count: int) -> PositionLogprobs:
        top = tuple(TokenLogprob(token + rank, -float(rank + 1), rank + 1) for rank in range(count))
        return PositionLogprobs(TokenLogprob(token, -1.0, 1), top)


def make_served_model(**changes: object) -> ServedModel:
    """A model over the fakes, with `changes` to its fields."""
    model = ServedModel(
        name="tiny",
        model_type="llama",
        model_path="/models/tiny",
        dtype="float32",
        parameters=1000,
        vocab_size=VOCAB_SIZE,
        max_context_length=CONTEXT,
        eos_token_ids=(2,),
        tokenizer=CharacterTokenizer(),  # type: ignore[arg-type]
        chat_template=ChatTemplate(TEMPLATE),
        weights_digest="00ff",
        weights_bytes=4000,
        placement="bound",
        worker=3,
        pid=os.getpid(),
        unit="node0",
        nodes=(0,),
    )
    return replace(model, **changes)  # type: ignore[arg-type]
