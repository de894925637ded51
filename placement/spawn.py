"""Starting a process of our own by exec, and saying how one ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from placement.binding import bind_process
from placement.messages import Channel
from placement.plan import UnitPlan

# numpy's OpenBLAS and tokenizers start threads, gRPC adds fork handlers: none of it may be in a process that forks.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}


def spawn(
    module: str, channel: Channel, unit: UnitPlan | None, strict_memory: bool
) -> subprocess.Popen[bytes]:
    """Run `python -m module FD` with its end of a channel, bound to a unit before exec so that every page is.

    It gets a session of its own: Ctrl-C in a terminal reaches the launcher alone, which then ends the others in order.
    """

    def before_exec() -> None:
        if unit is not None:
            bind_process(unit.cpus, unit.memory_nodes, strict_memory)

    process = subprocess.Popen(
        [sys.executable, "-m", module, str(channel.fileno())],
        pass_fds=[channel.fileno()],
        stdin=subprocess.DEVNULL,
        env={"MALLOC_ARENA_MAX": "2", **os.environ, **_ENVIRONMENT},
        start_new_session=True,
        preexec_fn=before_exec,
    )
    channel.close()
    return process


def explain_status(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = " (out of memory, or killed by hand)" if number == signal.SIGKILL else ""
        return f"killed by {signal.Signals(number).name}{hint}"
    return f"exit status {os.waitstatus_to_exitcode(status)}"
