"""Ends streams whose client takes nothing any more."""

from __future__ import annotations

import asyncio
from typing import Self

import grpc
from google.protobuf.message import Message


class StalledClient(RuntimeError):
    """The client has not taken a part of its answer for too long."""


class StallGuard:
    """Writes the parts of one stream; a write that waits longer than `limit` seconds raises StalledClient.

    Used as a context manager in the task that writes. One timer for the whole stream looks in twice per
    `limit`, since a timer for each write would cost as much as the write itself.
    """

    def __init__(self, context: grpc.aio.ServicerContext, limit: float) -> None:
        self._context = context
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._writing_since: float | None = None
        self._stalled = False

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._limit / 2, self._look)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._timer.cancel()

    async def write(self, part: Message) -> None:
        """Send `part`; returns once the client's flow-control window has taken it."""
        self._writing_since = self._loop.time()
        try:
            await self._context.write(part)
        except asyncio.CancelledError:
            if not self._stalled:
                raise
            assert self._task is not None
            self._task.uncancel()
            raise StalledClient(f"the client took no part of its answer for {self._limit:g} s") from None
        self._writing_since = None

    def _look(self) -> None:
        if self._writing_since is not None and self._loop.time() - self._writing_since >= self._limit:
            assert self._task is not None
            self._stalled = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._limit / 2, self._look)
