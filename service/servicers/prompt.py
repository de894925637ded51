"""Turns what a request gives as its prompt (text, token ids or a conversation) into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numaserve.v1 import inference_pb2
from service.served_model import ServedModel
from service.servicers.errors import Violations
from service.servicers.sampling import check_token_ids
from service.text.chat_template import ChatTurn, TemplateError

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    """Token ids, the text behind them (None when ids were given), and the request field they came from."""

    token_ids: tuple[int, ...]
    text: str | None
    field: str


def infer_prompt(
    request: inference_pb2.InferRequest, model: ServedModel, violations: Violations
) -> Prompt | None:
    """The prompt of an InferRequest; None when it is at fault, which goes to `violations`."""
    given = [
        name
        for name, value in (
            ("prompt", request.prompt),
            ("prompt_token_ids", request.prompt_token_ids),
            ("messages", request.messages),
        )
        if value
    ]
    if not given:
        violations.add("prompt", "is empty: give one of prompt, prompt_token_ids and messages")
        return None
    if len(given) > 1:
        for name in given:
            violations.add(name, f"only one of {', '.join(given)} may be given")
        return None
    field = given[0]
    if field == "prompt_token_ids":
        in_range = check_token_ids(request.prompt_token_ids, model.vocab_size, field, violations)
        return Prompt(tuple(request.prompt_token_ids), None, field) if in_range else None
    if field == "messages":
        prompt = _chat_prompt(request.messages, model, violations)
    else:
        prompt = _text_prompt(request.prompt, field, True, model)
    if prompt is not None and not prompt.token_ids:
        violations.add(field, "has no tokens")
        return None
    return prompt


def tokenize_prompt(
    request: inference_pb2.TokenizeRequest, model: ServedModel, violations: Violations
) -> Prompt | None:
    """The tokens of a TokenizeRequest; None when it is at fault, which goes to `violations`."""
    if bool(request.text) == bool(request.messages):
        violations.add("text", "give exactly one of text and messages")
        return None
    if request.messages:
        return _chat_prompt(request.messages, model, violations)
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    return _text_prompt(request.text, "text", special, model)


def _text_prompt(text: str, field: str, add_special_tokens: bool, model: ServedModel) -> Prompt:
    """Tokenize `text`."""
    return Prompt(tuple(model.tokenizer.encode(text, add_special_tokens)), text, field)


def _chat_prompt(
    messages: Sequence[inference_pb2.ChatMessage], model: ServedModel, violations: Violations
) -> Prompt | None:
    """Render a conversation with the model's template and tokenize it; None when it is at fault."""
    if model.chat_template is None:
        violations.add("messages", f"model {model.name} has no chat template; give prompt instead")
        return None
    roles_known = [
        violations.require(
            message.role in ROLES,
            f"messages[{place}].role",
            f"is {message.role[:50]!r}, must be one of {', '.join(ROLES)}",
        )
        for place, message in enumerate(messages)
    ]
    if not all(roles_known):
        return None
    try:
        text = model.chat_template.render([ChatTurn(message.role, message.content) for message in messages])
    except TemplateError as error:
        violations.add("messages", str(error))
        return None
    # The template writes the special tokens itself.
    return _text_prompt(text, "messages", False, model)
