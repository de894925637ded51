"""`numaserve` whose workers store into a weight when told to: open the FIFO `poke-N` in the runtime folder and write a byte.

Run it as the program of a `served.Server`. Everything else is the product as it is.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import service.cli.serve
import service.worker
from placement.board import Board
from placement.launcher import LauncherConfig
from placement.messages import Channel, ForkWorker
from service.cli.main import main


def run(prepared: service.worker.Prepared, order: ForkWorker, channel: Channel, board: Board) -> None:
    """The worker's entry point, with the poking thread beside it."""
    fifo = Path(prepared.service.socket_dir) / f"poke-{order.index}"
    if not fifo.exists():
        os.mkfifo(fifo)

    def wait_and_poke() -> None:
        with fifo.open("rb") as told:
            told.read(1)
        name, tensor = next(iter(service.worker.weight_tensors(prepared.segment).items()))
        print(f"storing into {name}", file=sys.stderr, flush=True)
        tensor.add_(1)

    threading.Thread(target=wait_and_poke, daemon=True).start()
    service.worker.run(prepared, order, channel, board)


def _with_poking_workers(*arguments: object) -> LauncherConfig:
    return replace(_original(*arguments), worker_entry="poking_program:run")  # type: ignore[arg-type]


_original = service.cli.serve.launcher_config

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{Path(__file__).parents[1]}"
    service.cli.serve.launcher_config = _with_poking_workers
    sys.exit(main())
