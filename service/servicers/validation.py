"""Turns an InferRequest into an EngineRequest, or refuses it naming every field at fault."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from numaserve.v1 import inference_pb2
from service.engine.request import EngineRequest
from service.served_model import ServedModel
from service.servicers.errors import Violations
from service.servicers.prompt import Prompt, infer_prompt
from service.servicers.sampling import sampling_params

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")


@dataclass(frozen=True)
class CheckedRequest:
    """A request that may run, and the text to put in front of the answer (empty without `echo`)."""

    engine_request: EngineRequest
    echo_text: str


def check_infer_request(
    request: inference_pb2.InferRequest, model: ServedModel, request_id: str, deadline: float | None
) -> CheckedRequest:
    """Check all of `request`, which is to run as `request_id`; `deadline` is in `time.monotonic()` seconds.

    Raises InvalidRequest with every violation found.
    """
    arrived_at = time.monotonic()
    violations = Violations()
    check_request_id(request_id, violations)
    check_model_name(request.model, model, violations)
    prompt = infer_prompt(request, model, violations)
    max_tokens = _max_tokens(request, model, prompt, violations)
    params = sampling_params(request, model, max_tokens, violations)
    violations.raise_if_any()
    assert prompt is not None
    engine_request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        params=params,
        arrived_at=arrived_at,
        deadline=deadline,
        priority=request.priority,
    )
    return CheckedRequest(engine_request, _echo_text(request, prompt, model))


def check_request_id(request_id: str, violations: Violations) -> None:
    """A request id goes into logs and metadata, so it must be short and plain."""
    violations.require(
        REQUEST_ID.fullmatch(request_id) is not None,
        "request_id",
        "must be at most 256 printable ASCII characters without spaces",
    )


def check_model_name(name: str, model: ServedModel, violations: Violations) -> None:
    """An empty name means the served model; any other must be its own."""
    violations.require(
        name in ("", model.name), "model", f"is {name[:100]!r}; the model served here is {model.name!r}"
    )


def _max_tokens(
    request: inference_pb2.InferRequest, model: ServedModel, prompt: Prompt | None, violations: Violations
) -> int:
    """The settled limit of new tokens: what is asked for, else all that the context still holds."""
    context = model.max_context_length
    prompt_tokens = len(prompt.token_ids) if prompt else 0
    asked = request.max_tokens if request.HasField("max_tokens") else None
    if asked is not None:
        violations.require(asked >= 1, "max_tokens", f"is {asked}, must be 1 or more")
    room = context - prompt_tokens
    if room < 1:
        assert prompt is not None
        violations.add(
            prompt.field,
            f"has {prompt_tokens} tokens; with one of answer that is over the context length of {context}",
        )
    elif asked is not None and asked > room:
        violations.add(
            "max_tokens",
            f"is {asked}; with {prompt_tokens} tokens of prompt that is over the context length of {context}",
        )
    # A limit that is at fault itself must not put min_tokens at fault as well.
    if room < 1 or (asked is not None and asked < 1):
        return context
    return room if asked is None else asked


def _echo_text(request: inference_pb2.InferRequest, prompt: Prompt, model: ServedModel) -> str:
    if not request.echo:
        return ""
    if prompt.text is not None:
        return prompt.text
    return model.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
