"""Serve a model until SIGTERM or SIGINT; a second signal stops at once. SIGHUP loads the weights anew, SIGTTIN and
SIGTTOU add and remove a worker. See docs/operations.md for exit codes."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections import Counter
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import cast

from placement.fd_store import Notifier
from placement.kept_server import Inheritance, NotUsable
from placement.launcher import Launcher, LauncherConfig
from placement.listen import PortUnavailable, check_free, format_address, reserve_port
from placement.logs import configure_logging
from placement.permissions import probe_permissions
from placement.plan import Plan, PlanRequest, make_plan
from placement.runtime_dir import default_runtime_dir
from placement.surroundings import EXIT_BAD_CONFIGURATION
from placement.topology import read_topology
from service.adoption import (
    adopted_sizes,
    bytes_by_node,
    matching_segments,
    model_files,
    take_over_if_any,
)
from service.backends import layout_of
from service.cli.model_flags import add_weight_flags, backend_from
from service.cli.placement_flags import add_placement_flags, parse_size, plan_request_from
from service.config import ServiceConfig
from service.loader.checkpoint import CheckpointError
from service.loader.hub import ModelNotFound, resolve_model
from service.loader.model_size import ModelSizes, measure
from service.models.config import ConfigError
from service.models.packing import Quantization
from service.replan import (
    absolute_if_folder,
    check_tokenizer,
    memory_of_processes,
    plan_beside,
    request_to_json,
)

log = logging.getLogger("numaserve.launcher")

# Imported once per unit, before any fork; what workers share beside the weights.
PRELOADED = ("service.worker", "service.loader.process")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `numaserve serve`."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", required=True, metavar="DIR", help="folder in Hugging Face layout, or a hub name"
    )
    model.add_argument(
        "--served-model-name", metavar="NAME", help="name in requests and answers (default: the folder's)"
    )
    add_weight_flags(model)
    model.add_argument(
        "--max-model-len", type=int, default=0, metavar="TOKENS", help="longest prompt and answer together"
    )
    network = parser.add_argument_group("network")
    network.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    network.add_argument("--port", type=int, default=50051, help="0 picks a free one (default: %(default)s)")
    network.add_argument(
        "--max-message-size",
        type=parse_size,
        default=64 << 20,
        metavar="SIZE",
        help="both ways (default: 64MiB)",
    )
    network.add_argument(
        "--worker-ports",
        type=int,
        metavar="FIRST",
        help="worker i also listens on port FIRST + i; 0 picks free ones, which GetStatus lists",
    )
    network.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="serve Prometheus metrics over HTTP on --host; 0 picks a free one, which the log tells (default: none)",
    )
    network.add_argument("--runtime-dir", type=Path, metavar="DIR", help="where the unix sockets lie")
    network.add_argument("--channelz", action="store_true", help="serve grpc.channelz.v1 on every port")
    add_placement_flags(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16")
    )
    engine.add_argument(
        "--block-size", type=int, default=16, metavar="TOKENS", help="tokens per KV block (default: 16)"
    )
    engine.add_argument(
        "--max-num-seqs", type=int, default=64, help="sequences that run at once, per worker (default: 64)"
    )
    engine.add_argument(
        "--max-num-batched-tokens", type=int, default=512, help="tokens per step (default: 512)"
    )
    engine.add_argument(
        "--max-queue", type=int, default=256, help="requests that wait, per worker (default: 256)"
    )
    engine.add_argument(
        "--no-prefix-caching", action="store_true", help="do not reuse keys and values of equal prefixes"
    )
    process = parser.add_argument_group("process")
    process.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="SECONDS", help="for running requests at SIGTERM"
    )
    process.add_argument(
        "--hang-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="a worker that is silent and idle for so long is replaced; 0 never (default: 60)",
    )
    process.add_argument(
        "--self-request-interval",
        type=float,
        default=15.0,
        metavar="SECONDS",
        help="a worker that answered nobody for so long asks itself for a token, and is replaced when that hangs for "
        "--hang-timeout; 0 never (default: 15)",
    )
    process.add_argument(
        "--take-over",
        action="store_true",
        help="upgrade in place: take port and weights over from the server on --port, which then ends",
    )
    process.add_argument("--log-format", choices=("text", "json"), default="text")
    process.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ValueError naming the flag whose number makes no sense."""
    for flag in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_queue"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be 1 or more, not {getattr(args, flag)}")
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be 0 to 65535, not {args.port}")
    if args.metrics_port is not None and not 0 <= args.metrics_port <= 65535:
        raise ValueError(f"--metrics-port must be 0 to 65535, not {args.metrics_port}")
    if args.worker_ports is not None and not 0 <= args.worker_ports <= 65535:
        raise ValueError(f"--worker-ports must be 0 to 65535, not {args.worker_ports}")
    if args.max_num_batched_tokens < args.max_num_seqs:
        raise ValueError(
            "--max-num-batched-tokens must be at least --max-num-seqs, or a step could not serve all"
        )
    if args.drain_timeout < 0:
        raise ValueError(f"--drain-timeout must not be negative, not {args.drain_timeout:g}")
    if args.hang_timeout != 0 and args.hang_timeout < 3:
        raise ValueError(f"--hang-timeout must be 0 or at least 3 seconds, not {args.hang_timeout:g}")
    if not 0 <= args.self_request_interval < float("inf"):
        raise ValueError(f"--self-request-interval must be 0 or more, not {args.self_request_interval:g}")
    if args.max_model_len < 0:
        raise ValueError(f"--max-model-len must be 1 or more, not {args.max_model_len}")


