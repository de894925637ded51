"""The trial of a worker: weights that answer pass, whatever else fails in words."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator

import pytest

from service.engine.async_engine import EngineUnavailable
from service.engine.request import (
    EngineRequest,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    TokenLogprob,
)
from service.trial import TrialFailed, try_out


class Answering:
    """Gives the tokens asked for with one log probability, or fails."""

    def __init__(
        self,
        logprob: float = -1.0,
        missing: int = 0,
        error: Exception | None = None,
        reason: FinishReason = FinishReason.LENGTH,
    ) -> None:
        self.logprob = logprob
        self.missing = missing
        self.error = error
        self.reason = reason
        self.request: EngineRequest | None = None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        self.request = request
        if self.error is not None:
            raise self.error
        count = request.params.max_tokens - self.missing
        chosen = (PositionLogprobs(TokenLogprob(1, self.logprob, 1), ()),) * count
        output = RequestOutput(request.request_id, token_ids=(1,) * count, logprobs=chosen)
        output.finish_reason = self.reason
        yield output


@pytest.mark.parametrize(("vocab", "context"), [(49152, 2048), (3, 4), (1, 1), (100, 9)])
async def test_prompt_and_answer_fit_every_model(vocab: int, context: int) -> None:
    engine = Answering()
    await try_out(engine, vocab, context)  # type: ignore[arg-type]
    assert engine.request is not None
    assert all(0 <= token < vocab for token in engine.request.prompt_token_ids)
    assert engine.request.prompt_token_ids
    if context > 1:
        assert len(engine.request.prompt_token_ids) + engine.request.params.max_tokens <= context


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Answering(math.nan), "not finite"),
        (Answering(-math.inf), "not finite"),
        (Answering(missing=4, reason=FinishReason.ABORT), "ended in an error"),
        (Answering(missing=1), "3 tokens instead of 4"),
        (Answering(error=EngineUnavailable("the engine has failed")), "EngineUnavailable: the engine has"),
    ],
)
async def test_an_answer_that_makes_no_sense_fails_in_words(engine: Answering, words: str) -> None:
    with pytest.raises(TrialFailed, match=words):
        await try_out(engine, 100, 100)  # type: ignore[arg-type]
