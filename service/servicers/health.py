"""The standard health service, grpc.health.v1, with a Watch that stays open."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Health of the whole server (the empty name) and of each named service, which all share one state.

    Starts as NOT_SERVING. A watcher that misses a state between two messages learns the newest one
    (https://github.com/grpc/grpc/blob/master/doc/health-checking.md).
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = frozenset(("", *service_names))
        self._status: int = _Status.NOT_SERVING
        self._closing = False
        self._watchers: set[asyncio.Event] = set()

    def set_serving(self) -> None:
        """Turn every name to SERVING and tell all watchers."""
        self._set(_Status.SERVING)

    def set_not_serving(self) -> None:
        """Turn every name to NOT_SERVING and tell all watchers."""
        self._set(_Status.NOT_SERVING)

    def close(self) -> None:
        """End all watches once each has sent the newest state."""
        self._closing = True
        self._wake_watchers()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:200]!r} here")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        changed = asyncio.Event()
        self._watchers.add(changed)
        known = request.service in self._names
        sent: int | None = None
        try:
            while True:
                changed.clear()
                closing = self._closing
                status = self._status if known else _Status.SERVICE_UNKNOWN
                if status != sent:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    sent = status
                if closing:
                    return
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _set(self, status: int) -> None:
        self._status = status
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        for changed in self._watchers:
            changed.set()