def context_length(args: argparse.Namespace, sizes: ModelSizes) -> int:
    """The context length to serve; raises ValueError when more is asked than the model has."""
    if args.max_model_len > sizes.context_length:
        raise ValueError(
            f"--max-model-len {args.max_model_len}: the model's context length is {sizes.context_length}"
        )
    return int(args.max_model_len) or sizes.context_length


def service_config(
    args: argparse.Namespace, model_dir: Path, context: int, backend: str, quantization: Quantization | None
) -> ServiceConfig:
    """What loaders and workers need; the port and the folder of the sockets are still open."""
    return ServiceConfig(
        model_dir=str(model_dir),
        model_name=args.served_model_name or model_dir.name,
        host=args.host,
        port=args.port,
        socket_dir="",
        dtype=args.dtype,
        backend=backend,
        quantize=quantization.format if quantization else "",
        quantize_group=quantization.group if quantization else 0,
        kv_cache_dtype=args.kv_cache_dtype,
        block_size=args.block_size,
        max_context_length=context,
        max_batch_tokens=args.max_num_batched_tokens,
        max_sequences=args.max_num_seqs,
        max_queue=args.max_queue,
        prefix_caching=not args.no_prefix_caching,
        drain_timeout=args.drain_timeout,
        max_message_bytes=args.max_message_size,
        channelz=args.channelz,
        worker_ports=args.worker_ports,
        asked_model=absolute_if_folder(args.model),
        asked_context_length=args.max_model_len,
        self_request_interval=args.self_request_interval,
        hang_timeout=args.hang_timeout,
    )


def launcher_config(
    args: argparse.Namespace, plan: Plan, request: PlanRequest, service: ServiceConfig
) -> LauncherConfig:
    """Everything that the launcher and its children need. Raises PortUnavailable."""
    # A server that hands over listens on its own until this one serves.
    if args.metrics_port and args.inheritance is None:
        check_free(args.host, args.metrics_port, "--metrics-port")
    port_holder = _port_holder(args)
    port = port_holder.getsockname()[1]
    runtime_dir = args.runtime_dir or default_runtime_dir(port)
    service = replace(service, port=port, socket_dir=str(runtime_dir))
    inheritance: Inheritance | None = args.inheritance
    units = {unit.name: unit.memory_nodes for unit in plan.units}
    return LauncherConfig(
        plan=plan,
        model=service.model_name,
        version=version("numaserve"),
        address=format_address(args.host, port),
        port_holder=port_holder,
        runtime_dir=runtime_dir,
        drain_timeout=args.drain_timeout,
        strict_memory=args.membind is not None,
        preload=PRELOADED,
        loader_entry="service.loader.process:run",
        prepare_entry="service.worker:prepare",
        worker_entry="service.worker:run",
        control_module="service.control",
        service_config=service.to_json(),
        log_format=args.log_format,
        log_level=args.log_level,
        hang_timeout=args.hang_timeout,
        metrics_host=args.host,
        metrics_port=args.metrics_port,
        plan_entry="service.replan:replan",
        plan_request=request_to_json(request),
        model_dir=service.model_dir,
        model_files=model_files(Path(service.model_dir)),
        inheritance=inheritance,
        notifier=args.notifier,
        kept=matching_segments(inheritance, units) if inheritance is not None and args.adopts else {},
    )


