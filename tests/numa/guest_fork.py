"""A forked process in the place of a Popen, and a function's answer from one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
        return json.loads(text) if text else {"error": f"the scenario ended with {status}"}
