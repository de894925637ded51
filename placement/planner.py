"""Plans the next generation in a process of its own: what reads a checkpoint's files must not stall or crash the launcher.

The process starts as `python -m placement.planner FD`, calls the function that its order names with the order and the
segments that stay in use, and ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from placement.events import EventLoop
from placement.file_segment import open_segment
from placement.messages import Channel, Message
from placement.orders import Planned, PlanOrder, PlanRefused
from placement.spawn import explain_status, spawn
from placement.zygote import resolve


class Planner:
    """The launcher's end: one order, and one answer to `done`. `segments` are descriptors of those that stay in use."""

    def __init__(
        self,
        events: EventLoop,
        order: PlanOrder,
        segments: Sequence[int],
        done: Callable[[Planned | PlanRefused], None],
    ) -> None:
        self._events = events
        self._done = done
        self._answered = False
        self._channel, theirs = Channel.pair()
        events.listen(self._channel, self._on_message)
        self._process: subprocess.Popen[bytes] = spawn("placement.planner", theirs, None, strict_memory=False)
        self._channel.send(order, segments)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def _on_message(self, message: Message, _: list[int]) -> None:
        if isinstance(message, Planned | PlanRefused) and not self._answered:
            self._answered = True
            self._done(message)

    def on_exit(self, status: int) -> None:
        """Its process has ended."""
        self._events.read_rest(self._channel, self._on_message)
        if not self._answered:
            self._answered = True
            self._done(PlanRefused("INTERNAL", "", f"planning failed: {explain_status(status)}"))


def main() -> None:
    """Entry point: the channel's descriptor is the only argument."""
    channel = Channel.from_fd(int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    received = channel.receive()
    if received is None:
        return
    order, descriptors = received
    assert isinstance(order, PlanOrder)
    channel.send(resolve(order.entry)(order, [open_segment(descriptor) for descriptor in descriptors]))


if __name__ == "__main__":
    main()
