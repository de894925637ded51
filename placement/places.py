"""A worker's place: who fills it, and the rules of filling it again. Pure state."""

from __future__ import annotations

from dataclasses import dataclass

from placement.hang_watch import HangWatch
from placement.messages import Channel, WorkerPlace
from placement.plan import WorkerPlan

FIRST_BACKOFF_SECONDS = 0.1
LONGEST_BACKOFF_SECONDS = 10.0
# A worker that served this long has shown that it can: its next failure starts over with no delay.
PROVEN_SECONDS = 10.0


def backoff_seconds(failures: int) -> float:
    """Delay before the next start after so many early deaths in a row beyond the first."""
    return 0.0 if failures <= 0 else min(FIRST_BACKOFF_SECONDS * 2 ** (failures - 1), LONGEST_BACKOFF_SECONDS)


@dataclass
class Place:
    """One worker's place. It is filled, falls empty when the worker dies, and is filled again.

    A `drained` place stays empty. `row` is its worker's row of the board, -1 while it has none. `tried` says that its
    worker has passed its trial; `end_by` is when a worker that drains is killed.
    """

    plan: WorkerPlan
    generation: int = 0
    row: int = -1
    drained: bool = False
    tried: bool = False
    end_by: float | None = None
    pid: int = 0
    channel: Channel | None = None
    serving: bool = False
    forking: bool = False
    address: str = ""
    tcp_address: str = ""
    mbind_errno: int = 0
    restarts: int = 0
    failed_starts: int = 0
    early_deaths: int = 0
    served_at: float = 0.0
    died_at: float | None = None
    died_pid: int = 0
    not_before: float = 0.0
    last_failure: str = ""
    permanent_failure: bool = False
    watch: HangWatch | None = None
    kill_at: float | None = None

    @property
    def empty(self) -> bool:
        """Nobody fills the place and nobody is about to."""
        return self.pid == 0 and not self.forking

    def fell_empty(self, now: float) -> None:
        """The worker is gone: decide when the next one may start. Nothing is held against one that was drained."""
        if self.drained:
            self.early_deaths = self.failed_starts = 0
            self.died_at, self.not_before = None, now
        else:
            self._count_death(now)
        self.watch = self.kill_at = self.end_by = None
        self.pid, self.serving, self.tried, self.address, self.tcp_address = 0, False, False, "", ""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def _count_death(self, now: float) -> None:
        proven = self.serving and now - self.served_at >= PROVEN_SECONDS
        if self.serving:
            self.died_at, self.died_pid = now, self.pid
            self.failed_starts = 0
        else:
            self.failed_starts += 1
        self.early_deaths = 0 if proven else self.early_deaths + 1
        self.not_before = now + backoff_seconds(self.early_deaths - 1)
        self.restarts += 1

    def began_to_serve(self, now: float, address: str) -> float | None:
        """The worker serves; returns the seconds since the death of the one before, if there was one."""
        self.serving, self.address, self.served_at, self.failed_starts = True, address, now, 0
        gap = None if self.died_at is None else now - self.died_at
        self.died_at = None
        return gap

    def snapshot(self) -> WorkerPlace:
        """For the control process."""
        return WorkerPlace(
            index=self.plan.index,
            unit=self.plan.unit,
            pid=self.pid,
            serving=self.serving,
            cpus=self.plan.cpus,
            kv_cache_bytes=self.plan.kv_cache_bytes,
            restarts=self.restarts,
            address=self.address,
            tcp_address=self.tcp_address,
            memory_nodes=self.plan.memory_nodes,
            mbind_errno=self.mbind_errno,
            row=self.row,
            generation=self.generation,
            drained=self.drained,
        )
