"""How many requests wait for their first step, and how long one that is refused should stay away."""

from __future__ import annotations

from service.engine.request import QueueFull


class WaitingLine:
    """Counts in `waiting` the requests that have not started, `limit` at most.

    `refuse_if_full` may be called from any thread.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.waiting = 0
        self._last_start: float | None = None
        self._start_interval = 0.0

    def refuse_if_full(self, arriving: int = 0) -> None:
        """Raises QueueFull when no further request may wait, `arriving` more being on their way."""
        waiting = self.waiting + arriving
        if waiting >= self._limit:
            # All who are refused now come back together, so they are told to wait until half the queue has
            # started.
            estimate = self._start_interval * waiting / 2
            raise QueueFull(waiting, self._limit, min(60.0, max(0.1, estimate)))

    def enter(self) -> None:
        """One more waits."""
        self.waiting += 1

    def leave(self) -> None:
        """One gave up waiting."""
        self.waiting -= 1

    def start(self, now: float) -> None:
        """One has started at `now` clock seconds."""
        self.waiting -= 1
        if self._last_start is not None:
            self._start_interval += 0.2 * (now - self._last_start - self._start_interval)
        self._last_start = now
