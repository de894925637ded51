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
        # Who waits finds nothing pending; None in its future stands for the error.
        self._waiter: asyncio.Future[RequestOutput | None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Add what a step made."""
        output.request_id = self.request_id
        if not self._hand_over(output):
            # The request's last output must come out last, also when an older part of its completion still waits.
            earlier = self._pending.pop(output.index, None)
            self._pending[output.index] = output if earlier is None else _merge(earlier, output)

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        self.error = error
        self._hand_over(None)

    async def take(self) -> RequestOutput:
        """The next output, as soon as there is one; raises the error of `fail` once everything was taken."""
        if self._pending:
            return self._pending.pop(next(iter(self._pending)))
        if self.error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            output = await self._waiter
            if output is not None:
                return output
        assert self.error is not None
        raise self.error

    def _hand_over(self, output: RequestOutput | None) -> bool:
        """Whether somebody waited, who then has it."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return False
        waiter.set_result(output)
        return True


def _merge(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """`later` with what `earlier` of the same completion said before it."""
    later.text = earlier.text + later.text
    later.token_ids = earlier.token_ids + later.token_ids
    later.logprobs = earlier.logprobs + later.logprobs
    later.prompt_logprobs = earlier.prompt_logprobs + later.prompt_logprobs
    return later
