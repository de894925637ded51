"""The launcher's event loop: channels that have something to say, and signals turned into ordinary events.

Signal handlers only put a number in a pipe (as gunicorn's arbiter does); the loop acts on it.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Iterable

from placement.messages import Channel, Message


class EventLoop:
    """Callbacks by descriptor."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch_signals(self, numbers: Iterable[signal.Signals], callback: Callable[[bytes], None]) -> None:
        """Call back with the numbers of the signals that arrived, one byte each."""
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._selector.register(read_end, selectors.EVENT_READ, lambda: callback(os.read(read_end, 512)))

    def listen(self, channel: Channel, callback: Callable[[Message, list[int]], None]) -> None:
        """Call back with each message; at end-of-file the channel is closed quietly, since a death is seen by its signal."""
        self._selector.register(channel.fileno(), selectors.EVENT_READ, lambda: self._read(channel, callback))

    def read_rest(self, channel: Channel | None, callback: Callable[[Message, list[int]], None]) -> None:
        """Read what a process that has ended said before; its channel is closed afterwards."""
        while channel is not None and channel.fileno() >= 0:
            self._read(channel, callback)

    def drop(self, channel: Channel | None) -> None:
        """Stop listening and close; the other end sees end-of-file. Does nothing for a channel that is closed."""
        if channel is not None and channel.fileno() >= 0:
            self._selector.unregister(channel.fileno())
            channel.close()

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Call back when a descriptor can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def unwatch(self, descriptor: int) -> None:
        """Watch it no more; to be called before it is closed."""
        self._selector.unregister(descriptor)

    def turn(self, timeout: float | None) -> None:
        """Wait for events, at most `timeout` seconds, and act on them."""
        for key, _ in self._selector.select(timeout):
            # An earlier event of this turn may have closed the descriptor.
            if self._selector.get_map().get(key.fd) is not None:
                key.data()

    def _read(self, channel: Channel, callback: Callable[[Message, list[int]], None]) -> None:
        received = channel.receive()
        if received is None:
            self.drop(channel)
        else:
            callback(*received)
