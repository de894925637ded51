"""Runs the launcher over the toy service: `toy_launcher.py RUNTIME_DIR SERVICE_CONFIG WORKERS...`, a count per unit.

With TAKE_OVER in the environment it takes over from the one that runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from toy_service import make_plan

from placement.hand_over import take_over
from placement.launcher import Launcher, LauncherConfig
from placement.listen import reserve_port
from placement.logs import configure_logging


def main() -> int:
    configure_logging("launcher", "json", "debug")
    inheritance = take_over(Path(sys.argv[1]), "0") if "TAKE_OVER" in os.environ else None
    holder = inheritance.port_holder if inheritance is not None else None
    config = LauncherConfig(
        plan=make_plan([int(count) for count in sys.argv[3:]]),
        model="toy",
        version="0",
        address="127.0.0.1:0",
        port_holder=holder or reserve_port("127.0.0.1", 0),
        inheritance=inheritance,
        kept=inheritance.segments() if inheritance is not None else {},
        runtime_dir=Path(sys.argv[1]),
        drain_timeout=5.0,
        strict_memory=False,
        preload=("toy_service",),
        loader_entry="toy_service:load",
        prepare_entry="toy_service:prepare",
        worker_entry="toy_service:work",
        control_module="toy_service",
        service_config=sys.argv[2],
        log_format="json",
        log_level="debug",
        hang_timeout=0.0,
        plan_entry="toy_service:replan",
    )
    return Launcher(config).run()


if __name__ == "__main__":
    sys.exit(main())
