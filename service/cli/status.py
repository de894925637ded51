"""Show the workers, segments and memory of a running server."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from placement.cpulist import format_list
from placement.runtime_dir import default_runtime_dir
from service.cli.control_client import call_control, message_json

if TYPE_CHECKING:
    from numaserve.v1 import control_pb2

_TIMEOUT_SECONDS = 10.0
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `numaserve status`."""
    parser.add_argument("--port", type=int, default=50051, help="port of the server (default: %(default)s)")
    parser.add_argument(
        "--runtime-dir", type=Path, metavar="DIR", help="the server's --runtime-dir, when it was given one"
    )
    parser.add_argument("--json", action="store_true", help="print GetStatusResponse as JSON")
    parser.add_argument("--watch", action="store_true", help="show it again every two seconds until Ctrl-C")


def fetch_status(runtime_dir: Path, timeout: float = _TIMEOUT_SECONDS) -> control_pb2.GetStatusResponse:
    """Ask the control process. Raises ConnectionError when no server answers there."""
    from numaserve.v1 import control_pb2

    request = control_pb2.GetStatusRequest()
    response: control_pb2.GetStatusResponse = call_control(runtime_dir, "GetStatus", request, timeout)
    return response


def _mib(number_of_bytes: int) -> str:
    return "?" if number_of_bytes < 0 else f"{number_of_bytes / _MIB:.0f} MiB"


def render(status: control_pb2.GetStatusResponse) -> str:
    """The status as text for people."""
    lines = [
        f"{status.model} on {status.address}: {status.state} for {status.uptime_seconds:.0f} s "
        f"(launcher pid {status.launcher_pid}, version {status.version})",
        f"placement: {status.placement_policy}, because {status.placement_reason}",
        f"weights: {status.model_dir}, generation {status.generation}",
    ]
    if status.change:
        lines.append(f"under way: {status.change}, {status.change_phase}")
    if status.last_error:
        lines.append(f"the last change failed: {status.last_error}")
    lines.append("")
    for segment in status.segments:
        lines.append(
            f"segment {segment.unit}: {_mib(segment.bytes)} {segment.dtype}, {segment.verdict}: {segment.explanation}"
        )
    lines += ["", f"{'worker':>6} {'pid':>8} {'unit':8} {'state':9} {'cpus':8} {'running':>7} {'waiting':>7}"]
    lines[-1] += f" {'KV used':>8} {'tokens out':>10} {'PSS':>10} {'weights':>9} {'KV':>9} {'restarts':>8}"
    for worker in status.workers:
        used = worker.kv_blocks_total - worker.kv_blocks_free
        share = f"{100 * used / worker.kv_blocks_total:.0f} %" if worker.kv_blocks_total else "-"
        lines.append(
            f"{worker.worker:>6} {worker.pid:>8} {worker.unit:8} {worker.state:9} {format_list(worker.cpus):8} "
            f"{worker.running:>7} {worker.waiting:>7} {share:>8} {worker.generated_tokens:>10} "
            f"{_mib(worker.pss_bytes):>10} {_mib(worker.weights_pss_bytes):>9} {_mib(worker.kv_pss_bytes):>9} "
            f"{worker.restarts:>8}"
        )
    lines += [
        f"KV cache of worker {worker.worker}: {worker.kv_verdict}: {worker.kv_explanation}"
        for worker in status.workers
    ]
    total = sum(segment.bytes for segment in status.segments)
    lines += [
        "",
        f"weights in memory: {_mib(status.weights_pss_bytes)} of PSS over all processes, "
        f"{_mib(total)} in {len(status.segments)} segment(s); everything together: {_mib(status.total_pss_bytes)}",
    ]
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Exit 1 when no server answers."""
    runtime_dir = args.runtime_dir or default_runtime_dir(args.port)
    try:
        while True:
            status = fetch_status(runtime_dir)
            if args.json:
                print(message_json(status))
            else:
                print(
                    ("\033[2J\033[H" if args.watch and sys.stdout.isatty() else "") + render(status),
                    flush=True,
                )
            if not args.watch:
                return 0
            time.sleep(2)
    except ConnectionError as error:
        print(f"numaserve status: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
