"""Starts and stops a worker's gRPC server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from grpc_channelz.v1 import _async as channelz_async
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2_grpc

from numaserve.v1 import inference_pb2_grpc
from service.served_model import ServedModel
from service.servicers import health, inference, reflection

CHANNELZ_SERVICE_NAME: str = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name

# How long the last messages and statuses may take to leave once all requests have ended.
CLOSE_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerOptions:
    """Settings of the gRPC server.

    Pings that come `min_ping_interval_seconds` or more apart are accepted, with and without calls; half of
    the 10 s that clients commonly use leaves room for jitter. `keepalive_seconds` and
    `keepalive_timeout_seconds` find peers that vanished.
    """

    max_receive_message_bytes: int = 64 * 1024 * 1024
    max_send_message_bytes: int = 64 * 1024 * 1024
    min_ping_interval_seconds: float = 5.0
    keepalive_seconds: float = 60.0
    keepalive_timeout_seconds: float = 20.0
    max_request_seconds: float | None = None
    stalled_client_seconds: float = 60.0
    reuse_port: bool = True
    reflection: bool = True
    channelz: bool = False

    def channel_arguments(self) -> list[tuple[str, int]]:
        """The settings under gRPC's own names (grpc/impl/channel_arg_names.h)."""
        return [
            ("grpc.so_reuseport", int(self.reuse_port)),
            ("grpc.max_receive_message_length", self.max_receive_message_bytes),
            ("grpc.max_send_message_length", self.max_send_message_bytes),
            ("grpc.http2.min_ping_interval_without_data_ms", round(self.min_ping_interval_seconds * 1000)),
            ("grpc.http2.max_ping_strikes", 2),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.keepalive_time_ms", round(self.keepalive_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", round(self.keepalive_timeout_seconds * 1000)),
            ("grpc.enable_channelz", int(self.channelz)),
        ]


class AddressInUse(OSError):
    """An address could not be bound; the message names it."""


class RunningServer:
    """A started server; `addresses` are those asked for, with the port that a port 0 turned into."""

    def __init__(
        self,
        server: grpc.aio.Server,
        addresses: Sequence[str],
        health_servicer: health.HealthServicer,
        inference_servicer: inference.InferenceServicer,
    ) -> None:
        self.addresses = tuple(addresses)
        self.health = health_servicer
        self._server = server
        self._inference = inference_servicer

    @property
    def answered(self) -> int:
        """Calls of the Inference service that were answered, refusals included."""
        return self._inference.answered

    async def stop(self, grace: float) -> None:
        """Drain and close: running calls get `grace` seconds, then end with UNAVAILABLE.

        Health turns NOT_SERVING first; new calls are UNAVAILABLE from then on, and clients are told to
        connect elsewhere.
        """
        self.health.set_not_serving()
        self._inference.drain()
        closing = asyncio.create_task(self._server.stop(grace + CLOSE_SECONDS))
        try:
            async with asyncio.timeout(grace):
                await self._inference.wait_idle()
        except TimeoutError:
            logger.warning("requests still run after %g s of draining; they are ended", grace)
            self._inference.stop()
        self.health.close()
        await self._server.stop(CLOSE_SECONDS)
        await closing

    async def wait_for_termination(self) -> None:
        """Return when the server has stopped."""
        await self._server.wait_for_termination()


async def start_server(
    model: ServedModel,
    engine: inference.Engine,
    addresses: Sequence[str],
    options: ServerOptions | None = None,
) -> RunningServer:
    """Serve `model` on `addresses` ("host:port" or "unix:/path") and turn health to SERVING.

    Raises AddressInUse when an address cannot be bound. Call it only in a process that forks no more.
    """
    options = options or ServerOptions()
    server = grpc.aio.server(options=options.channel_arguments())
    inference_servicer = inference.InferenceServicer(
        model,
        engine,
        max_request_seconds=options.max_request_seconds,
        stalled_client_seconds=options.stalled_client_seconds,
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(inference_servicer, server)
    health_servicer = health.HealthServicer([inference.SERVICE_NAME])
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = [inference.SERVICE_NAME, health.SERVICE_NAME]
    if options.channelz:
        channelz_pb2_grpc.add_ChannelzServicer_to_server(channelz_async.ChannelzServicer(), server)
        names.append(CHANNELZ_SERVICE_NAME)
    if options.reflection:
        reflection.ReflectionServicer(names).add_to_server(server)
    bound = [_bind(server, address) for address in addresses]
    await server.start()
    health_servicer.set_serving()
    return RunningServer(server, bound, health_servicer, inference_servicer)


def _bind(server: grpc.aio.Server, address: str) -> str:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressInUse(f"cannot listen on {address}: {error}") from error
    if address.startswith(("unix:", "unix-abstract:")):
        return address
    return f"{address.rpartition(':')[0]}:{port}"
