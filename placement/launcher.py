"""The launcher: supervisor of every unit and keeper of every segment's descriptor; it ends it all in order.

It imports neither torch nor grpc: it does little that could crash, because the weights live as long as it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from placement.board import Board
from placement.cpulist import format_list
from placement.events import EventLoop
from placement.messages import Channel, ControlConfig, ServerState, ZygoteConfig
from placement.plan import Plan, UnitPlan
from placement.progress import LoadProgressView
from placement.runtime_dir import RuntimeDir, RuntimeDirBusy, control_socket
from placement.spawn import explain_status, spawn
from placement.unit import EXIT_BAD_CONFIGURATION, Surroundings, Unit

log = logging.getLogger("numaserve.launcher")

EXIT_OK = 0

_PR_SET_CHILD_SUBREAPER = 36
# A worker that was told to drain gets this long after its time-out before it is killed.
_KILL_MARGIN_SECONDS = 3.0
_CONTROL_RESTART_SECONDS = 1.0
# Heartbeats come at least this often, so there is no point in looking more often.
_HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True)
class LauncherConfig:
    """Everything the launcher needs. Entry points are "package.module:function"; `service_config` is theirs, as JSON.

    A worker whose heartbeat stops for `hang_timeout` seconds is replaced; 0 never does that.
    `port_holder` is the bound socket of `placement.listen`; it keeps the port while no worker listens.
    """

    plan: Plan
    model: str
    version: str
    address: str
    port_holder: socket.socket
    runtime_dir: Path
    drain_timeout: float
    strict_memory: bool
    preload: tuple[str, ...]
    loader_entry: str
    prepare_entry: str
    worker_entry: str
    control_module: str
    service_config: str
    log_format: str
    log_level: str
    hang_timeout: float = 60.0

    def zygote(self, unit: UnitPlan) -> ZygoteConfig:
        """What one unit's zygote is told."""
        return ZygoteConfig(
            unit=unit.name,
            nodes=unit.nodes,
            memory_nodes=unit.memory_nodes,
            policy=self.plan.policy.value,
            strict_memory=self.strict_memory,
            cpus=unit.cpus,
            preload=self.preload,
            loader_entry=self.loader_entry,
            prepare_entry=self.prepare_entry,
            worker_entry=self.worker_entry,
            service_config=self.service_config,
            log_format=self.log_format,
            log_level=self.log_level,
            unit_number=self.plan.units.index(unit),
        )


