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
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from placement.board import Board
from placement.board_rows import RowPool, rows_for
from placement.control_link import ControlLink, Order
from placement.cpulist import format_list
from placement.draining import Drains
from placement.events import EventLoop
from placement.fd_store import Notifier
from placement.generation import Blueprint
from placement.kept_server import Inheritance
from placement.messages import ControlConfig, ServerState, ZygoteConfig
from placement.orders import DrainOrder, OrderDone, ReloadOrder, ScaleOrder
from placement.plan import Plan, UnitPlan
from placement.progress import LoadProgressView
from placement.runtime_dir import RuntimeDirBusy, control_socket
from placement.spawn import explain_status
from placement.succession import Succession, SuccessionConfig
from placement.surroundings import EXIT_BAD_CONFIGURATION, EXIT_FAILURE, Surroundings
from placement.tenure import Identity, Tenure
from placement.unit import KeptSegment

log = logging.getLogger("numaserve.launcher")

EXIT_OK = 0

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CHANGE_SIGNALS = {
    signal.SIGHUP: "reload",
    signal.SIGTTIN: "one worker more",
    signal.SIGTTOU: "one worker less",
}

_PR_SET_CHILD_SUBREAPER = 36
# A worker that was told to drain gets this long after its time-out before it is killed.
_KILL_MARGIN_SECONDS = 3.0
# Heartbeats come at least this often, so there is no point in looking more often.
_HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True)
class LauncherConfig:
    """Everything the launcher needs. Entry points are "package.module:function"; `service_config` is theirs, as JSON.

    A worker whose heartbeat stops for `hang_timeout` seconds is replaced; 0 never does that.
    `port_holder` is the bound socket of `placement.listen`; it keeps the port while no worker listens.
    `plan_entry` plans the generations after the first: it is called with a PlanOrder that holds `plan_request`, JSON of
    its own, and returns Planned or PlanRefused. Without one the server cannot be changed while it runs.
    `inheritance` is what a server before this one left, and `kept` those of its segments that are used, by unit.
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
    metrics_host: str = ""
    metrics_port: int | None = None
    plan_entry: str = ""
    plan_request: str = "{}"
    model_dir: str = ""
    model_files: str = ""
    inheritance: Inheritance | None = None
    notifier: Notifier = field(default_factory=Notifier)
    kept: Mapping[str, KeptSegment] = field(default_factory=dict)

    def zygote(self, unit: UnitPlan, blueprint: Blueprint, generation: int) -> ZygoteConfig:
        """What the zygote of one unit of a generation is told."""
        return ZygoteConfig(
            unit=unit.name,
            nodes=unit.nodes,
            memory_nodes=unit.memory_nodes,
            policy=blueprint.plan.policy.value,
            strict_memory=self.strict_memory,
            cpus=unit.cpus,
            preload=self.preload,
            loader_entry=self.loader_entry,
            prepare_entry=self.prepare_entry,
            worker_entry=self.worker_entry,
            service_config=blueprint.service_config,
            log_format=self.log_format,
            log_level=self.log_level,
            unit_number=blueprint.plan.units.index(unit),
            generation=generation,
        )


class Launcher:
    """One server's supervisor and keeper."""

    def __init__(self, config: LauncherConfig) -> None:
        self._config = config
        self._events = EventLoop()
        rows = rows_for(sum(len(unit.workers) for unit in config.plan.units))
        self._board = Board.create(rows)
        around = Surroundings(
            self._events,
            self._board,
            RowPool(rows),
            LoadProgressView(),
            self._give_up,
            self._on_change,
            self._on_exit,
        )
        self._succession = Succession(
            SuccessionConfig(
                config.zygote,
                config.plan_entry,
                config.plan_request,
                config.drain_timeout,
                config.hang_timeout,
            ),
            around,
            Blueprint(config.plan, config.service_config, config.model_dir, config.model_files),
            config.inheritance.kept.generation + 1 if config.inheritance is not None else 0,
            config.kept,
            on_trial=config.inheritance is not None and config.inheritance.connection is not None,
            tried=lambda: self._tenure.claim(self._on_claim_answered),
        )
        self._tenure = Tenure(
            self._events,
            self._succession,
            config.inheritance,
            config.notifier,
            Identity(config.version, config.address, config.port_holder, config.runtime_dir),
            self._on_handed_over,
        )
        self._drains = Drains(self._succession, config.drain_timeout)
        self._control = ControlLink(
            self._events,
            config.control_module,
            ControlConfig(
                str(control_socket(config.runtime_dir)),
                config.log_format,
                config.log_level,
                config.metrics_host,
                config.metrics_port,
            ),
            self._board.fd,
            self._on_order,
        )
        self._started_at = time.monotonic()
        self._kill_at: float | None = None
        self._announced = False
        self._exit_status: int | None = None

    def run(self) -> int:
        """Serve until told to stop; returns the exit status."""
        try:
            self._tenure.hold_runtime_dir()
        except RuntimeDirBusy as error:
            log.error("%s", error)
            return EXIT_BAD_CONFIGURATION
        except OSError as error:
            log.error("--runtime-dir %s: %s", self._config.runtime_dir, error.strerror)
            return EXIT_BAD_CONFIGURATION
        try:
            self._events.watch_signals([signal.SIGCHLD, *_STOP_SIGNALS, *_CHANGE_SIGNALS], self._on_signals)
            # Workers whose zygote died become children of this process, which then reaps them itself.
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
            self._start_control(time.monotonic())
            self._succession.start()
            while self._exit_status is None:
                self._turn()
            return self._exit_status
        finally:
            self._kill_everything()
            self._tenure.end()

    # The loop

    def _turn(self) -> None:
        self._events.turn(self._seconds_to_next_timer())
        now = time.monotonic()
        if self._kill_at is not None:
            self._continue_draining(now)
            return
        self._succession.turn(now)
        self._drains.turn(now)
        self._start_control(now)
        if self._tenure.successor and self._succession.current.ended:
            log.info("handed over to pid %d", self._tenure.successor)
            self._exit_status = EXIT_OK

    def _seconds_to_next_timer(self) -> float | None:
        if self._kill_at is not None:
            return max(self._kill_at - time.monotonic(), 0.0)
        timers = [self._succession.next_timer(), self._control.next_timer(), self._drains.next_timer()]
        if self._config.hang_timeout:
            timers.append(time.monotonic() + _HEARTBEAT_SECONDS)
        nearest = min((timer for timer in timers if timer is not None), default=None)
        return None if nearest is None else max(nearest - time.monotonic(), 0.0)

    def _workers_left(self) -> int:
        return sum(1 for generation in self._succession for place in generation.places if place.pid)

    # Signals and the end

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _STOP_SIGNALS:
                self._on_stop_signal(signal.Signals(number))
            elif number in _CHANGE_SIGNALS:
                self._on_change_signal(signal.Signals(number))
        self._reap()

    def _on_change_signal(self, number: signal.Signals) -> None:
        log.info("%s: %s", number.name, _CHANGE_SIGNALS[number])
        succession = self._succession
        if number == signal.SIGHUP:
            # One that waits will find whatever has changed by now.
            if not succession.reload_waits:
                succession.ask(ReloadOrder(0), _log_refusal)
            return
        workers = succession.wanted_workers + (1 if number == signal.SIGTTIN else -1)
        succession.ask(ScaleOrder(0, workers), _log_refusal)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._kill_at is not None:
            log.warning("%s again: stopping at once", number.name)
            self._exit_status = 128 + number
            return
        log.info("%s: draining, at most %.0f s", number.name, self._config.drain_timeout)
        self._kill_at = time.monotonic() + self._config.drain_timeout + _KILL_MARGIN_SECONDS
        self._config.notifier.tell("STOPPING=1")
        self._control.keep_ended()
        self._succession.drain(self._config.drain_timeout)
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
            self._on_exit(pid, status)

    def _on_exit(self, pid: int, status: int) -> None:
        if pid == self._control.pid:
            self._control.on_exit(status)
        elif not self._succession.on_exit(pid, status):
            log.debug("reaped pid %d: %s", pid, explain_status(status))

    def _kill_everything(self) -> None:
        for pid in [*self._succession.pids, self._control.pid]:
            if pid:
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

    def _start_control(self, now: float) -> None:
        # The server before this one answers until this one serves.
        if (self._announced or not self._tenure.takes_over) and self._control.turn(now):
            self._publish()

    def _on_order(self, order: Order, answer: Callable[[OrderDone], None]) -> None:
        if isinstance(order, DrainOrder):
            self._drains.ask(order, answer)
        else:
            self._succession.ask(order, answer)

    def _on_change(self) -> None:
        current = self._succession.current
        if not self._announced and current.serving and not current.on_trial:
            self._announced = True
            log.info(
                "ready: %s on %s, %d workers on %s, %.1f s after the start",
                self._config.model,
                self._config.address,
                len(current.wanted),
                ", ".join(f"{unit.plan.name} (cpus {format_list(unit.plan.cpus)})" for unit in current.units),
                time.monotonic() - self._started_at,
            )
            self._tenure.begin()
        if self._announced:
            self._tenure.notify()
        self._publish()

    def _on_claim_answered(self, refusal: str) -> None:
        if refusal:
            self._give_up(EXIT_FAILURE, refusal)
        else:
            self._succession.begin_first()

    def _on_handed_over(self, pid: int) -> None:
        log.info("pid %d serves: draining, at most %.0f s", pid, self._config.drain_timeout)
        self._control.stop()
        self._succession.retire(self._config.drain_timeout)

    def _publish(self) -> None:
        state = "draining" if self._kill_at is not None else "serving" if self._announced else "loading"
        succession = self._succession
        current, change = succession.current, succession.change
        plan = current.blueprint.plan
        units = [unit for generation in succession for unit in generation.units]
        self._control.tell(
            ServerState(
                state=state,
                model=self._config.model,
                address=self._config.address,
                version=self._config.version,
                launcher_pid=os.getpid(),
                started_at=self._started_at,
                placement_policy=plan.policy.value,
                placement_reason=plan.policy_reason,
                helper_pids=tuple(unit.zygote_pid for unit in units if unit.zygote_pid),
                segments=tuple(
                    segment for unit in current.units if (segment := unit.segment_state()) is not None
                ),
                workers=(
                    *(place.snapshot() for place in current.places),
                    *(
                        place.snapshot()
                        for one in succession
                        for place in one.places
                        if one is not current and place.pid
                    ),
                ),
                generation=current.number,
                model_dir=current.blueprint.model_dir,
                change=change.what if change is not None else "",
                change_phase=change.phase.value if change is not None else "",
                last_error=succession.last_error,
            )
        )


def _log_refusal(done: OrderDone) -> None:
    """What becomes of a signal's order: failures of a change are logged where they happen."""
    if done.code in ("FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"):
        log.warning("%s", done.message)
