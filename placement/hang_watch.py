"""Tells a worker that hangs from one that is busy. Pure state: the launcher feeds it what it sees."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

# A step of a large model over many tokens may be silent for long, but it computes all the while: a worker that does is
# given so many times the time-out.
_PATIENCE_WHILE_COMPUTING = 10
# Less than this share of one CPU is no computing: the event loop alone uses a little.
_COMPUTING_SHARE = 0.5


class Liveness(enum.Enum):
    """What a worker's silence means."""

    ALIVE = "alive"
    COMPUTING = "silent, and computing"
    HUNG = "hung"


@dataclass
class HangWatch:
    """Watches one worker. It hangs when its heartbeat has stopped for `timeout` seconds in which it used no CPU, or for
    ten times as long whatever it used.
    """

    timeout: float
    _heartbeat: int = -1
    _since: float = 0.0
    _cpu_seconds: float = 0.0
    _looked_at: float = 0.0

    def look(self, now: float, heartbeat: int, cpu_seconds: float) -> Liveness:
        """Judge from the newest heartbeat (any number that changes with each beat) and the CPU time used so far."""
        # Who did not look for long was stopped itself, perhaps together with the worker.
        was_stopped = now - self._looked_at > self.timeout / 2
        self._looked_at = now
        if heartbeat != self._heartbeat or was_stopped:
            self._heartbeat, self._since, self._cpu_seconds = heartbeat, now, cpu_seconds
            return Liveness.ALIVE
        silence = now - self._since
        if silence < self.timeout:
            return Liveness.ALIVE
        computing = cpu_seconds - self._cpu_seconds >= _COMPUTING_SHARE * silence
        if computing and silence < self.timeout * _PATIENCE_WHILE_COMPUTING:
            return Liveness.COMPUTING
        return Liveness.HUNG

    def silence(self, now: float) -> float:
        """Seconds since the last change of the heartbeat."""
        return now - self._since


def cpu_seconds(pid: int) -> float:
    """CPU time of a process in all its threads, 0 when it is gone. Source: proc_pid_stat(5), utime and stime."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