class Launcher:
    """One server's supervisor and keeper."""

    def __init__(self, config: LauncherConfig) -> None:
        self._config = config
        self._events = EventLoop()
        self._board = Board.create(sum(len(unit.workers) for unit in config.plan.units))
        around = Surroundings(self._events, self._board, LoadProgressView(), self._give_up, self._on_change)
        self._units = [Unit(unit, config.zygote(unit), around) for unit in config.plan.units]
        self._control: subprocess.Popen[bytes] | None = None
        self._control_channel: Channel | None = None
        self._control_not_before = 0.0
        self._started_at = time.monotonic()
        self._kill_at: float | None = None
        self._announced = False
        self._exit_status: int | None = None

    def run(self) -> int:
        """Serve until told to stop; returns the exit status."""
        try:
            runtime = RuntimeDir(self._config.runtime_dir)
        except RuntimeDirBusy as error:
            log.error("%s", error)
            return EXIT_BAD_CONFIGURATION
        except OSError as error:
            log.error("--runtime-dir %s: %s", self._config.runtime_dir, error.strerror)
            return EXIT_BAD_CONFIGURATION
        try:
            numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
            self._events.watch_signals(numbers, self._on_signals)
            # Workers whose zygote died become children of this process, which then reaps them itself.
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
            self._start_control()
            for unit in self._units:
                unit.start()
            while self._exit_status is None:
                self._turn()
            return self._exit_status
        finally:
            self._kill_everything()
            runtime.release()

    # The loop

    def _turn(self) -> None:
        self._events.turn(self._seconds_to_next_timer())
        now = time.monotonic()
        if self._kill_at is not None:
            self._continue_draining(now)
            return
        for unit in self._units:
            unit.fill_places(now)
            if self._config.hang_timeout:
                unit.end_hung_workers(now, self._config.hang_timeout)
        if self._control is None and self._control_not_before <= now:
            self._start_control()

    def _seconds_to_next_timer(self) -> float | None:
        timers = [start for unit in self._units if (start := unit.next_start()) is not None]
        if self._kill_at is not None:
            timers = [self._kill_at]
        elif self._control is None:
            timers.append(self._control_not_before)
        if self._config.hang_timeout:
            timers.append(time.monotonic() + _HEARTBEAT_SECONDS)
        return max(min(timers) - time.monotonic(), 0.0) if timers else None

    def _workers_left(self) -> int:
        return sum(1 for unit in self._units for place in unit.places if place.pid)

    # Signals and the end

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number != signal.SIGCHLD:
                self._on_stop_signal(signal.Signals(number))
        self._reap()

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._kill_at is not None:
            log.warning("%s again: stopping at once", number.name)
            self._exit_status = 128 + number
            return
        log.info("%s: draining, at most %.0f s", number.name, self._config.drain_timeout)
        self._kill_at = time.monotonic() + self._config.drain_timeout + _KILL_MARGIN_SECONDS
        for unit in self._units:
            unit.drain(self._config.drain_timeout)
        self._publish()

    def _continue_draining(self, now: float) -> None:
        assert self._kill_at is not None
        left = self._workers_left()
        if left and now < self._kill_at:
            return
        if left:
            log.warning("%d workers did not end in time and are killed", left)
        if self._exit_status is None:
            log.info("drained")
            self._exit_status = EXIT_OK

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._control is not None and pid == self._control.pid:
                self._on_control_exit(status)
            elif not any(unit.on_exit(pid, status) for unit in self._units):
                log.debug("reaped pid %d: %s", pid, explain_status(status))

    def _kill_everything(self) -> None:
        pids = [pid for unit in self._units for pid in unit.pids()]
        for pid in [*pids, *([self._control.pid] if self._control is not None else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Orphans arrive here too, because this process is their subreaper.
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)

    def _give_up(self, status: int, reason: str) -> None:
        if self._exit_status is None:
            log.error("%s", reason)
            self._exit_status = status

    # Control and status

    def _start_control(self) -> None:
        self._control_channel, theirs = Channel.pair()
        self._control = spawn(self._config.control_module, theirs, None, strict_memory=False)
        path = str(control_socket(self._config.runtime_dir))
        self._tell_control(
            ControlConfig(path, self._config.log_format, self._config.log_level), (self._board.fd,)
        )
        self._publish()

    def _tell_control(self, message: ControlConfig | ServerState, descriptors: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if self._control_channel is not None and self._control_channel.fileno() >= 0:
                self._control_channel.send(message, descriptors)

    def _on_control_exit(self, status: int) -> None:
        self._control = None
        if self._control_channel is not None:
            self._control_channel.close()
        if self._kill_at is None:
            log.warning("the control process ended: %s; starting another", explain_status(status))
            self._control_not_before = time.monotonic() + _CONTROL_RESTART_SECONDS

    def _on_change(self) -> None:
        everyone = [place for unit in self._units for place in unit.places]
        if not self._announced and all(place.serving for place in everyone):
            self._announced = True
            log.info(
                "ready: %s on %s, %d workers on %s, %.1f s after the start",
                self._config.model,
                self._config.address,
                len(everyone),
                ", ".join(f"{unit.plan.name} (cpus {format_list(unit.plan.cpus)})" for unit in self._units),
                time.monotonic() - self._started_at,
            )
        self._publish()

    def _publish(self) -> None:
        state = "draining" if self._kill_at is not None else "serving" if self._announced else "loading"
        plan = self._config.plan
        self._tell_control(
            ServerState(
                state=state,
                model=self._config.model,
                address=self._config.address,
                version=self._config.version,
                launcher_pid=os.getpid(),
                started_at=self._started_at,
                placement_policy=plan.policy.value,
                placement_reason=plan.policy_reason,
                helper_pids=tuple(unit.zygote_pid for unit in self._units if unit.zygote_pid),
                segments=tuple(
                    segment for unit in self._units if (segment := unit.segment_state()) is not None
                ),
                workers=tuple(place.snapshot() for unit in self._units for place in unit.places),
            )
        )
