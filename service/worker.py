"""A worker: a gRPC server and an engine over the shared weights, in a process forked from its unit's zygote."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import uvloop

from placement.binding import Binding, bind_process
from placement.board import Board, BoardRow, WorkerState
from placement.file_segment import AnySegment
from placement.logs import configure_logging
from placement.messages import (
    Channel,
    DrainWorker,
    Failed,
    ForkWorker,
    StartServing,
    TrialPassed,
    WorkerServing,
    ZygoteConfig,
    send_if_open,
)
from placement.plan import Policy
from placement.topology import read_topology
from service.config import ServiceConfig
from service.decoders import open_decoder
from service.engine.async_engine import AsyncEngine
from service.engine.engine import Engine, EngineConfig
from service.engine.kv_memory import KVMemory, allocate_kv_cache
from service.engine.picker import open_picker
from service.engine.request import EngineStats, WorkerIdentity
from service.listeners import leave_ports
from service.loader.checkpoint import read_configs
from service.models.config import ModelConfig, parse_config
from service.models.native_decoder import NativeDecoder
from service.relay.balanced_engine import BalancedEngine
from service.relay.server import RelayServer
from service.self_request import OwnRequests, SelfRequests
from service.served_model import SamplingDefaults, ServedModel
from service.server import AddressInUse, RunningServer, ServerOptions, start_server
from service.text.chat_template import ChatTemplate
from service.text.structured import StructuredOutputCompiler
from service.text.tokenizer import Tokenizer
from service.trial import try_out

log = logging.getLogger("numaserve.worker")

_FATAL_GRACE_SECONDS = 1.0
_HEARTBEAT_SECONDS = 1.0
# So long after its drain time-out a worker that still has not ended is ended by the kernel.
_END_MARGIN_SECONDS = 5.0


@dataclass(frozen=True)
class Prepared:
    """What the zygote makes once and every worker inherits: all of it is read, never written."""

    service: ServiceConfig
    unit: ZygoteConfig
    segment: AnySegment
    verdict: str
    model_config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    sampling_defaults: SamplingDefaults
    eos_token_ids: frozenset[int]
    grammars: StructuredOutputCompiler
    node_distances: Mapping[int, Mapping[int, int]]


def prepare(segment: AnySegment, unit: ZygoteConfig, verdict: str) -> Prepared:
    """Runs in the zygote: no tensor operation and no thread may start here."""
    service = ServiceConfig.from_json(unit.service_config)
    # The weights are in the segment: their files may be gone by now.
    config, generation_config = read_configs(Path(service.model_dir))
    tokenizer = Tokenizer.from_dir(Path(service.model_dir))
    template = tokenizer.chat_template
    model_config = parse_config(config, generation_config)
    eos_token_ids = end_token_ids(model_config, tokenizer)
    grammars = StructuredOutputCompiler(tokenizer, eos_token_ids)
    grammars.prepare()
    return Prepared(
        service=service,
        unit=unit,
        segment=segment,
        verdict=verdict,
        model_config=model_config,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(template, tokenizer.special_tokens) if template else None,
        sampling_defaults=SamplingDefaults.from_generation_config(generation_config),
        eos_token_ids=eos_token_ids,
        grammars=grammars,
        node_distances={node.id: node.distances for node in read_topology().nodes},
    )


def end_token_ids(config: ModelConfig, tokenizer: Tokenizer) -> frozenset[int]:
    """What ends an answer: generation_config.json's list (config.json's where that has none) and the tokenizer's EOS."""
    ids = frozenset(config.eos_token_ids) | tokenizer.eos_token_ids
    return frozenset(token_id for token_id in ids if token_id < config.vocab_size)


