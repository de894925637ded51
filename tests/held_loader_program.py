"""`numaserve` whose loader, from the second load on, waits until the FIFO `load` in the runtime folder is written to.

Run it as the program of a `served.Server`. Everything else is the product as it is.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from altered_program import main_with

import service.loader.process
from placement.messages import Channel, ZygoteConfig
from service.config import ServiceConfig


def run(channel: Channel, config: ZygoteConfig) -> None:
    """The loader's entry point, held up."""
    if config.generation:
        fifo = Path(ServiceConfig.from_json(config.service_config).socket_dir) / "load"
        if not fifo.exists():
            os.mkfifo(fifo)
        logging.getLogger("numaserve.loader").warning("loader %d waits", os.getpid())
        with fifo.open("rb") as told:
            told.read(1)
    service.loader.process.run(channel, config)


if __name__ == "__main__":
    sys.exit(main_with(loader_entry="held_loader_program:run"))
