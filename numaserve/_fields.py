"""Turns keyword arguments into request messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from numaserve.v1 import inference_pb2

EmbedInputs = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Message = inference_pb2.ChatMessage | Mapping[str, str] | tuple[str, str]


def infer_request(fields: Mapping[str, Any]) -> inference_pb2.InferRequest:
    """An InferRequest with `fields` set; None stands for "left out".

    `messages` takes ChatMessage, {"role": ..., "content": ...} or (role, content). `stop` takes one string or
    several. `structured_output` takes a StructuredOutput or {kind: value}, where a JSON schema may be a dict
    and a choice a list. Raises TypeError for an unknown field, TypeError or ValueError for a value of another
    type.
    """
    given = _given_fields(inference_pb2.InferRequest, fields)
    if "messages" in given:
        given["messages"] = chat_messages(given["messages"])
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if isinstance(given.get("structured_output"), Mapping):
        given["structured_output"] = _structured_output(given["structured_output"])
    return inference_pb2.InferRequest(**given)


def embed_request(inputs: EmbedInputs, pooling: str, fields: Mapping[str, Any]) -> inference_pb2.EmbedRequest:
    """An EmbedRequest; `inputs` is a text, a list of token ids, or several of either.

    Raises TypeError for an unknown field, TypeError or ValueError for a value of another type.
    """
    given = _given_fields(inference_pb2.EmbedRequest, fields)
    poolings = {"mean": inference_pb2.POOLING_MEAN, "last": inference_pb2.POOLING_LAST}
    if pooling not in poolings:
        raise ValueError(f'pooling is {pooling!r}, must be "mean" or "last"')
    is_one = isinstance(inputs, str) or (len(inputs) > 0 and isinstance(inputs[0], int))
    several: Sequence[Any] = [inputs] if is_one else inputs
    return inference_pb2.EmbedRequest(
        inputs=[
            inference_pb2.EmbedInput(text=one)
            if isinstance(one, str)
            else inference_pb2.EmbedInput(token_ids=one)
            for one in several
        ],
        pooling=poolings[pooling],
        **given,
    )


def _given_fields(message: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with a value. Raises TypeError for one that the message does not have."""
    known = message.DESCRIPTOR.fields_by_name
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given:
        if name not in known:
            raise TypeError(f"{message.DESCRIPTOR.name} has no field {name!r}; it has {', '.join(known)}")
    return given


def chat_messages(messages: Iterable[Message]) -> list[inference_pb2.ChatMessage]:
    """ChatMessages from any of the accepted forms."""
    return [_chat_message(message) for message in messages]


def _chat_message(message: Message) -> inference_pb2.ChatMessage:
    if isinstance(message, inference_pb2.ChatMessage):
        return message
    if isinstance(message, Mapping):
        return inference_pb2.ChatMessage(**message)
    role, content = message
    return inference_pb2.ChatMessage(role=role, content=content)


def _structured_output(given: Mapping[str, Any]) -> inference_pb2.StructuredOutput:
    values = dict(given)
    if isinstance(values.get("json_schema"), Mapping):
        values["json_schema"] = json.dumps(values["json_schema"])
    if isinstance(values.get("choice"), list | tuple):
        values["choice"] = inference_pb2.Choices(choices=values["choice"])
    return inference_pb2.StructuredOutput(**values)
