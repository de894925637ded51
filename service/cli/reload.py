"""Load the weights of a running server anew, or those of another folder, without refusing a request. The new ones are
tried first; on any failure the old ones stay. Exits with 1 then."""

from __future__ import annotations

import argparse
import sys

from service.cli.control_client import add_server_flags, call_control, message_json, runtime_dir_from
from service.replan import absolute_if_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `numaserve reload`."""
    add_server_flags(parser)
    parser.add_argument(
        "--model", default="", metavar="DIR", help="folder or hub name (default: the one that is served)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="for the answer; the reload goes on after it (default: 3600)",
    )
    parser.add_argument("--json", action="store_true", help="print ReloadModelResponse as JSON")


def run(args: argparse.Namespace) -> int:
    """0 when the new weights serve and the old ones are gone, else 1."""
    from numaserve.v1 import control_pb2

    request = control_pb2.ReloadModelRequest(model_dir=absolute_if_folder(args.model) if args.model else "")
    try:
        response = call_control(runtime_dir_from(args), "ReloadModel", request, args.timeout)
    except ConnectionError as error:
        print(f"numaserve reload: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(message_json(response))
    else:
        digests = ", ".join(sorted({digest[:12] for digest in response.digests}))
        print(f"generation {response.generation} serves {response.model_dir}, weights {digests}")
        for note in response.notes:
            print(f"note: {note}")
    return 0
