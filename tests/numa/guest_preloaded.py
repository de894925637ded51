"""Servers that are forked from a process which has torch imported: in a guest that import takes a minute.

Launcher and zygotes start by fork instead of by exec; all else is the product as it is. Import this module before there
is any thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from placement import spawn as product_spawn

os.environ.update(product_spawn._ENVIRONMENT, OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="2")

from served import Server

import placement.unit
import placement.zygote
import service.cli.main
import service.loader.process
import service.worker
from placement.binding import bind_process
from placement.messages import Channel
from placement.plan import UnitPlan


class Forked:
    """What `served.Server` and `placement.unit.Unit` use of a Popen. `run` gives the exit status."""

    def __init__(self, run: Callable[[], int], stderr: int | None = None) -> None:
        self.stderr: Any = None
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                if stderr is not None:
                    os.dup2(stderr, 2)
                status = run()
            except SystemExit as leaving:
                status = leaving.code if isinstance(leaving.code, int) else 1
            finally:
                sys.stderr.flush()
                os._exit(status)

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises TimeoutExpired."""
        if self._status is None:
            if timeout is not None:
                with contextlib.closing(_PidFd(self.pid)) as ended:
                    if not ended.wait(timeout):
                        raise subprocess.TimeoutExpired("a forked server", timeout)
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def send_signal(self, number: int) -> None:
        """Send a signal to it."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)


class _PidFd:
    def __init__(self, pid: int) -> None:
        self._descriptor = os.pidfd_open(pid)

    def wait(self, timeout: float) -> bool:
        import select

        return bool(select.select([self._descriptor], [], [], timeout)[0])

    def close(self) -> None:
        os.close(self._descriptor)


def in_fork(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run` returns in a forked child, carried over as JSON."""
    with tempfile.NamedTemporaryFile() as answer:

        def write() -> int:
            Path(answer.name).write_text(json.dumps(run()))
            return 0

        status = Forked(write).wait()
        text = Path(answer.name).read_text()
        return json.loads(text) if text else {"error": f"the scenario ended with {status}"}  # type: ignore[no-any-return]


class PreloadedServer(Server):
    """`program` is as the command line would have it: a script of this folder or above that enters a restriction."""

    def _start(self, program: tuple[str, ...], arguments: list[str]) -> Any:
        reader, writer = os.pipe()

        def run() -> int:
            os.close(reader)
            os.close(writer)
            _restrict(program)
            placement.unit.spawn = _fork_zygote  # type: ignore[assignment]
            return service.cli.main.main(arguments)

        process = Forked(run, stderr=writer)
        os.close(writer)
        process.stderr = os.fdopen(reader, "r")
        return process


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
