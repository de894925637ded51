"""A launcher's time in charge: it begins where one before it ends, and ends where one after it serves."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from placement.events import EventLoop
from placement.fd_store import Notifier
from placement.hand_over import SERVING, HandOver, claim
from placement.kept_server import Inheritance, KeptServer, NotUsable
from placement.runtime_dir import RuntimeDir
from placement.succession import Succession

log = logging.getLogger("numaserve.launcher")


@dataclass(frozen=True)
class Identity:
    """What makes it the same server under another launcher."""

    version: str
    address: str
    port_holder: socket.socket
    runtime_dir: Path


class Tenure:
    """Holds the runtime folder, tells the launcher before this one and the service manager, waits for the one after.

    `handed_over` is called with the pid of the one after when that serves.
    """

    def __init__(
        self,
        events: EventLoop,
        succession: Succession,
        before: Inheritance | None,
        notifier: Notifier,
        identity: Identity,
        handed_over: Callable[[int], None],
    ) -> None:
        self._events = events
        self._succession = succession
        self._before = before
        self._notifier = notifier
        self._identity = identity
        self._handed_over = handed_over
        self._runtime: RuntimeDir | None = None
        self._hand_over: HandOver | None = None
        self._stored_generation = self._offered_generation = -1
        self._claimed_at = 0.0
        self.successor = 0
        if before is not None:
            notifier.assume(before.kept)

    @property
    def takes_over(self) -> bool:
        """A launcher before this one serves, or did when this one started."""
        return self._before is not None and self._before.connection is not None

    def hold_runtime_dir(self) -> None:
        """Raises RuntimeDirBusy or OSError."""
        lock = self._before.lock if self._before is not None else -1
        self._runtime = RuntimeDir(self._identity.runtime_dir, lock)

    def claim(self, answered: Callable[[str], None]) -> None:
        """All workers are ready to listen: ask the launcher before this one, which answers "" or why they must not."""
        self._claimed_at = time.monotonic()
        if self._before is not None and self._before.connection is not None:
            claim(self._events, self._before.connection, answered)
        else:
            answered("")

    def begin(self) -> None:
        """Everything serves: tell the launcher before this one, and wait for the one after."""
        assert self._runtime is not None
        if self._before is not None and self._before.connection is not None:
            with contextlib.suppress(OSError):
                self._before.connection.send(SERVING)
            self._before.connection.shutdown(socket.SHUT_WR)
            self._runtime.owned = True
            seconds = time.monotonic() - self._claimed_at
            log.info("took over: all workers listen %.0f ms after the hand-over began", seconds * 1000)
        self._hand_over = HandOver(
            self._events,
            self._identity.runtime_dir,
            self._offer,
            self._begin_hand_over,
            self._on_failed_successor,
            self._on_handed_over,
        )

    def notify(self) -> None:
        """Tell the service manager how things are, and keep with it what serves now."""
        change, generation = self._succession.change, self._succession.current
        if self.successor:
            return
        if change is not None and change.outcome is None:
            self._notifier.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
            return
        status = f"STATUS=generation {generation.number} serves"
        self._notifier.tell("READY=1", f"MAINPID={os.getpid()}", status)
        if generation.number != self._stored_generation:
            self._stored_generation = generation.number
            kept, segments = self._kept()
            self._notifier.keep(kept, self._identity.port_holder.fileno(), segments)

    def end(self) -> None:
        """Give up the runtime folder."""
        if self._runtime is None:
            return
        if self._hand_over is not None and self._hand_over.busy:
            # The one that is about to serve goes on in it.
            self._runtime.owned = False
        self._runtime.release()

    def _kept(self) -> tuple[KeptServer, list[int]]:
        generation = self._succession.current
        kept = KeptServer.of(generation, self._identity.version, self._identity.address)
        return kept, [unit.segment.fd for unit in generation.units if unit.segment is not None]

    def _offer(self) -> tuple[KeptServer, Sequence[int]]:
        if not self._succession.at_rest or self.successor:
            raise NotUsable("the running server is being changed or stops; try again when it is through")
        assert self._runtime is not None
        kept, segments = self._kept()
        self._offered_generation = kept.generation
        return kept, [self._runtime.lock, self._identity.port_holder.fileno(), *segments]

    def _begin_hand_over(self) -> None:
        current = self._succession.current.number
        if current != self._offered_generation:
            raise NotUsable(
                f"the running server serves generation {current} by now, it offered {self._offered_generation}; "
                "start again"
            )
        # One that was told to stop meanwhile leaves its work to the one that is ready.
        if not self._succession.at_rest and not self._succession.draining:
            raise NotUsable("the running server is being changed; start again when it is through")
        self._succession.held = True

    def _on_failed_successor(self) -> None:
        self._succession.held = False

    def _on_handed_over(self, pid: int) -> None:
        assert self._runtime is not None
        assert self._hand_over is not None
        self.successor = pid
        self._runtime.owned = False
        self._hand_over.close()
        self._handed_over(pid)
