"""Turns the sampling fields of an InferRequest into SamplingParams, noting every value out of range."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable

from numaserve.v1 import inference_pb2
from service.engine.request import SamplingParams
from service.served_model import GREEDY_BELOW_TEMPERATURE, ServedModel
from service.servicers.errors import Violations
from service.servicers.structured_output import structured_output

MAX_COMPLETIONS = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LISTED_IDS = 5


def sampling_params(
    request: inference_pb2.InferRequest, model: ServedModel, max_tokens: int, violations: Violations
) -> SamplingParams:
    """Sampling values of `request`, `model`'s defaults for absent ones; `max_tokens` is the settled limit.

    What is wrong goes to `violations`; the result is meant for use only when nothing is.
    """
    defaults = model.sampling_defaults
    temperature = _number(request, "temperature", defaults.temperature, violations, low=0)
    top_k = request.top_k if request.HasField("top_k") else defaults.top_k
    violations.require(top_k >= -1, "top_k", f"is {top_k}, must be -1, 0 or more")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_min_tokens(request, max_tokens, violations),
        temperature=temperature if temperature >= GREEDY_BELOW_TEMPERATURE else 0.0,
        top_p=_number(request, "top_p", defaults.top_p, violations, above=0, high=1),
        top_k=top_k if 0 < top_k < model.vocab_size else 0,
        min_p=_number(request, "min_p", defaults.min_p, violations, low=0, high=1),
        typical_p=_number(request, "typical_p", defaults.typical_p, violations, above=0, high=1),
        repetition_penalty=_number(
            request, "repetition_penalty", defaults.repetition_penalty, violations, above=0
        ),
        presence_penalty=_number(request, "presence_penalty", 0.0, violations, low=-2, high=2),
        frequency_penalty=_number(request, "frequency_penalty", 0.0, violations, low=-2, high=2),
        logit_bias=_logit_bias(request, model.vocab_size, violations),
        seed=request.seed if request.HasField("seed") else secrets.randbits(64),
        n=_completions(request, violations),
        stop=_stop_strings(request, violations),
        stop_token_ids=_stop_token_ids(request, model.vocab_size, violations),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        logprobs=_logprobs(request, "logprobs", violations),
        prompt_logprobs=_logprobs(request, "prompt_logprobs", violations),
        structured_output=structured_output(request, violations),
    )


def check_token_ids(ids: Iterable[int], vocab_size: int, field: str, violations: Violations) -> bool:
    """Note the ids not in [0, vocab_size), the first few by their place; returns whether there are none."""
    bad = [(place, token) for place, token in enumerate(ids) if not 0 <= token < vocab_size]
    for place, token in bad[:MAX_LISTED_IDS]:
        violations.add(
            f"{field}[{place}]", f"is {token}, not a token id of this model (0 to {vocab_size - 1})"
        )
    if len(bad) > MAX_LISTED_IDS:
        violations.add(field, f"{len(bad) - MAX_LISTED_IDS} more ids are out of range")
    return not bad


def _number(
    request: inference_pb2.InferRequest,
    name: str,
    default: float,
    violations: Violations,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
) -> float:
    """The field's value, or `default`; must be finite, `low` or more, above `above` and at most `high`."""
    if not request.HasField(name):
        return default
    value = float(getattr(request, name))
    if math.isfinite(value) and low <= value <= high and value > above:
        return value
    bounds = []
    if above > -math.inf:
        bounds.append(f"above {above:g}")
    if low > -math.inf:
        bounds.append(f"{low:g} or more")
    if high < math.inf:
        bounds.append(f"at most {high:g}")
    violations.add(name, f"is {value:g}, must be a finite number, {' and '.join(bounds)}")
    return default


def _min_tokens(request: inference_pb2.InferRequest, max_tokens: int, violations: Violations) -> int:
    violations.require(request.min_tokens >= 0, "min_tokens", f"is {request.min_tokens}, must be 0 or more")
    violations.require(
        request.min_tokens <= max_tokens,
        "min_tokens",
        f"is {request.min_tokens}, more than the {max_tokens} tokens that the answer may have",
    )
    return request.min_tokens


def _completions(request: inference_pb2.InferRequest, violations: Violations) -> int:
    n = request.n if request.HasField("n") else 1
    violations.require(1 <= n <= MAX_COMPLETIONS, "n", f"is {n}, must be 1 to {MAX_COMPLETIONS}")
    return n


def _logit_bias(
    request: inference_pb2.InferRequest, vocab_size: int, violations: Violations
) -> dict[int, float]:
    biases = dict(request.logit_bias)
    bad_ids = sorted(token for token in biases if not 0 <= token < vocab_size)
    bad_values = sorted(token for token, bias in biases.items() if not -100 <= bias <= 100)
    for token in bad_ids[:MAX_LISTED_IDS]:
        violations.add(
            f"logit_bias[{token}]", f"{token} is not a token id of this model (0 to {vocab_size - 1})"
        )
    for token in bad_values[:MAX_LISTED_IDS]:
        violations.add(f"logit_bias[{token}]", f"is {biases[token]:g}, must be -100 to 100")
    hidden = len(bad_ids[MAX_LISTED_IDS:]) + len(bad_values[MAX_LISTED_IDS:])
    violations.require(hidden == 0, "logit_bias", f"{hidden} more entries are out of range")
    return biases


def _stop_strings(request: inference_pb2.InferRequest, violations: Violations) -> tuple[str, ...]:
    count = len(request.stop)
    violations.require(
        count <= MAX_STOP_STRINGS, "stop", f"has {count} strings, at most {MAX_STOP_STRINGS} are allowed"
    )
    for place, text in enumerate(request.stop[:MAX_STOP_STRINGS]):
        violations.require(bool(text), f"stop[{place}]", "is empty")
        violations.require(
            len(text) <= MAX_STOP_LENGTH,
            f"stop[{place}]",
            f"has {len(text)} characters, at most {MAX_STOP_LENGTH} are allowed",
        )
    return tuple(dict.fromkeys(request.stop))


def _stop_token_ids(
    request: inference_pb2.InferRequest, vocab_size: int, violations: Violations
) -> frozenset[int]:
    check_token_ids(request.stop_token_ids, vocab_size, "stop_token_ids", violations)
    return frozenset(request.stop_token_ids)


def _logprobs(request: inference_pb2.InferRequest, name: str, violations: Violations) -> int | None:
    if not request.HasField(name):
        return None
    count: int = getattr(request, name)
    violations.require(0 <= count <= MAX_LOGPROBS, name, f"is {count}, must be 0 to {MAX_LOGPROBS}")
    return count
