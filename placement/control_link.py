"""The launcher's end of the control process: started, started again when it dies, told the state, and its orders taken."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable

from placement.events import EventLoop
from placement.messages import Channel, ControlConfig, Message, ServerState, send_if_open
from placement.orders import DrainOrder, OrderDone, ReloadOrder, ScaleOrder
from placement.spawn import explain_status, spawn

log = logging.getLogger("numaserve.launcher")

_RESTART_SECONDS = 1.0

Order = ReloadOrder | ScaleOrder | DrainOrder


class ControlLink:
    """Keeps a control process of `module`. `on_order` gets each order and a function that answers it."""

    def __init__(
        self,
        events: EventLoop,
        module: str,
        config: ControlConfig,
        board_fd: int,
        on_order: Callable[[Order, Callable[[OrderDone], None]], None],
    ) -> None:
        self._events = events
        self._module = module
        self._config = config
        self._board_fd = board_fd
        self._on_order = on_order
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._not_before = 0.0
        self._stopped = False

    @property
    def pid(self) -> int:
        """0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def next_timer(self) -> float | None:
        """When the next one is to be started, None while one runs."""
        return self._not_before if self._process is None and not self._stopped else None

    def turn(self, now: float) -> bool:
        """Start the next one when its time has come; returns whether one was started, which knows nothing yet."""
        if self._process is not None or self._stopped or self._not_before > now:
            return False
        self._channel, theirs = Channel.pair()
        self._process = spawn(self._module, theirs, None, strict_memory=False)
        channel = self._channel
        self._events.listen(channel, lambda message, _: self._on_message(channel, message))
        send_if_open(channel, self._config, (self._board_fd,))
        return True

    def tell(self, state: ServerState) -> None:
        """Hand it the newest state."""
        send_if_open(self._channel, state)

    def _on_message(self, channel: Channel, message: Message) -> None:
        if isinstance(message, Order):

            def answer(done: OrderDone) -> None:
                # One that died meanwhile hears no answer.
                send_if_open(channel, done)

            self._on_order(message, answer)

    def keep_ended(self) -> None:
        """Start none any more."""
        self._stopped = True

    def stop(self) -> None:
        """End it, and start none any more."""
        self._stopped = True
        self._events.drop(self._channel)

    def on_exit(self, status: int) -> None:
        """It has ended."""
        self._process = None
        self._events.drop(self._channel)
        if not self._stopped:
            log.warning("the control process ended: %s; starting another", explain_status(status))
            self._not_before = time.monotonic() + _RESTART_SECONDS
