"""The control process: the Control service on a unix socket, fed by the launcher, the board and /proc.

It starts as `python -m service.control FD`. It holds nothing that anybody needs: when it dies the launcher starts another.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Collection

import grpc

from numaserve.v1 import control_pb2, control_pb2_grpc
from placement.board import Board, BoardRow, WorkerState
from placement.listen import format_address
from placement.logs import configure_logging
from placement.messages import Channel, ControlConfig, SegmentState, ServerState, WorkerPlace
from placement.orders import DrainOrder, OrderDone, ReloadOrder, ScaleOrder
from placement.residency import ProcessMemory, process_memory
from placement.segment import MEMFD_PREFIX
from placement.verification import verify_cache
from service.metrics import MetricsServer
from service.servicers.errors import FieldViolation, InvalidRequest, abort, abort_invalid
from service.servicers.reflection import ReflectionServicer
from service.verify import misplaced_segments, node_pages, verify

log = logging.getLogger("numaserve.control")

SERVICE_NAME = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name


def memory_of(pid: int, weights: Collection[str], kv_address: int = 0) -> ProcessMemory | None:
    """Memory of one process, None when it is gone or may not be looked at. `weights` name the mappings that hold them."""
    try:
        return process_memory(pid, weights, kv_address)
    except OSError:
        return None


def segment_status(state: SegmentState) -> control_pb2.SegmentStatus:
    """One segment as GetStatus reports it."""
    return control_pb2.SegmentStatus(
        unit=state.unit,
        bytes=state.total_bytes,
        digest=state.digest,
        verdict=state.verdict,
        explanation=state.explanation,
        pages=[control_pb2.NodePages(node=node, pages=pages) for node, pages in state.pages],
        dtype=state.dtype,
        load_seconds=state.seconds,
        nodes=state.memory_nodes,
    )


def worker_status(
    place: WorkerPlace, row: BoardRow, memory: ProcessMemory | None
) -> control_pb2.WorkerStatus:
    """One worker's place as GetStatus reports it."""
    cache = verify_cache(place, row)
    absent = "drained" if place.drained else "stopped"
    state = WorkerState(row.state).name.lower() if place.pid else absent
    return control_pb2.WorkerStatus(
        worker=place.index,
        pid=place.pid,
        unit=place.unit,
        state=state,
        cpus=place.cpus,
        running=row.running,
        waiting=row.waiting,
        kv_blocks_total=row.kv_blocks_total,
        kv_blocks_free=row.kv_blocks_free,
        prompt_tokens=row.prompt_tokens,
        generated_tokens=row.generated_tokens,
        cached_tokens=row.cached_tokens,
        preemptions=row.preemptions,
        requests=row.requests,
        pss_bytes=-1 if memory is None else memory.pss,
        weights_pss_bytes=-1 if memory is None else memory.weights_pss,
        kv_pss_bytes=-1 if memory is None else memory.kv_pss,
        kv_cache_bytes=place.kv_cache_bytes,
        restarts=place.restarts,
        address=place.address,
        tcp_address=place.tcp_address,
        kv_nodes=cache.nodes,
        kv_verdict=cache.verdict.kind.value,
        kv_explanation=cache.verdict.explanation,
        generation=place.generation,
        kv_pages=[pages for sight in cache.sights for pages in node_pages(sight.residency)],
    )


