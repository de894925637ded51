"""The workers of one unit as the launcher runs them: their places are filled, watched, drained, and filled again."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection

from placement.board import BoardRow, WorkerState
from placement.hang_watch import HangWatch, Liveness, cpu_seconds
from placement.messages import (
    Channel,
    DrainWorker,
    Failed,
    ForkWorker,
    Message,
    StartServing,
    TrialPassed,
    WorkerServing,
    send_if_open,
)
from placement.places import Place
from placement.plan import UnitPlan
from placement.spawn import explain_status
from placement.surroundings import EXIT_BAD_CONFIGURATION, EXIT_CANNOT_START, Surroundings

log = logging.getLogger("numaserve.launcher")

MAX_FAILED_STARTS = 3
# A hung worker has this long to say on SIGABRT where it hangs.
ABORT_SECONDS = 2.0
# A worker that was told to drain gets this long after its time-out before it is killed.
KILL_MARGIN_SECONDS = 6.0
_NO_ROW_SECONDS = 1.0


def send_signal(pid: int, number: signal.Signals) -> bool:
    """Signal a process; False when it is gone."""
    # Its zygote may have reaped it, and not have said so yet.
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def process_exists(pid: int) -> bool:
    """Whether it lives, or is dead and not reaped yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Crew:
    """The workers of one unit. `fork` sends an order to the unit's zygote, with descriptors.

    While it is `on_trial` workers prove themselves and wait, and the first failure gives the whole crew up.
    """

    def __init__(
        self,
        plan: UnitPlan,
        generation: int,
        surroundings: Surroundings,
        fork: Callable[[ForkWorker, tuple[int, ...]], None],
        on_trial: bool,
        drained: Collection[int],
    ) -> None:
        self.places = [
            Place(worker, generation=generation, drained=worker.index in drained) for worker in plan.workers
        ]
        self.on_trial = on_trial
        self.draining = False
        self._unit = plan.name
        self._around = surroundings
        self._fork = fork

    @property
    def pids(self) -> list[int]:
        """Every worker process."""
        return [place.pid for place in self.places if place.pid]

    @property
    def gone(self) -> bool:
        """No worker lives and none is being forked."""
        return all(place.empty for place in self.places)

    @property
    def wanted(self) -> list[Place]:
        """The places that are to be filled."""
        return [place for place in self.places if not place.drained]

    # Filling

    def fill(self, now: float) -> None:
        """Fork a worker for every empty place whose time has come."""
        for place in self.wanted:
            if not self.draining and place.empty and place.not_before <= now:
                self._fill(place, now)

    def next_start(self) -> float | None:
        """When the next empty place is to be filled, None when there is none."""
        waiting = [place.not_before for place in self.wanted if place.empty]
        return min(waiting) if waiting and not self.draining else None

    def _fill(self, place: Place, now: float) -> None:
        row = self._around.rows.take()
        if row is None:
            log.warning("worker %d waits: every row of the board is taken", place.plan.index)
            place.not_before = now + _NO_ROW_SECONDS
            return
        place.forking, place.row = True, row
        place.channel, theirs = Channel.pair()
        self._around.events.listen(place.channel, lambda message, _: self._on_worker(place, message))
        plan = place.plan
        self._around.board.write(row, BoardRow(state=WorkerState.STARTING))
        order = ForkWorker(
            plan.index,
            plan.cpus,
            plan.compute_threads,
            plan.kv_cache_bytes,
            plan.memory_nodes,
            row,
            self.on_trial,
            replaces=place.died_at is not None,
        )
        self._fork(order, (theirs.fileno(), self._around.board.fd))
        theirs.close()

    def on_forked(self, index: int, pid: int) -> None:
        """The zygote has forked the worker of a place."""
        place = next(place for place in self.places if place.plan.index == index)
        place.pid, place.forking = pid, False
        if self.draining or place.drained:
            send_signal(pid, signal.SIGKILL)

    def forks_are_lost(self) -> None:
        """The zygote died, or must not fork: what it has not told of was not forked."""
        for place in self.places:
            if place.forking and place.pid == 0:
                place.forking = False
                self._around.events.drop(place.channel)
                place.channel = None
                self._free_row(place)

    def begin_to_serve(self) -> None:
        """All have passed their trials: let them listen."""
        for place in self.wanted:
            send_if_open(place.channel, StartServing())

    # Watching

    def watch(self, now: float, hang_timeout: float) -> None:
        """Kill workers that did not drain in time; abort those that hang, unless `hang_timeout` is 0."""
        for place in self.places:
            if not place.pid:
                continue
            if place.end_by is not None and place.end_by <= now:
                log.warning(
                    "worker %d (pid %d) did not end in time and is killed", place.plan.index, place.pid
                )
                place.end_by = now + KILL_MARGIN_SECONDS
                send_signal(place.pid, signal.SIGKILL)
            elif hang_timeout and place.end_by is None:
                self._look_at(place, now, hang_timeout)

    def _look_at(self, place: Place, now: float, timeout: float) -> None:
        if place.kill_at is not None:
            if place.kill_at <= now:
                send_signal(place.pid, signal.SIGKILL)
            return
        place.watch = place.watch or HangWatch(timeout)
        row = self._around.board.read(place.row)
        # Either of the two that stops shows in their minimum; a worker that starts has none yet.
        heartbeat = min(row.heartbeat_ns, row.loop_heartbeat_ns)
        if place.watch.look(now, heartbeat, cpu_seconds(place.pid)) is Liveness.HUNG:
            log.error(
                "worker %d (pid %d) hangs: no heartbeat for %.0f s; it is aborted",
                place.plan.index,
                place.pid,
                place.watch.silence(now),
            )
            send_signal(place.pid, signal.SIGABRT)
            place.kill_at = now + ABORT_SECONDS

    # Draining

    def drain(self, timeout: float, leave_port: bool) -> None:
        """Tell serving workers to finish; end those that do not serve yet. No place is filled again."""
        self.draining = True
        for place in self.places:
            self.drain_place(place, timeout, leave_port)

    def drain_place(self, place: Place, timeout: float, leave_port: bool) -> None:
        """The same for one place; it is filled again unless it is `drained`."""
        if place.serving and place.end_by is None:
            send_if_open(place.channel, DrainWorker(timeout, leave_port))
            place.end_by = time.monotonic() + timeout + KILL_MARGIN_SECONDS
        elif place.pid and not place.serving:
            send_signal(place.pid, signal.SIGKILL)

    # What workers say, and their deaths

    def _on_worker(self, place: Place, message: Message) -> None:
        match message:
            case TrialPassed(pid=pid):
                place.pid, place.forking, place.tried = pid, False, True
                self._around.changed()
            case WorkerServing(pid=pid, address=address, mbind_errno=code, tcp_address=tcp_address):
                place.pid, place.forking, place.mbind_errno = pid, False, code
                place.tcp_address = tcp_address
                gap = place.began_to_serve(time.monotonic(), address)
                if gap is not None:
                    log.info(
                        "worker %d serves again as pid %d, %.0f ms after the death of pid %d",
                        place.plan.index,
                        pid,
                        gap * 1000,
                        place.died_pid,
                    )
                if self.draining or place.drained:
                    self.drain_place(place, 0.0, leave_port=True)
                self._around.changed()
            case Failed(message=text, permanent=permanent):
                place.last_failure, place.permanent_failure = text, permanent

    def on_exit(self, pid: int, status: int) -> bool:
        """Act on the death of a worker; False when it is none of this crew's."""
        place = next((place for place in self.places if place.pid == pid), None)
        if place is None:
            return False
        self._around.events.read_rest(place.channel, lambda message, _: self._on_worker(place, message))
        index = place.plan.index
        expected = (self.draining or place.drained) and status == 0
        log.log(
            logging.INFO if expected else logging.WARNING,
            "worker %d (pid %d) ended: %s",
            index,
            pid,
            explain_status(status),
        )
        place.fell_empty(time.monotonic())
        self._free_row(place)
        if not self.draining and not place.drained:
            self._judge_death(place, status)
        self._around.changed()
        return True

    def _judge_death(self, place: Place, status: int) -> None:
        index, reason = place.plan.index, place.last_failure or explain_status(status)
        if place.permanent_failure:
            self._give_up(EXIT_BAD_CONFIGURATION, reason)
        elif self.on_trial:
            self._give_up(EXIT_CANNOT_START, f"worker {index} ended before it served: {reason}")
        elif place.failed_starts >= MAX_FAILED_STARTS:
            text = f"worker {index} failed to start {place.failed_starts} times in a row: {reason}"
            self._give_up(EXIT_CANNOT_START, text)

    def _give_up(self, status: int, reason: str) -> None:
        self._around.give_up(status, f"{self._unit}: {reason}")

    def _free_row(self, place: Place) -> None:
        self._around.board.write(place.row, BoardRow(state=WorkerState.STOPPED))
        self._around.board.clear_placed(place.row)
        self._around.rows.give_back(place.row)
        place.row = -1
