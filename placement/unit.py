"""One unit as the launcher runs it: its zygote, its loader, its segment's descriptor, and its crew of workers."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Collection
from dataclasses import dataclass

from placement.crew import Crew, process_exists, send_signal
from placement.messages import (
    AttachSegment,
    Channel,
    ChildExited,
    Failed,
    Forked,
    ForkLoader,
    ForkZygote,
    LoadProgress,
    Message,
    SegmentAttached,
    SegmentBuilt,
    SegmentState,
    ZygoteConfig,
    ZygoteReady,
    send_if_open,
)
from placement.plan import UnitPlan
from placement.spawn import explain_status, spawn
from placement.surroundings import EXIT_BAD_CONFIGURATION, EXIT_CANNOT_START, EXIT_FAILURE, Surroundings

log = logging.getLogger("numaserve.launcher")

MAX_FAILED_STARTS = 3
MAX_LOAD_ATTEMPTS = 2
# As of a process that exits with 1.
_UNKNOWN_STATUS = 1 << 8


@dataclass(frozen=True)
class KeptSegment:
    """A segment and its descriptor, which belongs to whoever holds this."""

    built: SegmentBuilt
    fd: int

    def duplicate(self) -> KeptSegment:
        """The same segment by a descriptor of its own."""
        return KeptSegment(self.built, os.dup(self.fd))


class Unit:
    """One unit. It acts on messages and deaths; its generation calls it with both.

    `segment` is one that exists already: it is then attached, and nothing is loaded. While it is on trial, the first
    failure gives it up.
    """

    def __init__(
        self,
        plan: UnitPlan,
        config: ZygoteConfig,
        surroundings: Surroundings,
        segment: KeptSegment | None = None,
        on_trial: bool = False,
        drained: Collection[int] = (),
    ) -> None:
        self.plan = plan
        self.segment = segment
        self.crew = Crew(
            plan,
            config.generation,
            surroundings,
            lambda order, descriptors: self._send(order, descriptors),
            on_trial,
            drained,
        )
        self._config = config
        self._around = surroundings
        self._zygote_pid = 0
        # A forgotten Popen would be reaped behind the launcher's back.
        self._popen: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._ready = False
        self._attached = False
        self._loader_channel: Channel | None = None
        self._loader_pid = 0
        self._load_attempts = 0
        self._zygote_failures = 0
        self._successor: Unit | None = None

    # Starting and ending

    def start(self, parent: Unit | None = None) -> None:
        """Start a zygote, forked by the one of `parent` where that can fork."""
        self._ready = self._attached = False
        self._channel, theirs = Channel.pair()
        self._around.events.listen(self._channel, self._on_zygote)
        if parent is None or not parent._fork_successor(self, theirs):
            self._popen = spawn("placement.zygote", theirs, self.plan, self._config.strict_memory)
            self._zygote_pid = self._popen.pid
        self._send(self._config)

    def _fork_successor(self, successor: Unit, channel: Channel) -> bool:
        if not self._ready or self._successor is not None:
            return False
        if not send_if_open(self._channel, ForkZygote(), (channel.fileno(),)):
            return False
        self._successor = successor
        channel.close()
        return True

    def turn(self, now: float, hang_timeout: float) -> None:
        """Fill empty places and look after those that are not."""
        if self._attached:
            self.crew.fill(now)
        self.crew.watch(now, hang_timeout)

    def next_start(self) -> float | None:
        """When the next empty place is to be filled, None when there is none."""
        return self.crew.next_start() if self._attached else None

    def discard(self, timeout: float, leave_port: bool) -> None:
        """Drain the workers and end the loader. `end` is called when no worker is left."""
        self.crew.drain(timeout, leave_port)
        self._around.events.drop(self._loader_channel)
        if self._loader_pid:
            send_signal(self._loader_pid, signal.SIGKILL)

    def end(self) -> None:
        """End the zygote and let go of the segment: the kernel frees it with the last mapping."""
        if self.segment is not None:
            os.close(self.segment.fd)
            self.segment = None
        if self._zygote_pid:
            # It has no state of its own, and what it forked and did not tell of ends with its channel.
            send_signal(self._zygote_pid, signal.SIGKILL)

    @property
    def zygote_pid(self) -> int:
        """0 while there is none."""
        return self._zygote_pid

    @property
    def pids(self) -> list[int]:
        """Every process of the unit."""
        return [pid for pid in (self._zygote_pid, self._loader_pid, *self.crew.pids) if pid]

    @property
    def loaded(self) -> bool:
        """Its workers can be forked."""
        return self._attached

    def segment_state(self) -> SegmentState | None:
        """For the control process; None while there is no segment."""
        if self.segment is None:
            return None
        built = self.segment.built
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

    def _send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        if not send_if_open(self._channel, message, descriptors):
            # Its death arrives as SIGCHLD and is handled there.
            log.debug("%s: %s was not delivered", self.plan.name, type(message).__name__)

    def _fork_loader(self) -> None:
        self._load_attempts += 1
        self._loader_channel, theirs = Channel.pair()
        self._around.events.listen(self._loader_channel, self._on_loader)
        self._send(ForkLoader(), (theirs.fileno(),))
        theirs.close()

    def _attach(self) -> None:
        assert self.segment is not None
        self._send(AttachSegment(self.segment.built.verdict), (self.segment.fd,))

    # What the processes say

    def _on_zygote(self, message: Message, _: list[int]) -> None:
        match message:
            case ZygoteReady(bindings=bindings):
                self._ready = True
                self._zygote_failures = 0
                log.info("%s: pinned; %s", self.plan.name, "; ".join(bindings))
                if self.segment is not None:
                    self._attach()
                elif not self.crew.draining:
                    self._fork_loader()
            case SegmentAttached(error=""):
                self._attached = True
                self._around.changed()
            case SegmentAttached(error=error):
                self._give_up(EXIT_BAD_CONFIGURATION, error)
            case Forked():
                self._on_forked(message)
            case ChildExited(pid=pid, status=status):
                self._around.exited(pid, status)

    def _on_forked(self, forked: Forked) -> None:
        if forked.index == -2:
            self._on_successor(forked)
        elif forked.error:
            self.crew.forks_are_lost()
            self._give_up(EXIT_FAILURE, forked.error)
        elif forked.index == -1:
            self._loader_pid = forked.pid
            if self.crew.draining:
                send_signal(forked.pid, signal.SIGKILL)
        else:
            self.crew.on_forked(forked.index, forked.pid)

    def _on_successor(self, forked: Forked) -> None:
        successor, self._successor = self._successor, None
        if successor is None:
            return
        if forked.error:
            log.warning("%s: %s; a new zygote is started", self.plan.name, forked.error)
            successor.restart()
        else:
            successor._zygote_pid = forked.pid

    def restart(self) -> None:
        """Start a zygote of its own, because the one that should have forked it did not."""
        self._around.events.drop(self._channel)
        if not self.crew.draining:
            self.start()

    def _on_loader(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case LoadProgress(done_bytes=done, total_bytes=total):
                self._around.progress.update(self.plan.name, done, total)
            case SegmentBuilt():
                self.segment = KeptSegment(message, descriptors[0])
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

    # Deaths

    def on_exit(self, pid: int, status: int) -> bool:
        """Act on the death of a process; False when it is none of this unit's."""
        if pid == self._zygote_pid:
            self._on_zygote_exit(status)
        elif pid == self._loader_pid:
            self._on_loader_exit(status)
        else:
            return self.crew.on_exit(pid, status)
        return True

    def _on_zygote_exit(self, status: int) -> None:
        self._popen, self._zygote_pid = None, 0
        # What it said before it died may tell of a worker that was forked.
        self._around.events.read_rest(self._channel, self._on_zygote)
        self.crew.forks_are_lost()
        self._find_untold_deaths()
        if self._successor is not None:
            successor, self._successor = self._successor, None
            successor.restart()
        if self.crew.draining:
            return
        how = explain_status(status)
        if self.crew.on_trial:
            self._give_up(EXIT_CANNOT_START, f"the zygote ended: {how}")
            return
        log.warning("%s: the zygote ended: %s; its workers go on", self.plan.name, how)
        if not self._ready:
            self._zygote_failures += 1
            if self._zygote_failures >= MAX_FAILED_STARTS:
                self._give_up(EXIT_CANNOT_START, f"the zygote ended before it was ready: {how}")
                return
        self.start()
        self._around.changed()

    def _find_untold_deaths(self) -> None:
        """The zygote may have reaped a child and died before it could say so; all others are now the launcher's to reap."""
        for pid in (self._loader_pid, *self.crew.pids):
            if pid and not process_exists(pid):
                self.on_exit(pid, _UNKNOWN_STATUS)

    def _on_loader_exit(self, status: int) -> None:
        self._loader_pid = 0
        self._around.events.read_rest(self._loader_channel, self._on_loader)
        if self.segment is not None or self.crew.draining:
            return
        how = f"the loader ended without a segment: {explain_status(status)}"
        if self.crew.on_trial or self._load_attempts >= MAX_LOAD_ATTEMPTS:
            self._give_up(EXIT_CANNOT_START, how)
            return
        log.warning("%s: %s; loading again", self.plan.name, how)
        if self._ready:
            self._fork_loader()

    def _give_up(self, status: int, reason: str) -> None:
        self._around.give_up(status, f"{self.plan.name}: {reason}")
