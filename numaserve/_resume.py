"""What it takes to go on with a stream that broke off: the prompt and the tokens so far make the next prompt."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from numaserve.errors import InferenceError
from numaserve.v1 import inference_pb2

# So many interruptions in a row without a token between them are taken for an outage.
MAX_ATTEMPTS = 5
FIRST_DELAY_SECONDS = 0.1

# What depends on more of the answer than its tokens cannot go on in the middle.
_UNRESUMABLE = ("stop", "structured_output", "presence_penalty", "frequency_penalty")


class Resumption:
    """One stream over all its attempts. Raises ValueError naming the field when the request cannot be resumed."""

    def __init__(self, request: inference_pb2.InferRequest) -> None:
        for field, value in request.ListFields():
            if field.name in _UNRESUMABLE or (field.name == "n" and value != 1):
                raise ValueError(f"{field.name}: a stream with it cannot be resumed")
        self.prompt_token_ids: Sequence[int] = request.prompt_token_ids
        self._request = request
        self._received: list[int] = []
        self._carried = 0
        self._repeats_last = False
        self._attempts = 0

    @property
    def delay(self) -> float:
        """Seconds to wait before the next attempt."""
        return FIRST_DELAY_SECONDS * 2 ** (self._attempts - 1)

    @property
    def tokenize_request(self) -> inference_pb2.TokenizeRequest | None:
        """What gives the `prompt_token_ids` that going on needs; None while they are known or not needed."""
        request = self._request
        if self.prompt_token_ids or not self._received:
            return None
        return inference_pb2.TokenizeRequest(
            model=request.model, text=request.prompt, messages=request.messages
        )

    def take(self, part: inference_pb2.InferStreamResponse) -> inference_pb2.InferStreamResponse:
        """Note a part that came; returns it as it would be in an answer made in one go."""
        if self._repeats_last:
            del part.token_ids[:]
            del part.logprobs[:]
            part.text = ""
        self._received += part.token_ids
        if part.token_ids:
            self._attempts = 0
        if part.HasField("usage"):
            part.usage.prompt_tokens -= self._carried
            part.usage.completion_tokens += self._carried
        return part

    def interrupted(self, error: InferenceError) -> None:
        """Note that the stream broke off; raises `error` when it is no use to go on."""
        self._attempts += 1
        if error.code is not grpc.StatusCode.UNAVAILABLE or self._attempts > MAX_ATTEMPTS:
            raise error

    def next_request(self) -> inference_pb2.InferRequest:
        """The request that goes on where the stream broke off; at first, the request itself."""
        request = inference_pb2.InferRequest()
        request.CopyFrom(self._request)
        received = self._received
        # All tokens came and only the end did not: the last one is made once more, to learn how the answer ends.
        self._repeats_last = request.HasField("max_tokens") and len(received) >= request.max_tokens
        if self._repeats_last:
            received = received[:-1]
        self._carried = len(received)
        if not self._received:
            return request
        for field in ("prompt", "messages", "echo", "prompt_logprobs", "prompt_token_ids"):
            request.ClearField(field)
        request.prompt_token_ids.extend([*self.prompt_token_ids, *received])
        if request.HasField("max_tokens"):
            request.max_tokens -= len(received)
        if request.HasField("min_tokens"):
            request.min_tokens = max(0, request.min_tokens - len(received))
        return request
