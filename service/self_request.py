"""A worker asks itself for a token over its own socket: that shows that the whole way to an answer works.

Heartbeats tell of an event loop or an engine that hangs. A request also goes through gRPC, the servicer and back.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import replace

import grpc

from numaserve.v1 import inference_pb2, inference_pb2_grpc
from service.engine.request import EngineStats

log = logging.getLogger("numaserve.worker")

MOST_FAILURES = 3

# Whatever users ask goes first.
_PRIORITY = -100
_LONGEST_LOOK_SECONDS = 1.0
# What a worker that cannot answer says, or what is said in its stead.
_NO_ANSWERS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class SelfRequests:
    """Asks while nothing else shows that this worker answers.

    `ask` makes one request. `answered` counts the calls that were answered; no request is made while it changes every
    `interval` seconds. `progress` is anything that changes as the worker gets on: a request that waits for others is
    given time, and one that is silent for `patience` seconds in which nothing got on has failed.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[None]],
        answered: Callable[[], int],
        progress: Callable[[], Hashable],
        interval: float,
        patience: float,
    ) -> None:
        self._ask = ask
        self._answered = answered
        self._progress = progress
        self._interval = interval
        self._patience = patience

    async def run(self) -> str:
        """Returns what is wrong: a request hung, or several in a row failed. Runs until then."""
        failures = 0
        while True:
            await self._until_quiet()
            try:
                if not await self._is_answered():
                    return f"a request of its own was silent for {self._patience:g} s"
                log.debug("this worker answers itself")
                failures = 0
            except grpc.aio.AioRpcError as error:
                failures += 1
                if failures >= MOST_FAILURES:
                    return f"{failures} requests of its own in a row failed: {error.code().name}: {error.details()}"

    async def _until_quiet(self) -> None:
        seen = None
        while seen != (seen := self._answered()):
            await asyncio.sleep(self._interval)

    async def _is_answered(self) -> bool:
        """Raises AioRpcError where the answer is no answer; False once it hangs."""
        look_seconds = min(_LONGEST_LOOK_SECONDS, self._patience / 4)
        asking = asyncio.ensure_future(self._ask())
        seen, since = self._seen(), time.monotonic()
        looked_at = since
        try:
            while not (await asyncio.wait((asking,), timeout=look_seconds))[0]:
                now, seen_now = time.monotonic(), self._seen()
                # Who did not look for long was stopped itself.
                if seen_now != seen or now - looked_at > self._patience / 2:
                    seen, since = seen_now, now
                looked_at = now
                if now - since >= self._patience:
                    return False
            await asking
        finally:
            asking.cancel()
        return True

    def _seen(self) -> Hashable:
        return self._answered(), self._progress()


class OwnRequests:
    """Makes requests for one token to `address`, and keeps them out of what the worker counts for its users.

    `request_id` tells them from all others: nobody else can know it.
    """

    def __init__(self) -> None:
        self.request_id = f"self-{uuid.uuid4().hex}"
        self._made = 0
        self._shown = {"requests": 0, "prompt_tokens": 0, "generated_tokens": 0}

    async def ask(self, address: str) -> None:
        """Returns when the answer, or a refusal by the worker, is there. Raises grpc.aio.AioRpcError."""
        request = inference_pb2.InferRequest(
            request_id=self.request_id,
            prompt_token_ids=[0],
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            priority=_PRIORITY,
        )
        options = (("grpc.use_local_subchannel_pool", 1),)
        # Counted beforehand, so that what is shown never has one too many.
        self._made += 1
        try:
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                await inference_pb2_grpc.InferenceStub(channel).Infer(request)
        except grpc.aio.AioRpcError as error:
            self._made -= 1
            if error.code() in _NO_ANSWERS:
                raise

    def taken_out(self, stats: EngineStats) -> EngineStats:
        """The counters without these requests, each of which is one prompt token and one generated; they never fall."""
        for name, shown in self._shown.items():
            self._shown[name] = max(shown, getattr(stats, name) - self._made)
        return replace(stats, **self._shown)
