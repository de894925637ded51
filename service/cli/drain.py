"""Let workers of a running server finish what they run, and keep their places empty until `--undo`. They leave the port
first, so that no connection is reset. The last worker that serves is not drained: stop the server instead."""

from __future__ import annotations

import argparse
import sys

from service.cli.control_client import add_server_flags, call_control, runtime_dir_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `numaserve drain`."""
    add_server_flags(parser)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--worker", type=int, metavar="N", help="this worker")
    target.add_argument("--node", type=int, metavar="N", help="every worker whose memory is on this node")
    parser.add_argument("--undo", action="store_true", help="fill the places again")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for the answer (default: 600)"
    )


def run(args: argparse.Namespace) -> int:
    """0 when the workers have ended, or serve again; else 1."""
    from numaserve.v1 import control_pb2

    try:
        request = control_pb2.DrainRequest(worker=args.worker, node=args.node, undo=args.undo)
        call_control(runtime_dir_from(args), "Drain", request, args.timeout)
    except (ConnectionError, ValueError) as error:
        print(f"numaserve drain: {error}", file=sys.stderr)
        return 1
    what = f"worker {args.worker}" if args.worker is not None else f"node {args.node}"
    print(f"{what} serves again" if args.undo else f"{what} is drained")
    return 0