def kv_dtype(service: ServiceConfig, segment: AnySegment) -> torch.dtype:
    """The cache's type: as asked, or the weights'."""
    name = service.kv_cache_dtype if service.kv_cache_dtype != "auto" else segment.manifest.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class Worker:
    """One worker from fork to exit."""

    def __init__(self, prepared: Prepared, assignment: ForkWorker, channel: Channel, board: Board) -> None:
        self._prepared = prepared
        self._assignment = assignment
        self._channel = channel
        self._board = board
        self._take_row()
        self._exit_status = 0
        self._leaving = False
        self._own_requests = OwnRequests()
        self._memory = self._allocate_cache()
        _report_refusals((self._memory.binding,))
        prepared.segment.check()
        if not assignment.replaces:
            prepared.segment.populate()
        engine = self._make_engine()
        engine.pool.watcher = board.prefixes(assignment.row)
        self._engine = AsyncEngine(
            engine,
            compile_grammar=prepared.grammars.compile,
            on_stats=self._report,
            on_fatal=self._on_fatal,
        )

    def _take_row(self) -> None:
        """Say on the board who this is, and that its cache is empty."""
        row, unit = self._assignment.row, self._prepared.unit
        self._board.write(
            row,
            BoardRow(
                state=WorkerState.STARTING,
                pid=os.getpid(),
                generation=unit.generation,
                unit=unit.unit_number,
                node=self._assignment.memory_nodes[0],
            ),
        )
        self._board.prefixes(row).clear()

    def _allocate_cache(self) -> KVMemory:
        prepared, config = self._prepared, self._prepared.model_config
        return allocate_kv_cache(
            self._assignment.kv_cache_bytes,
            len(config.layers),
            prepared.service.block_size,
            config.num_kv_heads,
            config.head_dim,
            kv_dtype(prepared.service, prepared.segment),
            self._assignment.memory_nodes,
            # The weights may be spread over all nodes; a cache is used by one worker, so it lies near that.
            Policy.REPLICATE,
        )

    def _make_engine(self) -> Engine:
        prepared, config = self._prepared, self._prepared.model_config
        decoder = open_decoder(
            config, prepared.segment, self._assignment.cpus[: self._assignment.compute_threads]
        )
        return Engine(
            decoder,
            self._memory.cache,
            prepared.tokenizer,
            EngineConfig(
                context_length=prepared.service.max_context_length,
                vocab_size=config.vocab_size,
                eos_token_ids=prepared.eos_token_ids,
                max_sequences=prepared.service.max_sequences,
                max_batch_tokens=prepared.service.max_batch_tokens,
                max_queue=prepared.service.max_queue,
                # Where keys depend on the length of the whole prompt, equal prefixes do not have equal keys.
                prefix_caching=prepared.service.prefix_caching and config.length_dependent_from is None,
                weights_digest=prepared.segment.manifest.digest,
            ),
            # The decoder's own threads pick tokens too: others would spin beside them.
            picker=open_picker(decoder.pool if isinstance(decoder, NativeDecoder) else None),
        )

    def _served_model(self) -> ServedModel:
        prepared, config = self._prepared, self._prepared.model_config
        return ServedModel(
            name=prepared.service.model_name,
            model_type=config.model_type,
            model_path=prepared.service.model_dir,
            dtype=prepared.segment.manifest.dtype,
            parameters=prepared.segment.parameters,
            vocab_size=config.vocab_size,
            max_context_length=prepared.service.max_context_length,
            eos_token_ids=tuple(sorted(prepared.eos_token_ids)),
            tokenizer=prepared.tokenizer,
            chat_template=prepared.chat_template,
            weights_digest=prepared.segment.manifest.digest,
            weights_bytes=prepared.segment.length,
            placement=prepared.verdict,
            worker=self._assignment.index,
            pid=os.getpid(),
            unit=prepared.unit.unit,
            nodes=self._assignment.memory_nodes,
            sampling_defaults=prepared.sampling_defaults,
        )

    def _report(self, stats: EngineStats) -> None:
        """Runs in the engine's thread after each step: this worker's row on the board."""
        stats = self._own_requests.taken_out(stats)
        self._board.update(
            self._assignment.row,
            heartbeat_ns=time.monotonic_ns(),
            running=stats.running,
            waiting=stats.waiting,
            kv_blocks_total=stats.kv_blocks_total,
            kv_blocks_free=stats.kv_blocks_free,
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.generated_tokens,
            cached_tokens=stats.cached_tokens,
            requests=stats.requests,
            preemptions=stats.preemptions,
            steps=stats.steps,
            kv_cache_bytes=self._memory.mapping.length,
            kv_cache_address=self._memory.mapping.address,
        )

    async def _beat(self) -> None:
        """The event loop's heartbeat."""
        while True:
            self._board.set(self._assignment.row, "loop_heartbeat_ns", time.monotonic_ns())
            await asyncio.sleep(_HEARTBEAT_SECONDS)

    def _set_state(self, state: WorkerState) -> None:
        self._board.set(self._assignment.row, "state", state)

    def _on_fatal(self, error: BaseException) -> None:
        log.error("the engine failed (%s: %s); this worker is to be replaced", type(error).__name__, error)
        self._exit_status = 1
        self._stop(_FATAL_GRACE_SECONDS)

    def _leave(self, grace: float | None = None) -> None:
        """This worker alone ends: others go on, so that nobody needs to notice."""
        self._leaving = True
        self._stop(self._prepared.service.drain_timeout if grace is None else grace)

    def _stop(self, grace: float) -> None:
        if not self._stopping.done():
            self._stopping.set_result(grace)

    def _on_channel(self) -> None:
        received = self._channel.receive()
        if received is None:
            log.warning("the launcher is gone: finishing what runs, then ending")
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._stop(self._prepared.service.drain_timeout)
            return
        match received[0]:
            case StartServing():
                self._may_serve.set()
            case DrainWorker(timeout_seconds=timeout, leave_port=True):
                self._leave(timeout)
            case DrainWorker(timeout_seconds=timeout):
                self._stop(timeout)
            case unexpected:
                log.error("unexpected message from the launcher: %r", unexpected)

    async def _start_server(self) -> RunningServer:
        service = self._prepared.service
        options = ServerOptions(
            max_receive_message_bytes=service.max_message_bytes,
            max_send_message_bytes=service.max_message_bytes,
            channelz=service.channelz,
        )
        own_socket = self._own_sockets()[0]
        # A predecessor that was killed left its socket behind.
        Path(own_socket).unlink(missing_ok=True)
        host = f"[{service.host}]" if ":" in service.host else service.host
        addresses = [f"{host}:{service.port}", f"unix:{own_socket}"]
        own_port = service.worker_port(self._assignment.index)
        if own_port is not None:
            addresses.append(f"{host}:{own_port}")
        return await start_server(self._served_model(), self._balanced, addresses, options)

    async def _start_relay(self) -> RelayServer:
        """Take requests from siblings, and hand requests to them."""
        service, assignment = self._prepared.service, self._assignment
        identity = WorkerIdentity(
            assignment.index, os.getpid(), self._prepared.unit.unit, assignment.memory_nodes
        )
        relay = RelayServer(self._engine, identity)
        await relay.start(self._own_sockets()[1])
        self._balanced = BalancedEngine(
            self._engine,
            assignment.row,
            self._board,
            partial(service.relay_socket, self._prepared.unit.generation),
            self._prepared.node_distances[assignment.memory_nodes[0]],
            service.block_size,
            self._own_requests.request_id,
        )
        return relay

    async def _ask_itself(self, server: RunningServer) -> None:
        """Ask for a token now and then, and make way for another worker once no answer comes."""
        service = self._prepared.service
        if not service.self_request_interval or not service.hang_timeout:
            return
        trouble = await SelfRequests(
            partial(self._own_requests.ask, f"unix:{self._own_sockets()[0]}"),
            lambda: server.answered,
            lambda: self._engine.stats().steps,
            service.self_request_interval,
            service.hang_timeout,
        ).run()
        log.error("this worker does not answer (%s); it is to be replaced", trouble)
        faulthandler.dump_traceback(all_threads=True)
        self._exit_status = 1
        self._stop(_FATAL_GRACE_SECONDS)

    async def _passes_trial(self) -> bool:
        """Prove that the weights answer, then wait for the word to serve; False when told to end instead."""
        config = self._prepared.model_config
        await try_out(self._engine, config.vocab_size, self._prepared.service.max_context_length)
        send_if_open(self._channel, TrialPassed(os.getpid()))
        may_serve = asyncio.ensure_future(self._may_serve.wait())
        await asyncio.wait((may_serve, self._stopping), return_when=asyncio.FIRST_COMPLETED)
        return may_serve.done()

    @staticmethod
    def _ports(server: RunningServer) -> list[int]:
        """The TCP ports that it listens on."""
        tcp = (address for address in server.addresses if not address.startswith("unix:"))
        return [int(address.rpartition(":")[2]) for address in tcp]

    async def serve(self) -> int:
        """Serve until told to stop; returns the exit status."""
        loop = asyncio.get_running_loop()
        self._stopping: asyncio.Future[float] = loop.create_future()
        self._may_serve = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, self._leave)
        loop.add_reader(self._channel.fileno(), self._on_channel)
        beating = asyncio.create_task(self._beat())
        self._engine.start()
        if self._assignment.on_trial and not await self._passes_trial():
            self._engine.stop()
            return self._exit_status
        relay = await self._start_relay()
        server = await self._start_server()
        sockets = {path: os.stat(path).st_ino for path in self._own_sockets()}
        self._set_state(WorkerState.SERVING)
        tcp_address = server.addresses[2] if len(server.addresses) > 2 else ""
        send_if_open(
            self._channel,
            WorkerServing(
                os.getpid(), f"unix:{self._own_sockets()[0]}", self._memory.binding.errno, tcp_address
            ),
        )
        if self._assignment.replaces:
            # Mapping gigabytes takes longer than all else that a new worker does.
            threading.Thread(target=self._prepared.segment.populate, name="populate", daemon=True).start()
        asking = asyncio.create_task(self._ask_itself(server))
        grace = await self._stopping
        asking.cancel()
        # Whatever hangs from here on, the kernel ends this process: SIGALRM has its default action.
        signal.setitimer(signal.ITIMER_REAL, grace + _END_MARGIN_SECONDS)
        self._set_state(WorkerState.DRAINING)
        if self._leaving:
            await leave_ports(self._ports(server))
        # Siblings finish what they hand over to this worker, and this worker what it handed over to them.
        await asyncio.gather(server.stop(grace), relay.drain(grace))
        self._balanced.close()
        self._engine.stop()
        beating.cancel()
        self._set_state(WorkerState.STOPPED)
        _remove(sockets)
        return self._exit_status

    def _own_sockets(self) -> tuple[str, str]:
        service, generation, row = (
            self._prepared.service,
            self._prepared.unit.generation,
            self._assignment.row,
        )
        return service.worker_socket(generation, row), service.relay_socket(generation, row)


def _remove(sockets: Mapping[str, int]) -> None:
    """Remove sockets by path and inode number; where a successor already listens, the path is its own."""
    for path, inode in sockets.items():
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)


def _report_refusals(bindings: tuple[Binding, ...]) -> None:
    for binding in bindings:
        if binding.refused is not None:
            log.warning("%s", binding)


def run(prepared: Prepared, assignment: ForkWorker, channel: Channel, board: Board) -> None:
    """Entry point in the forked child. Exits with 2 when starting again could not help."""
    configure_logging(f"worker {assignment.index}", prepared.unit.log_format, prepared.unit.log_level)
    # A worker that hangs is sent SIGABRT: it then says where.
    faulthandler.enable(all_threads=True)
    unit = prepared.unit
    _report_refusals(bind_process(assignment.cpus, assignment.memory_nodes, unit.strict_memory))
    torch.set_num_threads(assignment.compute_threads)
    try:
        worker = Worker(prepared, assignment, channel, board)
        status = uvloop.run(worker.serve())
    except (AddressInUse, ValueError) as error:
        channel.send(Failed(str(error), permanent=True))
        raise SystemExit(2) from None
    raise SystemExit(status)
