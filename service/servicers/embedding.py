"""Turns an EmbedRequest into one engine request per input, and the engine's vectors into the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from numaserve.v1 import inference_pb2
from service.engine.request import (
    EmbeddingParams,
    EngineRequest,
    Pooling,
    RequestOutput,
    RequestSummary,
    SamplingParams,
)
from service.served_model import ServedModel
from service.servicers.errors import Violations
from service.servicers.sampling import check_token_ids
from service.servicers.validation import check_model_name, check_request_id

MAX_INPUTS = 2048
_POOLINGS = {
    inference_pb2.POOLING_UNSPECIFIED: Pooling.MEAN,
    inference_pb2.POOLING_MEAN: Pooling.MEAN,
    inference_pb2.POOLING_LAST: Pooling.LAST,
}


def check_embed_request(
    request: inference_pb2.EmbedRequest, model: ServedModel, request_id: str, deadline: float | None
) -> list[EngineRequest]:
    """One engine request per input; `deadline` is in `time.monotonic()` seconds.

    Raises InvalidRequest with every violation found.
    """
    arrived_at = time.monotonic()
    violations = Violations()
    check_request_id(request_id, violations)
    check_model_name(request.model, model, violations)
    violations.require(
        request.pooling in _POOLINGS,
        "pooling",
        f"is {request.pooling}, must be one of {', '.join(inference_pb2.Pooling.keys())}",
    )
    count = len(request.inputs)
    violations.require(1 <= count <= MAX_INPUTS, "inputs", f"has {count} inputs, must have 1 to {MAX_INPUTS}")
    violations.raise_if_any()
    prompts = [
        _input_tokens(given, f"inputs[{place}]", model, violations)
        for place, given in enumerate(request.inputs)
    ]
    violations.raise_if_any()
    normalize = request.normalize if request.HasField("normalize") else True
    return [
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=1),
            arrived_at=arrived_at,
            deadline=deadline,
            priority=request.priority,
            embedding=EmbeddingParams(_POOLINGS[request.pooling], normalize),
        )
        for prompt in prompts
    ]


def embed_response(
    request_id: str, model: ServedModel, outputs: Sequence[RequestOutput], served_by: inference_pb2.ServedBy
) -> inference_pb2.EmbedResponse:
    """The answer from the last output of each input's request."""
    summaries = [output.summary or RequestSummary() for output in outputs]
    return inference_pb2.EmbedResponse(
        request_id=request_id,
        model=model.name,
        embeddings=[
            inference_pb2.Embedding(values=summary.embedding, prompt_tokens=summary.prompt_tokens)
            for summary in summaries
        ],
        dimension=len(summaries[0].embedding),
        usage=inference_pb2.Usage(
            prompt_tokens=sum(summary.prompt_tokens for summary in summaries),
            cached_tokens=sum(summary.cached_tokens for summary in summaries),
        ),
        served_by=served_by,
    )


def _input_tokens(
    given: inference_pb2.EmbedInput, field: str, model: ServedModel, violations: Violations
) -> tuple[int, ...]:
    """The tokens of one input, empty when it is at fault."""
    if bool(given.text) == bool(given.token_ids):
        violations.add(field, "give exactly one of text and token_ids")
        return ()
    if given.token_ids:
        field = f"{field}.token_ids"
        if not check_token_ids(given.token_ids, model.vocab_size, field, violations):
            return ()
        tokens = tuple(given.token_ids)
    else:
        field = f"{field}.text"
        tokens = tuple(model.tokenizer.encode(given.text))
        violations.require(bool(tokens), field, "has no tokens")
    violations.require(
        len(tokens) <= model.max_context_length,
        field,
        f"has {len(tokens)} tokens, over the context length of {model.max_context_length}",
    )
    return tokens
