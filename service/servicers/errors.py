"""Errors as gRPC statuses with google.rpc details, which travel in the `grpc-status-details-bin` trailer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

# gRPC drops calls whose trailers exceed 8 KiB, and base64 and percent-encoding add to these.
MAX_DETAIL_BYTES = 3600
MAX_FIELD_BYTES = 300
MAX_MESSAGE_BYTES = 500

DETAILS_TRAILER = "grpc-status-details-bin"


@dataclass(frozen=True)
class FieldViolation:
    """A field path such as `messages[1].role` or `stop_token_ids[0]`, and what is wrong there."""

    field: str
    problem: str


class InvalidRequest(ValueError):
    """A request that breaks the contract; holds every violation that was found."""

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        super().__init__("; ".join(f"{violation.field}: {violation.problem}" for violation in violations))
        self.violations = tuple(violations)


class Violations:
    """Collects what is wrong with a request, so that the client learns all of it at once."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []

    def add(self, field: str, problem: str) -> None:
        self._found.append(FieldViolation(field, problem))

    def require(self, holds: bool, field: str, problem: str) -> bool:
        """Note the violation unless `holds`; returns `holds`."""
        if not holds:
            self.add(field, problem)
        return holds

    def raise_if_any(self) -> None:
        """Raise InvalidRequest when anything was found."""
        if self._found:
            raise InvalidRequest(self._found)


def bad_request(violations: Sequence[FieldViolation]) -> error_details_pb2.BadRequest:
    """A BadRequest detail with as many violations as fit into a trailer, in the order found."""
    detail = error_details_pb2.BadRequest()
    for violation in violations:
        detail.field_violations.add(
            field=_shorten(violation.field, MAX_FIELD_BYTES),
            description=_shorten(violation.problem, MAX_FIELD_BYTES),
        )
        if detail.ByteSize() > MAX_DETAIL_BYTES:
            del detail.field_violations[-1]
            break
    return detail


def retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    """A RetryInfo detail: try again after so many seconds."""
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(max(1, round(seconds * 1000)))
    return error_details_pb2.RetryInfo(retry_delay=delay)


async def abort(
    context: grpc.aio.ServicerContext, code: grpc.StatusCode, message: str, *details: Message
) -> NoReturn:
    """End the call with this status; raises what `grpc.aio` takes as the end of a handler."""
    status = status_pb2.Status(code=code.value[0], message=_shorten(message, MAX_MESSAGE_BYTES))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailers = ((DETAILS_TRAILER, status.SerializeToString()),)
    await context.abort(code, status.message, trailers)
    raise AssertionError("abort returned")


async def abort_invalid(context: grpc.aio.ServicerContext, error: InvalidRequest) -> NoReturn:
    """End the call with INVALID_ARGUMENT and a BadRequest that names every field at fault."""
    await abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error), bad_request(error.violations))


def _shorten(text: str, limit: int) -> str:
    encoded = text.encode()
    if len(encoded) <= limit:
        return text
    return encoded[: limit - 3].decode(errors="ignore") + "…"
