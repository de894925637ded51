"""The engine for an event loop: one thread steps it, and each step wakes the loop once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from service.engine.engine import Engine
from service.engine.output_stream import OutputStream
from service.engine.request import (
    EngineRequest,
    EngineStats,
    RequestOutput,
    RequestRejected,
    StructuredOutput,
)
from service.engine.sequence import AbortCause

if TYPE_CHECKING:
    from service.text.structured import Grammar

logger = logging.getLogger(__name__)


class EngineUnavailable(RuntimeError):
    """The engine is draining, has stopped or has failed; another worker may take the request."""


class AsyncEngine:
    """Runs requests on an engine that lives in its own thread. All methods belong to the event loop's thread.

    `compile_grammar` turns a constraint into what the sampler takes, or raises RequestRejected; it runs in a
    thread of its own. In the engine's thread, `on_stats` is called after every step and every
    `heartbeat_seconds` while idle, so that its silence means a step that hangs. `on_fatal` is called on the
    loop once the engine has failed and all its requests have been told: the process is then to be replaced.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        compile_grammar: Callable[[StructuredOutput], Grammar] | None = None,
        on_stats: Callable[[EngineStats], None] | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
        heartbeat_seconds: float = 1.0,
    ) -> None:
        self._engine = engine
        self._compile_grammar = compile_grammar
        self._on_stats = on_stats
        self._on_fatal = on_fatal
        self._heartbeat_seconds = heartbeat_seconds
        self._numbers = itertools.count()
        self._streams: dict[str, OutputStream] = {}
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self._arrivals: list[tuple[EngineRequest, Grammar | None]] = []
        self._aborts: list[tuple[str, AbortCause]] = []
        self._made: tuple[list[RequestOutput], list[tuple[str, Exception]]] = [], []
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unavailable = "has not started"
        self._stopping = False

    def start(self) -> None:
        """Starts the engine's thread; its outputs go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._unavailable = ""
        self._thread.start()

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        return self._engine.stats()

    def prefix_hashes(self, request: EngineRequest, most_blocks: int) -> list[bytes]:
        """As `Engine.prefix_hashes`."""
        return self._engine.prefix_hashes(request, most_blocks)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        """The request's outputs as steps make them; one output holds several steps when the consumer lags.

        Raises RequestRejected, QueueFull or EngineUnavailable before the first output, EngineUnavailable also
        later. Closing the generator aborts the request at the next step.
        """
        self._refuse_if_unavailable()
        self._engine.check(request)
        self._engine.refuse_if_full(len(self._arrivals))
        grammar = await self._compiled(request)
        self._refuse_if_unavailable()
        # Clients choose request ids, and may use one again before the engine has let go of its former bearer.
        number = next(self._numbers)
        key = f"{request.request_id}#{number}"
        stream = self._streams[key] = OutputStream(request.request_id)
        self._no_streams.clear()
        finished = False
        try:
            with self._wake:
                self._arrivals.append((replace(request, request_id=key), grammar))
                self._wake.notify()
            while not finished:
                output = await stream.take()
                finished = output.request_finished
                yield output
        finally:
            del self._streams[key]
            if not self._streams:
                self._no_streams.set()
            if not finished and stream.error is None:
                self._abort(key, AbortCause.CANCELLED)

    async def drain(self, timeout: float) -> bool:
        """Refuses new requests and waits for the running ones; those left after `timeout` seconds are ended.

        Returns whether all finished by themselves.
        """
        self._unavailable = self._unavailable or "is draining"
        try:
            await asyncio.wait_for(self._no_streams.wait(), timeout)
        except TimeoutError:
            for key in self._streams:
                self._abort(key, AbortCause.SHUTDOWN)
            return False
        return True

    def stop(self) -> None:
        """Ends what still runs and the engine's thread; blocks for at most the step that is under way."""
        self._unavailable = self._unavailable or "has stopped"
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._fail_streams(EngineUnavailable("the engine has stopped"))

    async def _compiled(self, request: EngineRequest) -> Grammar | None:
        constraint = request.params.structured_output
        if constraint is None:
            return None
        if self._compile_grammar is None:
            raise RequestRejected("structured_output", "is not served here")
        return await asyncio.to_thread(self._compile_grammar, constraint)

    def _refuse_if_unavailable(self) -> None:
        if self._unavailable:
            raise EngineUnavailable(f"the engine {self._unavailable}")

    def _abort(self, key: str, cause: AbortCause) -> None:
        with self._wake:
            self._aborts.append((key, cause))
            self._wake.notify()

    # What follows, down to `_call_loop`, runs in the engine's thread.

    def _run(self) -> None:
        try:
            self._report()
            while self._wait_for_work():
                self._step()
        except BaseException as error:
            logger.exception("the engine failed")
            self._hand_over()
            self._call_loop(self._fail, error)

    def _wait_for_work(self) -> bool:
        """Returns True once there is something to do and False once the engine is to stop."""
        checked = False
        while True:
            with self._wake:
                if self._wake.wait_for(self._is_wanted, self._heartbeat_seconds):
                    return not self._stopping
            # Idle for a whole heartbeat: a good time to look whether the books add up.
            if not checked:
                self._engine.scheduler.check()
                checked = True
            self._report()

    def _is_wanted(self) -> bool:
        return bool(self._stopping or self._arrivals or self._aborts or self._engine.has_work)

    def _step(self) -> None:
        with self._wake:
            arrivals, self._arrivals = self._arrivals, []
            aborts, self._aborts = self._aborts, []
        refused: list[tuple[str, Exception]] = []
        for request, grammar in arrivals:
            try:
                self._engine.add(request, grammar)
            except Exception as error:
                refused.append((request.request_id, error))
        for key, cause in aborts:
            self._engine.abort(key, cause)
        outputs = self._engine.step(self._hand_over)
        self._hand_over()
        self._made = outputs, refused
        if not self._is_wanted():
            self._hand_over()
        self._report()

    def _hand_over(self) -> None:
        """Gives the loop what the last step made.

        While the next step's model runs, if there is one: before, the loop's thread would take the interpreter from the
        engine's just when neither the model nor anything else can run without it.
        """
        outputs, refused = self._made
        self._made = [], []
        if outputs or refused:
            self._call_loop(self._deliver, outputs, refused)

    def _report(self) -> None:
        if self._on_stats is not None:
            self._on_stats(self._engine.stats())

    def _call_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop is closed: nobody is left to tell.
            self._stopping = True

    # What follows runs on the event loop.

    def _deliver(self, outputs: list[RequestOutput], refused: list[tuple[str, Exception]]) -> None:
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)
        for key, error in refused:
            if (stream := self._streams.get(key)) is not None:
                stream.fail(error)

    def _fail(self, error: BaseException) -> None:
        self._unavailable = f"has failed: {error!r}"
        self._fail_streams(EngineUnavailable(f"the engine {self._unavailable}"))
        if self._on_fatal is not None:
            self._on_fatal(error)

    def _fail_streams(self, error: EngineUnavailable) -> None:
        for stream in self._streams.values():
            stream.fail(error)