class ControlServicer(control_pb2_grpc.ControlServicer):
    """Answers from the newest state that the launcher told, and passes orders on to it."""

    def __init__(self, board: Board, channel: Channel) -> None:
        self._board = board
        self._channel = channel
        self._numbers = itertools.count(1)
        self._orders: dict[int, asyncio.Future[OrderDone]] = {}
        self.state: ServerState | None = None

    async def GetStatus(
        self, _: control_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetStatusResponse:
        """Workers, segments and memory; reading smaps takes milliseconds, so it happens in a thread."""
        return await asyncio.to_thread(self._measure, await self._known_state(context))

    async def Verify(
        self, request: control_pb2.VerifyRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.VerifyResponse:
        """Where pages are now; see service.verify.

        A segment is repaired by a reload, which goes on when the caller leaves.
        """
        state = await self._known_state(context)
        answer = await asyncio.to_thread(verify, state, self._read_row, request.repair)
        if not request.repair or not misplaced_segments(answer):
            return answer
        done = await self._order(ReloadOrder(next(self._numbers), ""), context)
        after = await asyncio.to_thread(verify, await self._known_state(context), self._read_row, True)
        for check in after.checks:
            if check.kind == "segment":
                check.repair = f"the weights were loaded anew, as generation {done.generation}"
        return after

    async def ReloadModel(
        self, request: control_pb2.ReloadModelRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.ReloadModelResponse:
        """Goes on when the caller leaves."""
        done = await self._order(ReloadOrder(next(self._numbers), request.model_dir), context)
        state = await self._known_state(context)
        return control_pb2.ReloadModelResponse(
            generation=done.generation,
            model_dir=state.model_dir,
            digests=[segment.digest for segment in state.segments],
            notes=done.notes,
        )

    async def SetWorkers(
        self, request: control_pb2.SetWorkersRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.SetWorkersResponse:
        """Goes on when the caller leaves."""
        if request.workers < 1:
            problem = f"must be 1 or more, not {request.workers}"
            await abort_invalid(context, InvalidRequest([FieldViolation("workers", problem)]))
        done = await self._order(ScaleOrder(next(self._numbers), request.workers), context)
        return control_pb2.SetWorkersResponse(
            generation=done.generation, workers=request.workers, notes=done.notes
        )

    async def Drain(
        self, request: control_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.DrainResponse:
        """Goes on when the caller leaves."""
        target = request.WhichOneof("target")
        problem = "must be given, or node" if target is None else "must be 0 or more"
        if target is None or getattr(request, target) < 0:
            await abort_invalid(context, InvalidRequest([FieldViolation(target or "worker", problem)]))
        named = {target: getattr(request, target)} if target is not None else {}
        await self._order(DrainOrder(next(self._numbers), undo=request.undo, **named), context)
        return control_pb2.DrainResponse()

    async def _known_state(self, context: grpc.aio.ServicerContext) -> ServerState:
        if self.state is None:
            await abort(context, grpc.StatusCode.UNAVAILABLE, "the server is starting")
        return self.state

    async def _order(
        self, order: ReloadOrder | ScaleOrder | DrainOrder, context: grpc.aio.ServicerContext
    ) -> OrderDone:
        """Have the launcher carry it out; ends the call with the reason when it does not."""
        answer = self._orders[order.number] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(order)
            done = await answer
        finally:
            del self._orders[order.number]
        if done.code == "INVALID_ARGUMENT":
            await abort_invalid(context, InvalidRequest([FieldViolation(done.field, done.message)]))
        if done.code:
            await abort(context, grpc.StatusCode[done.code], done.message)
        return done

    def on_done(self, done: OrderDone) -> None:
        """The launcher says what became of an order."""
        answer = self._orders.get(done.number)
        if answer is not None and not answer.done():
            answer.set_result(done)

    async def measure_now(self) -> control_pb2.GetStatusResponse | None:
        """What GetStatus would answer; None before the launcher has told anything."""
        return None if self.state is None else await asyncio.to_thread(self._measure, self.state)

    def _read_row(self, row: int) -> BoardRow:
        return self._board.read(row) if row >= 0 else BoardRow()

    def _measure(self, state: ServerState) -> control_pb2.GetStatusResponse:
        rows = [self._read_row(place.row) for place in state.workers]
        weights = (MEMFD_PREFIX, *(file[0] for segment in state.segments for file in segment.files))
        memories = [
            memory_of(place.pid, weights, row.kv_cache_address) if place.pid else None
            for place, row in zip(state.workers, rows, strict=True)
        ]
        others = [memory_of(pid, weights) for pid in (state.launcher_pid, os.getpid(), *state.helper_pids)]
        known = [memory for memory in (*memories, *others) if memory is not None]
        return control_pb2.GetStatusResponse(
            version=state.version,
            model=state.model,
            state=state.state,
            launcher_pid=state.launcher_pid,
            address=state.address,
            uptime_seconds=time.monotonic() - state.started_at,
            segments=[segment_status(segment) for segment in state.segments],
            workers=[
                worker_status(place, row, memory)
                for place, row, memory in zip(state.workers, rows, memories, strict=True)
            ],
            placement_policy=state.placement_policy,
            placement_reason=state.placement_reason,
            weights_pss_bytes=sum(memory.weights_pss for memory in known),
            total_pss_bytes=sum(memory.pss for memory in known),
            generation=state.generation,
            model_dir=state.model_dir,
            change=state.change,
            change_phase=state.change_phase,
            last_error=state.last_error,
        )


async def serve(channel: Channel, config: ControlConfig, board: Board) -> None:
    """Serve until the launcher closes the channel."""
    servicer = ControlServicer(board, channel)
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(servicer, server)
    ReflectionServicer([SERVICE_NAME]).add_to_server(server)
    # gRPC removes the path that it was given when it stops, and by then that may be a successor's: it gets one of its own.
    own_path = f"{config.socket_path}.{os.getpid()}"
    server.add_insecure_port(f"unix:{own_path}")
    await server.start()
    os.replace(own_path, config.socket_path)
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()

    def on_message() -> None:
        received = channel.receive()
        if received is None:
            loop.remove_reader(channel.fileno())
            gone.set()
        elif isinstance(received[0], ServerState):
            servicer.state = received[0]
        elif isinstance(received[0], OrderDone):
            servicer.on_done(received[0])

    loop.add_reader(channel.fileno(), on_message)
    metrics = start_metrics(config, servicer, loop)
    await gone.wait()
    if metrics is not None:
        metrics.close()
    await server.stop(None)


def start_metrics(
    config: ControlConfig, servicer: ControlServicer, loop: asyncio.AbstractEventLoop
) -> MetricsServer | None:
    """Serve metrics where that is asked for; a port that is taken by now is logged, and costs the metrics alone."""
    if config.metrics_port is None:
        return None
    try:
        metrics = MetricsServer(config.metrics_host, config.metrics_port, servicer.measure_now, loop)
    except OSError as error:
        log.error(
            "--metrics-port %d: %s; no metrics are served", config.metrics_port, error.strerror or error
        )
        return None
    address = format_address(config.metrics_host, metrics.port)
    log.info("metrics on http://%s/metrics", address)
    return metrics


def main() -> None:
    """Entry point: the channel's descriptor is the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel.from_fd(int(sys.argv[1]))
    received = channel.receive()
    if received is None:
        return
    config, descriptors = received
    assert isinstance(config, ControlConfig)
    configure_logging("control", config.log_format, config.log_level)
    asyncio.run(serve(channel, config, Board(descriptors[0])))


if __name__ == "__main__":
    main()
