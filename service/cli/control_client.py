"""How commands talk to a running server's Control service. gRPC is imported only when a call is made."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement.runtime_dir import control_socket, default_runtime_dir

if TYPE_CHECKING:
    from google.protobuf.message import Message

_QUICK_RETRIES = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say which running server is meant."""
    parser.add_argument("--port", type=int, default=50051, help="port of the server (default: %(default)s)")
    parser.add_argument(
        "--runtime-dir", type=Path, metavar="DIR", help="the server's --runtime-dir, when it was given one"
    )


def runtime_dir_from(args: argparse.Namespace) -> Path:
    """The runtime folder of the server that the flags mean."""
    given: Path | None = args.runtime_dir
    return given or default_runtime_dir(args.port)


def call_control(runtime_dir: Path, method: str, request: Message, timeout: float) -> Any:
    """The answer of one unary call. Raises ConnectionError when no server answers there or the call fails."""
    import grpc

    from numaserve.v1 import control_pb2_grpc

    path = control_socket(runtime_dir)
    # The folder comes first and the socket later; a call waits for it.
    if not path.parent.exists():
        raise ConnectionError(f"no server runs there: {path} does not exist")
    with grpc.insecure_channel(f"unix:{path}", options=_QUICK_RETRIES) as channel:
        call = getattr(control_pb2_grpc.ControlStub(channel), method)
        try:
            return call(request, timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            raise ConnectionError(f"{path}: {error.code().name}: {error.details()}") from error


def message_json(message: Message) -> str:
    """A message as JSON with the names of the .proto file; fields at their defaults are printed too."""
    from google.protobuf.json_format import MessageToJson

    return MessageToJson(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
