"""Turns an InferRequest's `structured_output` into the engine's constraint."""

from __future__ import annotations

import json

from numaserve.v1 import inference_pb2
from service.engine.request import StructuredKind, StructuredOutput
from service.servicers.errors import Violations

FIELD = "structured_output"


def structured_output(request: inference_pb2.InferRequest, violations: Violations) -> StructuredOutput | None:
    """The constraint that the request asks for, None when it asks for none; faults go to `violations`."""
    if not request.HasField(FIELD):
        return None
    wanted = request.structured_output
    name = wanted.WhichOneof("kind")
    if name is None:
        violations.add(FIELD, "names no kind: give json_schema, json_object, regex, grammar or choice")
        return None
    kind = StructuredKind(name)
    field = f"{FIELD}.{name}"
    if kind is StructuredKind.JSON_OBJECT:
        violations.require(wanted.json_object, field, "must be true when given")
        return StructuredOutput(kind)
    if kind is StructuredKind.CHOICE:
        choices = tuple(dict.fromkeys(wanted.choice.choices))
        violations.require(bool(choices), f"{field}.choices", "is empty")
        for place, choice in enumerate(wanted.choice.choices):
            violations.require(bool(choice), f"{field}.choices[{place}]", "is empty")
        return StructuredOutput(kind, choices=choices)
    text: str = getattr(wanted, name)
    if violations.require(bool(text), field, "is empty") and kind is StructuredKind.JSON_SCHEMA:
        _check_json_schema(text, field, violations)
    return StructuredOutput(kind, text)


def _check_json_schema(text: str, field: str, violations: Violations) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        violations.add(field, f"is not JSON: {error}")
        return
    violations.require(isinstance(schema, dict | bool), field, "must be a JSON object, true or false")
