"""Servers that are forked from a process which has torch imported: in a guest that import takes a minute.

Launcher and zygotes start by fork instead of by exec; all else is the product as it is. Import this module before there
is any thread.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from placement import spawn as product_spawn

os.environ.update(product_spawn._ENVIRONMENT, OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="2")

from guest_facts import serve
from guest_fork import Forked
from served import Server

import placement.unit
import placement.zygote
import service.cli.main
import service.loader.process
import service.worker
from placement.binding import bind_process
from placement.messages import Channel
from placement.plan import UnitPlan
from service.ops import row_stable_linear

# Which heights of tiles give equal bits is tried out by products that take minutes here; the lowest one always does.
row_stable_linear._try_out = lambda _: row_stable_linear._LAST_RESORT


class PreloadedServer(Server):
    """`program` is as the command line would have it: a script of this folder or above that enters a restriction."""

    def _start(self, program: tuple[str, ...], arguments: list[str]) -> Any:
        reader, writer = os.pipe()

        def run() -> int:
            os.close(reader)
            os.close(writer)
            Path("/proc/self/oom_score_adj").write_text("0")
            _restrict(program)
            placement.unit.spawn = _fork_zygote  # type: ignore[assignment]
            return service.cli.main.main(arguments)

        process = Forked(run, stderr=writer)
        os.close(writer)
        process.stderr = os.fdopen(reader, "r")
        return process


def serve_preloaded(model: str, *flags: str, program: tuple[str, ...] = ()) -> Server:
    """As `guest_facts.serve`, within seconds."""
    return serve(model, *flags, program=program, kind=PreloadedServer)


def _restrict(program: tuple[str, ...]) -> None:
    """Do here what the scripts do before they exec."""
    import guest_enter_cgroup
    import seccomp_deny

    match Path(program[0]).name:
        case "seccomp_deny.py":
            seccomp_deny.refuse(program[1].split(","))
        case "guest_enter_cgroup.py":
            guest_enter_cgroup.enter(dict(setting.split("=", 1) for setting in program[1].split(",")))


def _fork_zygote(module: str, channel: Channel, unit: UnitPlan, strict_memory: bool) -> Forked:
    """In the place of `placement.spawn.spawn`: a zygote that keeps nothing of its launcher but its end of the channel."""
    assert module == "placement.zygote"

    def run() -> int:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.closerange(3, channel.fileno())
        os.closerange(channel.fileno() + 1, 1 << 16)
        bind_process(unit.cpus, unit.memory_nodes, strict_memory)
        sys.argv = [module, str(channel.fileno())]
        placement.zygote.main()
        return 0

    process = Forked(run)
    channel.close()
    return process
