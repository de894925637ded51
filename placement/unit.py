"""One unit as the launcher runs it: its zygote, its loader, its segment's descriptor, the places of its workers."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from placement.board import Board, BoardRow, WorkerState
from placement.events import EventLoop
from placement.hang_watch import HangWatch, Liveness, cpu_seconds
from placement.messages import (
    AttachSegment,
    Channel,
    ChildExited,
    DrainWorker,
    Failed,
    Forked,
    ForkLoader,
    ForkWorker,
    LoadProgress,
    Message,
    SegmentAttached,
    SegmentBuilt,
    SegmentState,
    WorkerServing,
    ZygoteConfig,
    ZygoteReady,
)
from placement.places import Place
from placement.plan import UnitPlan
from placement.progress import LoadProgressView
from placement.spawn import explain_status, spawn

log = logging.getLogger("numaserve.launcher")

EXIT_FAILURE = 1
EXIT_BAD_CONFIGURATION = 2
EXIT_CANNOT_START = 3

MAX_FAILED_STARTS = 3
MAX_LOAD_ATTEMPTS = 2
# A hung worker has this long to say on SIGABRT where it hangs.
ABORT_SECONDS = 2.0


@dataclass(frozen=True)
class Surroundings:
    """What a unit needs of the launcher. `give_up` ends the whole service; `changed` publishes a new status."""

    events: EventLoop
    board: Board
    progress: LoadProgressView
    give_up: Callable[[int, str], None]
    changed: Callable[[], None]


def send_signal(pid: int, number: signal.Signals) -> bool:
    """Signal a process; False when it is gone."""
    # Its zygote may have reaped it, and not have said so yet.
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Unit:
    """One unit. It acts on messages and deaths; the launcher calls it with both."""

    def __init__(self, plan: UnitPlan, config: ZygoteConfig, surroundings: Surroundings) -> None:
        self.plan = plan
        self.places = [Place(worker) for worker in plan.workers]
        self._config = config
        self._around = surroundings
        self._zygote: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._ready = False
        self._attached = False
        self._loader_channel: Channel | None = None
        self._loader_pid = 0
        self._load_attempts = 0
        self._segment: SegmentBuilt | None = None
        self._segment_fd = -1
        self._draining = False
        self._zygote_failures = 0

    def start(self) -> None:
        """Start a zygote: the first one, or the successor of one that died."""
        self._ready = self._attached = False
        self._channel, theirs = Channel.pair()
        self._zygote = spawn("placement.zygote", theirs, self.plan, self._config.strict_memory)
        self._around.events.listen(self._channel, self._on_zygote)
        self._send(self._channel, self._config)

    def fill_places(self, now: float) -> None:
        """Fork a worker for every empty place whose time has come."""
        for place in self.places:
            if self._attached and not self._draining and place.empty and place.not_before <= now:
                self._fork_worker(place)

    def end_hung_workers(self, now: float, timeout: float) -> None:
        """Abort workers that hang, and kill those that do not end from it; their places then fall empty."""
        for place in self.places:
            if not place.pid:
                continue
            if place.kill_at is not None:
                if place.kill_at <= now:
                    send_signal(place.pid, signal.SIGKILL)
                continue
            place.watch = place.watch or HangWatch(timeout)
            row = self._around.board.read(place.plan.index)
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

    def next_start(self) -> float | None:
        """When the next empty place is to be filled, None when there is none."""
        waiting = [place.not_before for place in self.places if place.empty]
        return min(waiting) if waiting and self._attached and not self._draining else None

    def drain(self, timeout: float) -> None:
        """Tell serving workers to finish; end those that do not serve yet."""
        self._draining = True
        for place in self.places:
            if place.serving:
                self._send(place.channel, DrainWorker(timeout))
            elif place.pid:
                send_signal(place.pid, signal.SIGKILL)

    @property
    def zygote_pid(self) -> int:
        """0 while there is none."""
        return self._zygote.pid if self._zygote is not None else 0

    def pids(self) -> list[int]:
        """Every process of the unit."""
        pids = [self.zygote_pid, self._loader_pid, *(place.pid for place in self.places)]
        return [pid for pid in pids if pid]

    def segment_state(self) -> SegmentState | None:
        """For the control process; None while there is no segment."""
        if self._segment is None:
            return None
        built = self._segment
        return SegmentState(
            unit=self.plan.name,
            total_bytes=built.total_bytes,
            digest=built.digest,
            dtype=built.dtype,
            verdict=built.verdict,
            explanation=built.explanation,
            seconds=built.seconds,
            pages=built.pages,
            memory_nodes=self.plan.memory_nodes,
            data_offset=built.data_offset,
            mbind_errno=built.mbind_errno,
            files=built.files,
        )

    # Orders

    def _send(self, channel: Channel | None, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        try:
            if channel is not None and channel.fileno() >= 0:
                channel.send(message, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            # Its death arrives as SIGCHLD and is handled there.
            log.debug("%s: %s was not delivered", self.plan.name, type(message).__name__)

    def _fork_loader(self) -> None:
        self._load_attempts += 1
        self._loader_channel, theirs = Channel.pair()
        self._around.events.listen(self._loader_channel, self._on_loader)
        self._send(self._channel, ForkLoader(), (theirs.fileno(),))
        theirs.close()

    def _attach(self) -> None:
        assert self._segment is not None
        self._send(self._channel, AttachSegment(self._segment.verdict), (self._segment_fd,))

    def _fork_worker(self, place: Place) -> None:
        place.forking = True
        place.channel, theirs = Channel.pair()
        self._around.events.listen(place.channel, lambda message, _: self._on_worker(place, message))
        plan = place.plan
        self._around.board.write(plan.index, BoardRow(state=WorkerState.STARTING))
        order = ForkWorker(
            plan.index, plan.cpus, plan.compute_threads, plan.kv_cache_bytes, plan.memory_nodes
        )
        self._send(self._channel, order, (theirs.fileno(), self._around.board.fd))
        theirs.close()

    # What the processes say

    def _on_zygote(self, message: Message, _: list[int]) -> None:
        match message:
            case ZygoteReady(bindings=bindings):
                self._ready = True
                self._zygote_failures = 0
                log.info("%s: pinned; %s", self.plan.name, "; ".join(bindings))
                if self._segment is None:
                    self._fork_loader()
                else:
                    self._attach()
            case SegmentAttached(error=""):
                self._attached = True
            case SegmentAttached(error=error):
                self._give_up(EXIT_BAD_CONFIGURATION, error)
            case Forked():
                self._on_forked(message)
            case ChildExited(pid=pid, status=status):
                self.on_exit(pid, status)

    def _on_forked(self, forked: Forked) -> None:
        if forked.error:
            self._give_up(EXIT_FAILURE, forked.error)
        elif forked.index == -1:
            self._loader_pid = forked.pid
        else:
            place = next(place for place in self.places if place.plan.index == forked.index)
            place.pid, place.forking = forked.pid, False
            if self._draining:
                send_signal(forked.pid, signal.SIGKILL)

    def _on_loader(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case LoadProgress(done_bytes=done, total_bytes=total):
                self._around.progress.update(self.plan.name, done, total)
            case SegmentBuilt():
                self._segment, self._segment_fd = message, descriptors[0]
                self._announce_segment(message)
                self._attach()
            case Failed(message=text):
                self._around.progress.finish()
                self._around.give_up(EXIT_BAD_CONFIGURATION, text)

    def _announce_segment(self, built: SegmentBuilt) -> None:
        self._around.progress.finish()
        for step in built.steps:
            log.info("%s: %s", self.plan.name, step)
        log.info(
            "%s: weights %s, %.2f GB in %.1f s; %s",
            self.plan.name,
            built.verdict,
            built.total_bytes / 1e9,
            built.seconds,
            built.explanation,
        )
        self._around.changed()

    def _on_worker(self, place: Place, message: Message) -> None:
        match message:
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
                self._around.changed()
            case Failed(message=text, permanent=permanent):
                place.last_failure, place.permanent_failure = text, permanent

    # Deaths

    def on_exit(self, pid: int, status: int) -> bool:
        """Act on the death of a process; False when it is none of this unit's."""
        if pid == self.zygote_pid:
            self._on_zygote_exit(status)
        elif pid == self._loader_pid:
            self._on_loader_exit(status)
        elif (place := next((place for place in self.places if place.pid == pid), None)) is not None:
            self._on_worker_exit(place, status)
        else:
            return False
        return True

    def _on_zygote_exit(self, status: int) -> None:
        self._zygote = None
        if self._draining:
            return
        log.warning("%s: the zygote ended: %s; its workers go on", self.plan.name, explain_status(status))
        if not self._ready:
            self._zygote_failures += 1
            if self._zygote_failures >= MAX_FAILED_STARTS:
                how = explain_status(status)
                self._give_up(EXIT_CANNOT_START, f"the zygote ended before it was ready: {how}")
                return
        # What it said before it died may tell of a worker that was forked.
        self._around.events.read_rest(self._channel, self._on_zygote)
        for place in self.places:
            if place.forking and place.pid == 0:
                place.forking = False
                self._around.events.drop(place.channel)
                place.channel = None
        self.start()
        self._around.changed()

    def _on_loader_exit(self, status: int) -> None:
        self._loader_pid = 0
        self._around.events.read_rest(self._loader_channel, self._on_loader)
        if self._segment is not None or self._draining:
            return
        how = f"the loader ended without a segment: {explain_status(status)}"
        if self._load_attempts >= MAX_LOAD_ATTEMPTS:
            self._give_up(EXIT_CANNOT_START, how)
            return
        log.warning("%s: %s; loading again", self.plan.name, how)
        if self._ready:
            self._fork_loader()

    def _on_worker_exit(self, place: Place, status: int) -> None:
        self._around.events.read_rest(place.channel, lambda message, _: self._on_worker(place, message))
        index = place.plan.index
        level = logging.INFO if self._draining and status == 0 else logging.WARNING
        log.log(level, "worker %d (pid %d) ended: %s", index, place.pid, explain_status(status))
        place.fell_empty(time.monotonic())
        self._around.board.write(index, BoardRow(state=WorkerState.STOPPED))
        self._around.board.clear_placed(index)
        if place.permanent_failure and not self._draining:
            self._give_up(EXIT_BAD_CONFIGURATION, place.last_failure)
        elif place.failed_starts >= MAX_FAILED_STARTS and not self._draining:
            reason = place.last_failure or explain_status(status)
            text = f"worker {index} failed to start {place.failed_starts} times in a row: {reason}"
            self._give_up(EXIT_CANNOT_START, text)
        self._around.changed()

    def _give_up(self, status: int, reason: str) -> None:
        self._around.give_up(status, f"{self.plan.name}: {reason}")
