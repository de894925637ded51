"""`numaserve` whose loader, from the second load on, waits until the FIFO `load` in the runtime folder is written to.

Run it as the program of a `served.Server`. Everything else is the product as it is.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

import service.cli.serve
import service.loader.process
from placement.launcher import LauncherConfig
from placement.messages import Channel, ZygoteConfig
from service.cli.main import main
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


def _with_held_loader(*arguments: object) -> LauncherConfig:
    return replace(_original(*arguments), loader_entry="held_loader_program:run")  # type: ignore[arg-type]


_original = service.cli.serve.launcher_config

if __name__ == "__main__":
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{Path(__file__).parents[1]}"
    service.cli.serve.launcher_config = _with_held_loader
    sys.exit(main())
