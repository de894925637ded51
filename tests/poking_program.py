"""`numaserve` whose workers store into a weight when told to: open the FIFO `poke-N` in the runtime folder and write a byte.

Run it as the program of a `served.Server`. Everything else is the product as it is.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from altered_program import main_with

import service.decoders
import service.worker
from placement.board import Board
from placement.messages import Channel, ForkWorker


def run(prepared: service.worker.Prepared, order: ForkWorker, channel: Channel, board: Board) -> None:
    """The worker's entry point, with the poking thread beside it."""
    fifo = Path(prepared.service.socket_dir) / f"poke-{order.index}"
    if not fifo.exists():
        os.mkfifo(fifo)

    def wait_and_poke() -> None:
        with fifo.open("rb") as told:
            told.read(1)
        name, tensor = next(iter(service.decoders.weight_tensors(prepared.segment).items()))
        print(f"storing into {name}", file=sys.stderr, flush=True)
        tensor.add_(1)

    threading.Thread(target=wait_and_poke, daemon=True).start()
    service.worker.run(prepared, order, channel, board)


if __name__ == "__main__":
    sys.exit(main_with(worker_entry="poking_program:run"))
