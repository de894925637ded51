"""Measure again where the weights and KV caches of a running server are; exit with 1 when a page is remote or unknown."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from placement.cpulist import format_list
from placement.runtime_dir import default_runtime_dir, runtime_dir_of
from service.cli.control_client import call_control, message_json

if TYPE_CHECKING:
    from numaserve.v1 import control_pb2

# Counting a page takes a fraction of a microsecond, so this is enough for terabytes.
_TIMEOUT_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `numaserve verify`."""
    parser.add_argument(
        "pid", nargs="?", type=int, metavar="PID", help="the server's launcher, instead of --port"
    )
    parser.add_argument("--port", type=int, default=50051, help="port of the server (default: %(default)s)")
    parser.add_argument(
        "--runtime-dir", type=Path, metavar="DIR", help="the server's --runtime-dir, when it was given one"
    )
    parser.add_argument("--json", action="store_true", help="print VerifyResponse as JSON")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="move misplaced pages of KV caches to their nodes, and load misplaced weights anew without downtime",
    )


def render(response: control_pb2.VerifyResponse) -> str:
    """One line per segment and per KV cache, and what a repair did."""
    lines = []
    for check in response.checks:
        name = f"segment {check.unit}" if check.kind == "segment" else f"KV cache of worker {check.worker}"
        pids = ", ".join(str(process.pid) for process in check.processes if process.pages)
        measured = f" [seen in pid {pids}]" if pids else ""
        mark = "ok    " if check.local else "wrong "
        lines.append(
            f"{mark} {name} on {format_list(check.nodes)}: {check.verdict}: {check.explanation}{measured}"
        )
        if check.repair:
            lines.append(f"       repair: {check.repair}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """0 when every page is where it was wanted, else 1."""
    from numaserve.v1 import control_pb2

    try:
        if args.pid is not None:
            runtime_dir = runtime_dir_of(args.pid)
        else:
            runtime_dir = args.runtime_dir or default_runtime_dir(args.port)
        request = control_pb2.VerifyRequest(repair=args.repair)
        response = call_control(runtime_dir, "Verify", request, _TIMEOUT_SECONDS)
    except (ConnectionError, LookupError) as error:
        print(f"numaserve verify: {error.args[0]}", file=sys.stderr)
        return 1
    print(message_json(response) if args.json else render(response))
    return 0 if response.sound else 1
