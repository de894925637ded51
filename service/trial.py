"""A trial: a worker answers a short request of its own before anybody may ask it."""

from __future__ import annotations

import math
import time
from contextlib import aclosing

from service.engine.async_engine import AsyncEngine
from service.engine.request import EngineRequest, FinishReason, SamplingParams

_PROMPT_TOKENS = 8
_ANSWER_TOKENS = 4


class TrialFailed(ValueError):
    """The weights do not answer as weights should."""


async def try_out(engine: AsyncEngine, vocab_size: int, context_length: int) -> None:
    """Generate a few tokens greedily from ids spread over the vocabulary; raises TrialFailed.

    Logits that are not numbers come from damaged weights, or from an arithmetic that does not suit them.
    """
    answer_tokens = max(1, min(_ANSWER_TOKENS, context_length - _PROMPT_TOKENS))
    prompt = tuple(vocab_size * index // _PROMPT_TOKENS for index in range(_PROMPT_TOKENS))
    request = EngineRequest(
        "trial",
        prompt[: max(1, context_length - answer_tokens)],
        SamplingParams(answer_tokens, temperature=0.0, ignore_eos=True, logprobs=0),
        time.monotonic(),
    )
    tokens: list[int] = []
    try:
        async with aclosing(engine.generate(request)) as outputs:
            async for output in outputs:
                tokens += output.token_ids
                if output.finish_reason is FinishReason.ABORT:
                    raise TrialFailed(
                        "the trial request ended in an error; are its logits finite? See the log"
                    )
                for position in output.logprobs:
                    if position.chosen is None or not math.isfinite(position.chosen.logprob):
                        raise TrialFailed("the trial request got logits that are not finite numbers")
    except TrialFailed:
        raise
    except Exception as error:
        raise TrialFailed(f"the trial request failed: {type(error).__name__}: {error}") from error
    if len(tokens) != answer_tokens:
        raise TrialFailed(f"the trial request got {len(tokens)} tokens instead of {answer_tokens}")
