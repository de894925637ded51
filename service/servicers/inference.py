"""The Inference service: Infer, InferStream, Embed, Tokenize, GetModelInfo."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import NoReturn, ParamSpec, Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from numaserve.v1 import inference_pb2, inference_pb2_grpc
from service.engine.async_engine import EngineUnavailable
from service.engine.request import EngineRequest, FinishReason, QueueFull, RequestOutput, RequestRejected
from service.engine.sequence import AbortCause
from service.served_model import ServedModel
from service.servicers.answers import AnswerWriter
from service.servicers.embedding import check_embed_request, embed_response
from service.servicers.errors import (
    FieldViolation,
    InvalidRequest,
    Violations,
    abort,
    abort_invalid,
    retry_info,
)
from service.servicers.prompt import tokenize_prompt
from service.servicers.stall_guard import StalledClient, StallGuard
from service.servicers.validation import check_infer_request, check_model_name

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name

# By then a sibling or a successor answers on the same port.
RETRY_AFTER_DRAIN_SECONDS = 1.0

# So many inputs of one Embed call are with the engine at once, so that one call cannot fill the queue.
EMBED_AT_ONCE = 16

# Larger requests are checked and tokenized in a thread: this much takes well under a millisecond.
INLINE_BYTES = 4096

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What runs requests: the worker's own engine, or one that may hand them to a sibling."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput]:
        """Outputs as they are made; closing it aborts the request.

        Raises RequestRejected or QueueFull before the first output.
        """


class RequestAborted(RuntimeError):
    """The engine gave a request up before its end, for `cause`."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