def _port_holder(args: argparse.Namespace) -> socket.socket:
    """The port that a server before this one held, when it is the one that is asked for; else a new one."""
    holder = args.inheritance.port_holder if args.inheritance is not None else None
    if holder is not None:
        port = holder.getsockname()[1]
        if args.port in (0, port) and args.inheritance.kept.address == format_address(args.host, port):
            return holder
        holder.close()
    return reserve_port(args.host, args.port)


def inherit(args: argparse.Namespace) -> None:
    """Set `args.inheritance` to what a server before this one left or hands over, None where there is nothing.

    Raises NotUsable when a running server does not hand over. What a service manager kept and cannot be used is
    dropped with a warning.
    """
    args.notifier, args.adopts = Notifier(), False
    try:
        args.inheritance = args.notifier.inherit(cast(dict[str, str], os.environ))
    except NotUsable as error:
        args.inheritance = None
        log.warning("what the service manager kept is not used: %s", error)
    if args.inheritance is None and args.take_over:
        runtime_dir = args.runtime_dir or default_runtime_dir(args.port)
        args.inheritance = take_over_if_any(runtime_dir, version("numaserve"))


def measure_model(
    args: argparse.Namespace, model_dir: Path, backend: str, quantization: Quantization | None
) -> ModelSizes:
    """The sizes of the model: of the segments that were left, when they are what is asked for, else of the checkpoint."""
    inheritance: Inheritance | None = args.inheritance
    if inheritance is not None:
        try:
            sizes = adopted_sizes(
                inheritance,
                model_dir,
                layout_of(backend, quantization),
                args.dtype,
                args.kv_cache_dtype,
                args.block_size,
            )
            args.adopts = True
            log.info("the weights in memory are used: %d segment(s)", len(inheritance.descriptors))
            return sizes
        except NotUsable as error:
            log.warning("the weights in memory are not used, the checkpoint is read again: %s", error)
            for descriptor in inheritance.descriptors:
                os.close(descriptor)
            inheritance.descriptors.clear()
    return measure(model_dir, args.dtype, args.kv_cache_dtype, args.block_size, backend, quantization)


def plan_server(args: argparse.Namespace, request: PlanRequest) -> Plan:
    """A plan for this host, beside a server that runs on it where one hands over."""
    inheritance: Inheritance | None = args.inheritance
    if inheritance is None:
        return make_plan(request, read_topology(), probe_permissions())
    segments, nothing = bytes_by_node(inheritance), Counter[int]()
    if args.adopts and args.placement == "auto" and args.interleave is None:
        request = replace(request, placement=inheritance.kept.policy)
    return plan_beside(
        request,
        stays=segments if args.adopts else nothing,
        goes=(nothing if args.adopts else segments) + memory_of_processes(inheritance.kept.processes),
    )


def prepare(args: argparse.Namespace) -> LauncherConfig | None:
    """Check everything that can be checked before anything starts; None when something is refused (it is logged)."""
    try:
        check_numbers(args)
        inherit(args)
        model_dir = resolve_model(args.model)
        backend, quantization = backend_from(args)
        sizes = measure_model(args, model_dir, backend, quantization)
        check_tokenizer(model_dir)
        context = context_length(args, sizes)
        request = plan_request_from(args, sizes)
        plan = plan_server(args, request)
    except (ValueError, ModelNotFound, CheckpointError, ConfigError) as error:
        log.error("%s", error)
        return None
    for note in plan.notes:
        log.info("plan: %s", note)
    for refusal in plan.refusals:
        log.error("%s: %s", refusal.subject, refusal.reason)
    if plan.refusals:
        return None
    log.info("plan: %s, because %s", plan.policy.value, plan.policy_reason)
    try:
        service = service_config(args, model_dir, context, backend, quantization)
        return launcher_config(args, plan, request, service)
    except PortUnavailable as error:
        log.error("%s", error.strerror)
        return None


def run(args: argparse.Namespace) -> int:
    """Returns the exit status of the whole service."""
    configure_logging("launcher", args.log_format, args.log_level)
    config = prepare(args)
    if config is None:
        return EXIT_BAD_CONFIGURATION
    status = Launcher(config).run()
    sys.stderr.flush()
    return status
