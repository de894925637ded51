"""`numaserve` in which a worker answers no request of `Infer` while a file `deaf-PID` with its pid is in the runtime folder.

Run it as the program of a `served.Server`. Everything else is the product as it is: engine and event loop go on.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import grpc
from altered_program import main_with

import service.worker
from numaserve.v1 import inference_pb2
from placement.board import Board
from placement.messages import Channel, ForkWorker
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


if __name__ == "__main__":
    sys.exit(main_with(worker_entry="deaf_program:run"))
