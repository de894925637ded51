"""What one request has made and its consumer has not taken yet."""

from __future__ import annotations

import asyncio

from service.engine.request import RequestOutput


class OutputStream:
    """Holds at most one output per completion: what a lagging consumer did not take is merged.

    For one event loop and one consumer. A consumer that waits is handed the next output itself and woken by it.
    """

    __slots__ = ("_pending", "_waiter", "error", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.error: Exception | None = None
        self._pending: dict[int, RequestOutput] = {}
        # Of a consumer that found nothing pending.
        self._waiter: asyncio.Future[RequestOutput] | None = None

    def put(self, output: RequestOutput) -> None:
        """Add what a step made."""
        output.request_id = self.request_id
        if (waiter := self._waiting()) is not None:
            waiter.set_result(output)
            return
        # The request's last output must come out last, also when an older part of its completion still waits.
        earlier = self._pending.pop(output.index, None)
        self._pending[output.index] = output if earlier is None else _merge(earlier, output)

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        self.error = error
        if (waiter := self._waiting()) is not None:
            waiter.set_exception(error)
            # A consumer that is cancelled before it wakes does not ask for it, which is no reason to log it.
            waiter.exception()

    def take(self) -> asyncio.Future[RequestOutput]:
        """The next output, as soon as there is one; raises the error of `fail` once everything was taken."""
        # No coroutine, which would cost each token of each stream a frame more.
        taken: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        if self._pending:
            taken.set_result(self._pending.pop(next(iter(self._pending))))
        elif self.error is not None:
            taken.set_exception(self.error)
        else:
            self._waiter = taken
        return taken

    def _waiting(self) -> asyncio.Future[RequestOutput] | None:
        """The future of whoever waits, who is then to be told something."""
        waiter, self._waiter = self._waiter, None
        return None if waiter is None or waiter.done() else waiter


def _merge(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """`later` with what `earlier` of the same completion said before it."""
    later.text = earlier.text + later.text
    later.token_ids = earlier.token_ids + later.token_ids
    later.logprobs = earlier.logprobs + later.logprobs
    later.prompt_logprobs = earlier.prompt_logprobs + later.prompt_logprobs
    return later
