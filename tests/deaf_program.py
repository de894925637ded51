"""`numaserve` in which a worker answers no request of `Infer` while a file `deaf-PID` with its pid is in the runtime folder.

Run it as the program of a `served.Server`. Everything else is the product as it is: engine and event loop go on.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import grpc

import service.cli.serve
import service.worker
from numaserve.v1 import inference_pb2
from placement.board import Board
from placement.launcher import LauncherConfig
from placement.messages import Channel, ForkWorker
from service.cli.main import main
from service.servicers.inference import InferenceServicer


def run(prepared: service.worker.Prepared, order: ForkWorker, channel: Channel, board: Board) -> None:
    """The worker's entry point, with a servicer that may be deaf."""
    sign = Path(prepared.service.socket_dir) / f"deaf-{os.getpid()}"
    original = InferenceServicer.Infer

    async def infer(
        self: InferenceServicer, request: inference_pb2.InferRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.InferResponse:
        if sign.exists():
            await asyncio.Event().wait()
        return await original(self, request, context)

    InferenceServicer.Infer = infer  # type: ignore[method-assign]
    service.worker.run(prepared, order, channel, board)


def _with_deaf_workers(*arguments: object) -> LauncherConfig:
    return replace(_original(*arguments), worker_entry="deaf_program:run")  # type: ignore[arg-type]


_original = service.cli.serve.launcher_config

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{Path(__file__).parents[1]}"
    service.cli.serve.launcher_config = _with_deaf_workers
    sys.exit(main())
