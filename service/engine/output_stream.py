"""What one request has made and its consumer has not taken yet."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from service.engine.request import RequestOutput


@dataclass(slots=True)
class OutputStream:
    """Holds at most one output per completion: what a lagging consumer did not take is merged.

    For one event loop and one consumer, who is woken only if it waits.
    """

    request_id: str
    error: Exception | None = None
    _pending: dict[int, RequestOutput] = field(default_factory=dict)
    _news: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Add what a step made."""
        # The request's last output must come out last, also when an older part of its completion still waits.
        earlier = self._pending.pop(output.index, None)
        output.request_id = self.request_id
        self._pending[output.index] = output if earlier is None else _merge(earlier, output)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        self.error = error
        self._wake()

    async def take(self) -> RequestOutput:
        """The next output, as soon as there is one; raises the error of `fail` once everything was taken."""
        while not self._pending:
            if self.error is not None:
                raise self.error
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._pending.pop(next(iter(self._pending)))

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        self._news = None


def _merge(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """`later` with what `earlier` of the same completion said before it."""
    later.text = earlier.text + later.text
    later.token_ids = earlier.token_ids + later.token_ids
    later.logprobs = earlier.logprobs + later.logprobs
    later.prompt_logprobs = earlier.prompt_logprobs + later.prompt_logprobs
    return later
