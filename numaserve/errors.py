"""The error that the clients raise, with the google.rpc details that the server sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DETAILS_TRAILER = "grpc-status-details-bin"


@dataclass(frozen=True)
class FieldViolation:
    """A field of the request that the server refused, and why."""

    field: str
    description: str


class InferenceError(Exception):
    """A call that failed.

    `code` is the gRPC status and `details` its message. `field_violations` names the fields at fault for
    INVALID_ARGUMENT. `retry_delay` is, in seconds, when the server wants the call again, None where it did
    not say.
    `request_id` is set where the server logged the fault under it.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        details: str,
        field_violations: tuple[FieldViolation, ...] = (),
        retry_delay: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(code, details, field_violations, retry_delay, request_id)
        self.code = code
        self.details = details
        self.field_violations = field_violations
        self.retry_delay = retry_delay
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.code.name}: {self.details}"

    @classmethod
    def from_rpc_error(cls, error: grpc.RpcError) -> InferenceError:
        """The same failure with its details read; `error` is what a call of `grpc` or `grpc.aio` raised."""
        code = error.code() or grpc.StatusCode.UNKNOWN
        status = _rich_status(error.trailing_metadata())
        violations: list[FieldViolation] = []
        retry_delay: float | None = None
        request_id = ""
        for detail in status.details:
            bad_request = error_details_pb2.BadRequest()
            retry_info = error_details_pb2.RetryInfo()
            request_info = error_details_pb2.RequestInfo()
            if detail.Unpack(bad_request):
                violations.extend(
                    FieldViolation(violation.field, violation.description)
                    for violation in bad_request.field_violations
                )
            elif detail.Unpack(retry_info):
                retry_delay = retry_info.retry_delay.ToMilliseconds() / 1000
            elif detail.Unpack(request_info):
                request_id = request_info.request_id
        return cls(code, error.details() or "", tuple(violations), retry_delay, request_id)


def _rich_status(trailers: Iterable[tuple[str, str | bytes]] | None) -> status_pb2.Status:
    for key, value in trailers or ():
        if key == DETAILS_TRAILER and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                break
    return status_pb2.Status()
