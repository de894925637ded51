"""Change the number of workers of a running server: cores are shared out anew, and every worker is replaced without
refusing a request, over the same weights. SIGTTIN and SIGTTOU to the launcher add and remove one."""

from __future__ import annotations

import argparse
import sys

from service.cli.control_client import add_server_flags, call_control, runtime_dir_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `numaserve scale`."""
    add_server_flags(parser)
    parser.add_argument("workers", type=int, metavar="WORKERS", help="workers in all, spread over the nodes")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for the answer (default: 600)"
    )


def run(args: argparse.Namespace) -> int:
    """0 when so many workers serve, else 1."""
    from numaserve.v1 import control_pb2

    try:
        request = control_pb2.SetWorkersRequest(workers=args.workers)
        response = call_control(runtime_dir_from(args), "SetWorkers", request, args.timeout)
    except (ConnectionError, ValueError) as error:
        print(f"numaserve scale: {error}", file=sys.stderr)
        return 1
    print(f"{response.workers} workers serve")
    for note in response.notes:
        print(f"note: {note}")
    return 0