async def run_beside_loop(
    request: Message, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """What `function` returns; run in a thread when `request` is large, so that the event loop goes on."""
    if request.ByteSize() <= INLINE_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def tokenize(request: inference_pb2.TokenizeRequest, model: ServedModel) -> inference_pb2.TokenizeResponse:
    """The answer to a TokenizeRequest. Raises InvalidRequest."""
    violations = Violations()
    check_model_name(request.model, model, violations)
    prompt = tokenize_prompt(request, model, violations)
    violations.raise_if_any()
    assert prompt is not None
    tokens = [model.tokenizer.token_text(token) for token in prompt.token_ids]
    return inference_pb2.TokenizeResponse(token_ids=prompt.token_ids, tokens=tokens, text=prompt.text or "")


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Runs requests on `engine` and answers for `model`.

    `max_request_seconds` bounds requests whose client set no nearer deadline. A client that takes no part of
    its stream for `stalled_client_seconds` loses its request, so that an abandoned call cannot hold KV blocks
    for ever. `answered` counts the calls that were answered or refused.
    """

    def __init__(
        self,
        model: ServedModel,
        engine: Engine,
        *,
        max_request_seconds: float | None = None,
        stalled_client_seconds: float = 60.0,
    ) -> None:
        self._model = model
        self._engine = engine
        self._writer = AnswerWriter.of(model)
        self._max_request_seconds = max_request_seconds
        self._stalled_client_seconds = stalled_client_seconds
        self.answered = 0
        self._running: set[asyncio.Task] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._stopped = False

    def drain(self) -> None:
        """Refuse new calls with UNAVAILABLE; running ones go on."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Return when no call is running."""
        await self._idle.wait()

    def stop(self) -> None:
        """End running calls with UNAVAILABLE."""
        self._draining = self._stopped = True
        for task in self._running:
            task.cancel()

    async def Infer(
        self, request: inference_pb2.InferRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.InferResponse:
        request_id = request.request_id or uuid.uuid4().hex
        deadline = self._deadline(context)
        async with self._call(context, request_id):
            checked = await run_beside_loop(
                request, check_infer_request, request, self._model, request_id, deadline
            )
            async with aclosing(self._engine.generate(checked.engine_request)) as stream:
                outputs = [output async for output in stream]
            _require_complete(outputs[-1] if outputs else None)
            return self._writer.whole(checked, outputs)

    async def InferStream(
        self, request: inference_pb2.InferRequest, context: grpc.aio.ServicerContext
    ) -> None:
        request_id = request.request_id or uuid.uuid4().hex
        deadline = self._deadline(context)
        async with self._call(context, request_id):
            checked = await run_beside_loop(
                request, check_infer_request, request, self._model, request_id, deadline
            )
            begun: set[int] = set()
            last: RequestOutput | None = None
            with StallGuard(context, self._stalled_client_seconds) as guard:
                async with aclosing(self._engine.generate(checked.engine_request)) as stream:
                    async for output in stream:
                        last = output
                        echo = output.index not in begun
                        part = self._writer.part(checked, output, first=not begun, echo=echo)
                        begun.add(output.index)
                        await guard.write(part)
            _require_complete(last)

    async def Embed(
        self, request: inference_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.EmbedResponse:
        request_id = request.request_id or uuid.uuid4().hex
        deadline = self._deadline(context)
        async with self._call(context, request_id):
            checked = await run_beside_loop(
                request, check_embed_request, request, self._model, request_id, deadline
            )
            room = asyncio.Semaphore(EMBED_AT_ONCE)
            tasks = [asyncio.create_task(self._embedding(each, room)) for each in checked]
            try:
                outputs = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            return embed_response(request_id, self._model, outputs, self._writer.served_by)

    async def _embedding(self, request: EngineRequest, room: asyncio.Semaphore) -> RequestOutput:
        async with room, aclosing(self._engine.generate(request)) as stream:
            last = None
            async for output in stream:
                last = output
        return _require_complete(last)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        async with self._call(context, uuid.uuid4().hex):
            return await run_beside_loop(request, tokenize, request, self._model)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.GetModelInfoResponse:
        async with self._call(context, uuid.uuid4().hex):
            violations = Violations()
            check_model_name(request.model, self._model, violations)
            violations.raise_if_any()
            model = self._model
            return inference_pb2.GetModelInfoResponse(
                model=model.name,
                model_type=model.model_type,
                model_path=model.model_path,
                dtype=model.dtype,
                parameters=model.parameters,
                vocab_size=model.vocab_size,
                max_context_length=model.max_context_length,
                eos_token_ids=model.eos_token_ids,
                has_chat_template=model.chat_template is not None,
                weights_digest=model.weights_digest,
                weights_bytes=model.weights_bytes,
                placement=model.placement,
                server_version=model.server_version,
            )

    @asynccontextmanager
    async def _call(self, context: grpc.aio.ServicerContext, request_id: str) -> AsyncIterator[None]:
        """Count the call as running, and end it with the status that belongs to what is raised inside."""
        if self._draining:
            await self._abort_unavailable(context, "the worker is draining")
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._idle.clear()
        try:
            yield
            self.answered += 1
        except InvalidRequest as error:
            self.answered += 1
            await abort_invalid(context, error)
        except RequestRejected as error:
            self.answered += 1
            await abort_invalid(context, InvalidRequest([FieldViolation(error.field, error.problem)]))
        except QueueFull as error:
            self.answered += 1
            await abort(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                str(error),
                retry_info(error.retry_after_seconds),
            )
        except RequestAborted as error:
            if error.cause == AbortCause.DEADLINE:
                await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline has passed")
            if error.cause == AbortCause.ERROR:
                await self._abort_internal(context, request_id)
            await self._abort_unavailable(context, "the worker stopped before the answer was complete")
        except EngineUnavailable as error:
            await self._abort_unavailable(context, str(error))
        except StalledClient as error:
            logger.warning("request %r: %s", request_id, error)
            await abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            task.uncancel()
            await self._abort_unavailable(context, "the worker stopped before the answer was complete")
        except grpc.aio.BaseError:
            raise
        except Exception:
            logger.exception("request %r failed", request_id)
            await self._abort_internal(context, request_id)
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle.set()

    async def _abort_internal(self, context: grpc.aio.ServicerContext, request_id: str) -> NoReturn:
        await abort(
            context,
            grpc.StatusCode.INTERNAL,
            f"internal error; the server's log has it under request id {request_id}",
            error_details_pb2.RequestInfo(request_id=request_id),
        )

    async def _abort_unavailable(self, context: grpc.aio.ServicerContext, message: str) -> NoReturn:
        await abort(context, grpc.StatusCode.UNAVAILABLE, message, retry_info(RETRY_AFTER_DRAIN_SECONDS))

    def _deadline(self, context: grpc.aio.ServicerContext) -> float | None:
        """When the request must have ended, in `time.monotonic()` seconds."""
        limits = [
            limit for limit in (context.time_remaining(), self._max_request_seconds) if limit is not None
        ]
        return time.monotonic() + min(limits) if limits else None


def _require_complete(last: RequestOutput | None) -> RequestOutput:
    if last is None or not last.request_finished:
        raise RuntimeError("the engine ended a request without its last output")
    if last.finish_reason is FinishReason.ABORT:
        raise RequestAborted(last.stop_reason)
    return last
