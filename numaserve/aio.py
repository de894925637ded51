"""The client for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from numaserve._channel import (
    DEFAULT_ADDRESS,
    DEFAULT_KEEPALIVE_SECONDS,
    DEFAULT_MAX_MESSAGE_BYTES,
    channel_options,
    channel_target,
)
from numaserve._fields import EmbedInputs, Message, chat_messages, embed_request, infer_request
from numaserve._resume import Resumption
from numaserve.errors import InferenceError
from numaserve.v1 import inference_pb2, inference_pb2_grpc


class AsyncClient:
    """Calls one server, or several in turn ("a:50051,b:50051"), from the event loop that it was made in.

    `timeout` in seconds is the deadline of each call that sets none. `keepalive_seconds` None sends no pings.
    `options` are further channel options. Every method raises InferenceError when its call fails.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = None,
        keepalive_seconds: float | None = DEFAULT_KEEPALIVE_SECONDS,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        target = channel_target(address)
        settings = [*channel_options(target, keepalive_seconds, max_message_bytes), *options]
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(target, settings)
        else:
            self._channel = grpc.aio.secure_channel(target, credentials, settings)
        self._timeout = timeout
        # The channel's own close() leaves streams that nobody reads just now.
        self._streams: set[grpc.aio.UnaryStreamCall] = set()
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def infer(
        self,
        prompt: str | None = None,
        *,
        messages: Iterable[Message] | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
        **fields: Any,
    ) -> inference_pb2.InferResponse:
        """The whole answer. `fields` are InferRequest's own; messages may be dicts or (role, content)."""
        request = infer_request(fields | {"prompt": prompt, "messages": messages, "max_tokens": max_tokens})
        return await self._unary(self._inference.Infer, request, timeout)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Iterable[Message] | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
        resume: bool = False,
        **fields: Any,
    ) -> AsyncGenerator[inference_pb2.InferStreamResponse]:
        """The answer in parts, as it is made; arguments as for `infer`. Closing the iterator cancels it.

        A loop that may be left early belongs in `contextlib.aclosing`, so that the call ends there and then.

        With `resume`, a stream that breaks off because its server or worker went away goes on elsewhere: prompt and
        tokens so far are sent as the new prompt. A greedy answer is the one that would have come in one go; a sampled
        one goes on with other random numbers. Raises ValueError for what cannot go on in the middle: `n` over 1, stop
        strings, structured output, presence and frequency penalties.
        """
        request = infer_request(fields | {"prompt": prompt, "messages": messages, "max_tokens": max_tokens})
        if resume:
            return self._resumed_parts(Resumption(request), timeout)
        return self._parts(request, timeout)

    async def embed(
        self,
        inputs: EmbedInputs,
        *,
        pooling: str = "mean",
        timeout: float | None = None,
        **fields: Any,
    ) -> inference_pb2.EmbedResponse:
        """A vector for each input: a text, a list of token ids, or several of either. `pooling` is "mean" or "last"."""
        request = embed_request(inputs, pooling, fields)
        return await self._unary(self._inference.Embed, request, timeout)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Iterable[Message] | None = None,
        add_special_tokens: bool = True,
        model: str = "",
        timeout: float | None = None,
    ) -> inference_pb2.TokenizeResponse:
        """The token ids of a text or a conversation, as `infer` would see them."""
        request = inference_pb2.TokenizeRequest(
            model=model,
            text=text,
            messages=chat_messages(messages or ()),
            add_special_tokens=add_special_tokens,
        )
        return await self._unary(self._inference.Tokenize, request, timeout)

    async def model_info(
        self, model: str = "", *, timeout: float | None = None
    ) -> inference_pb2.GetModelInfoResponse:
        """What is served."""
        request = inference_pb2.GetModelInfoRequest(model=model)
        return await self._unary(self._inference.GetModelInfo, request, timeout)

    async def health(self, service: str = "", *, timeout: float | None = None) -> str:
        """ "SERVING" or "NOT_SERVING"."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = await self._unary(self._health.Check, request, timeout)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

    async def wait_until_serving(self, timeout: float) -> None:
        """Return once the server is there and SERVING; raises InferenceError after `timeout` seconds."""
        request = health_pb2.HealthCheckRequest()
        call = self._health.Watch(request, timeout=timeout, wait_for_ready=True)
        try:
            async for response in call:
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            raise InferenceError.from_rpc_error(error) from None
        finally:
            call.cancel()
        raise InferenceError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")

    async def close(self) -> None:
        """Close the channel; calls that still run are cancelled."""
        for call in self._streams:
            call.cancel()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def _unary(
        self, method: grpc.aio.UnaryUnaryMultiCallable, request: Any, timeout: float | None
    ) -> Any:
        try:
            return await method(request, timeout=self._timeout if timeout is None else timeout)
        except grpc.RpcError as error:
            raise InferenceError.from_rpc_error(error) from None

    async def _resumed_parts(
        self, stream: Resumption, timeout: float | None
    ) -> AsyncGenerator[inference_pb2.InferStreamResponse]:
        timeout = self._timeout if timeout is None else timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                if (tokenize := stream.tokenize_request) is not None:
                    prompt = await self._unary(self._inference.Tokenize, tokenize, left)
                    stream.prompt_token_ids = prompt.token_ids
                async with aclosing(self._parts(stream.next_request(), left)) as parts:
                    async for part in parts:
                        yield stream.take(part)
                return
            except InferenceError as error:
                stream.interrupted(error)
            await asyncio.sleep(stream.delay)

    async def _parts(
        self, request: inference_pb2.InferRequest, timeout: float | None
    ) -> AsyncGenerator[inference_pb2.InferStreamResponse]:
        call = self._inference.InferStream(request, timeout=self._timeout if timeout is None else timeout)
        self._streams.add(call)
        try:
            async for part in call:
                yield part
        except grpc.RpcError as error:
            raise InferenceError.from_rpc_error(error) from None
        finally:
            self._streams.discard(call)
            call.cancel()


# `numaserve.aio.Client` mirrors `numaserve.Client`.
Client = AsyncClient
