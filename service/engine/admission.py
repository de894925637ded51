"""What may run on an engine at all, and the sequences that a request becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from service.engine.block_pool import BlockPool, block_hash, root_hash
from service.engine.config import EngineConfig
from service.engine.embedding import EmbeddingPool
from service.engine.request import EngineRequest, RequestRejected
from service.engine.sampling_state import SamplingState
from service.engine.sequence import Sequence
from service.text.output import TextOutput

if TYPE_CHECKING:
    from service.text.structured import Grammar
    from service.text.tokenizer import Tokenizer


class Admission:
    """Checks requests and makes their sequences; changes nothing, so any thread may ask.

    `adapter_identity` is as `Engine` takes it.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        tokenizer: Tokenizer,
        adapter_identity: Callable[[str], str] | None,
    ) -> None:
        self._config = config
        self._block_size = pool.block_size
        self._cache_tokens = pool.num_blocks * pool.block_size
        # The last token of an answer is never fed back, so it needs no place in the cache.
        self._longest = min(config.context_length, self._cache_tokens + 1)
        self._tokenizer = tokenizer
        self._adapter_identity = adapter_identity

    def check(self, request: EngineRequest) -> None:
        """Raises RequestRejected when the request can never run here."""
        prompt, max_tokens = request.prompt_token_ids, request.params.max_tokens
        if not prompt:
            raise RequestRejected("prompt", "holds no tokens")
        if min(prompt) < 0 or max(prompt) >= self._config.vocab_size:
            raise RequestRejected("prompt_token_ids", f"token ids go from 0 to {self._config.vocab_size - 1}")
        if max_tokens < 1 or request.params.n < 1:
            raise RequestRejected("max_tokens" if max_tokens < 1 else "n", "must be 1 or more")
        self._check_length(request)
        self._adapter(request)

    def prefix_hashes(self, request: EngineRequest, most_blocks: int) -> list[bytes]:
        """As `Engine.prefix_hashes`."""
        if not self._config.prefix_caching:
            return []
        size, prompt = self._block_size, request.prompt_token_ids
        digest = root_hash(self._prefix_key(request, 0))
        hashes = []
        for start in range(0, min((len(prompt) - 1) // size, most_blocks) * size, size):
            digest = block_hash(digest, prompt[start : start + size])
            hashes.append(digest)
        return hashes

    def sequences(self, request: EngineRequest, number: int, grammar: Grammar | None) -> list[Sequence]:
        """The completions of a checked request, the `number`th that the engine takes."""
        params, prompt, eos = request.params, request.prompt_token_ids, self._config.eos_token_ids
        turn = request.arrived_at - request.priority * self._config.priority_seconds
        first_hash = root_hash(self._prefix_key(request, number))
        vocab_size = self._config.vocab_size
        return [
            Sequence(
                request_id=request.request_id,
                order=(turn, number, index),
                prompt_token_ids=prompt,
                first_hash=first_hash,
                sampling=SamplingState(params, prompt, index, vocab_size, eos, grammar and grammar.copy()),
                text=TextOutput(self._tokenizer, prompt, params, eos),
                max_tokens=params.max_tokens,
                wants_prompt_logprobs=params.prompt_logprobs is not None and index == 0,
                embedding=EmbeddingPool(request.embedding) if request.embedding else None,
            )
            for index in range(params.n)
        ]

    def _check_length(self, request: EngineRequest) -> None:
        prompt, max_tokens = request.prompt_token_ids, request.params.max_tokens
        limit = self._longest
        bound = "context length" if limit == self._config.context_length else "KV cache"
        if request.embedding is not None:
            limit = min(limit, self._cache_tokens)
            if len(prompt) > limit:
                raise RequestRejected("prompt", f"has {len(prompt)} tokens; the {bound} holds {limit}")
            return
        if len(prompt) >= limit:
            raise RequestRejected(
                "prompt", f"has {len(prompt)} tokens; the {bound} holds {limit} with at least one new token"
            )
        if len(prompt) + max_tokens > limit:
            raise RequestRejected(
                "max_tokens",
                f"is {max_tokens}; the {bound} of {limit} leaves {limit - len(prompt)} after the prompt",
            )

    def _adapter(self, request: EngineRequest) -> str:
        if not request.lora_name:
            return ""
        if self._adapter_identity is None:
            raise RequestRejected("lora_name", "no adapters are served")
        try:
            return self._adapter_identity(request.lora_name)
        except KeyError:
            raise RequestRejected("lora_name", f"no adapter {request.lora_name!r} is loaded") from None

    def _prefix_key(self, request: EngineRequest, number: int) -> str:
        # Without prefix caching blocks are still shared, but only among the completions of one request.
        scope = "" if self._config.prefix_caching else str(number)
        return f"{self._config.weights_digest}\0{self._adapter(request)}\0{scope}"
