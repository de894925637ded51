"""The engine: takes requests, steps the model over all of them, and says what each step added to each."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from service.engine.block_pool import BlockPool, block_hash, root_hash
from service.engine.embedding import EmbeddingPool
from service.engine.request import (
    EngineRequest,
    EngineStats,
    FinishReason,
    QueueFull,
    RequestOutput,
    RequestRejected,
)
from service.engine.sampler import SampledToken, SamplingState, prompt_logprobs, sample
from service.engine.scheduler import Scheduled, Scheduler
from service.engine.sequence import AbortCause, RequestState, Sequence
from service.engine.step_batch import StepBatch, StepBatcher
from service.models.batch import ForwardBatch, PagedKVCache
from service.text.output import TextOutput

if TYPE_CHECKING:
    from service.text.structured import Grammar
    from service.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Model(Protocol):
    """What the engine needs of a decoder."""

    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """Writes the rows' keys and values to the cache; returns float32 logits [samples, vocab]."""

    def hidden_states(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """Writes the rows' keys and values to the cache; returns their last hidden states [rows, hidden]."""


@dataclass(frozen=True)
class EngineConfig:
    """The engine's limits. `context_length` is prompt and answer together, in tokens.

    A step computes at most `max_batch_tokens` tokens of at most `max_sequences` sequences; `max_queue`
    requests may wait. A priority of p puts a request before those that arrived up to p * `priority_seconds`
    earlier: whatever keeps arriving with a higher priority, each request's turn comes. `weights_digest` keeps
    cached prefixes of other weights apart.
    """

    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    max_sequences: int = 64
    max_batch_tokens: int = 512
    max_queue: int = 512
    prefix_caching: bool = True
    weights_digest: str = ""
    priority_seconds: float = 30.0


class Engine:
    """Synchronous and for one thread; `check`, `refuse_if_full` and `stats` may be called from any thread.

    `adapter_identity` gives what tells an adapter of a name from every other one ever loaded, or raises
    KeyError; without it no adapter is served. `clock` is in the same seconds as the requests' times.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        tokenizer: Tokenizer,
        config: EngineConfig,
        adapter_identity: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.pool = BlockPool(cache.num_blocks, cache.block_size)
        self.scheduler = Scheduler(self.pool, config.max_sequences, config.max_batch_tokens)
        # The last token of an answer is never fed back, so it needs no place in the cache.
        self.max_sequence_length = min(config.context_length, cache.num_blocks * cache.block_size + 1)
        most_blocks = min(cache.num_blocks, -(-config.context_length // cache.block_size))
        self._batcher = StepBatcher(config.max_sequences, most_blocks, cache.block_size, cache.keys.device)
        self._model = model
        self._cache = cache
        self._tokenizer = tokenizer
        self._adapter_identity = adapter_identity
        self._clock = clock
        self._requests: dict[str, RequestState] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._outputs: list[RequestOutput] = []
        self._not_started = 0
        self._last_start: float | None = None
        self._start_interval = 0.0
        self._steps = 0
        self._accepted = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._cached_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do or return anything."""
        return bool(self._requests or self._outputs)

    def stats(self) -> EngineStats:
        """A snapshot; `running` and `waiting` count completions."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_blocks_total=self.pool.num_blocks,
            kv_blocks_free=self.pool.free_count,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=self._cached_tokens,
            requests=self._accepted,
            preemptions=self.scheduler.preemptions,
            steps=self._steps,
        )

    def check(self, request: EngineRequest) -> None:
        """Raises RequestRejected when the request can never run here."""
        prompt, max_tokens = request.prompt_token_ids, request.params.max_tokens
        if not prompt:
            raise RequestRejected("prompt", "holds no tokens")
        if min(prompt) < 0 or max(prompt) >= self.config.vocab_size:
            raise RequestRejected("prompt_token_ids", f"token ids go from 0 to {self.config.vocab_size - 1}")
        if max_tokens < 1 or request.params.n < 1:
            raise RequestRejected("max_tokens" if max_tokens < 1 else "n", "must be 1 or more")
        self._check_length(request)
        self._adapter(request)

    def _check_length(self, request: EngineRequest) -> None:
        prompt, max_tokens = request.prompt_token_ids, request.params.max_tokens
        limit = self.max_sequence_length
        bound = "context length" if limit == self.config.context_length else "KV cache"
        if request.embedding is not None:
            limit = min(limit, self.pool.num_blocks * self.pool.block_size)
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

    def refuse_if_full(self, arriving: int = 0) -> None:
        """Raises QueueFull when no further request may wait, `arriving` more being on their way."""
        waiting = self._not_started + arriving
        if waiting >= self.config.max_queue:
            # All who are refused now come back together, so they are told to wait until half the queue has
            # started.
            estimate = self._start_interval * waiting / 2
            raise QueueFull(waiting, self.config.max_queue, min(60.0, max(0.1, estimate)))

    def prefix_hashes(self, request: EngineRequest, most_blocks: int) -> list[bytes]:
        """The hashes by which the cache would know the full blocks of the prompt, `most_blocks` at most.

        Empty where cached prefixes are not kept. Raises RequestRejected for an unknown adapter.
        """
        if not self.config.prefix_caching:
            return []
        size, prompt = self.pool.block_size, request.prompt_token_ids
        digest = root_hash(self._prefix_key(request, 0))
        hashes = []
        for start in range(0, min((len(prompt) - 1) // size, most_blocks) * size, size):
            digest = block_hash(digest, prompt[start : start + size])
            hashes.append(digest)
        return hashes

    def add(self, request: EngineRequest, grammar: Grammar | None = None) -> None:
        """Queues a request; `grammar` is its compiled constraint. Raises RequestRejected or QueueFull."""
        self.check(request)
        if request.request_id in self._requests:
            raise RequestRejected("request_id", f"{request.request_id} is already running")
        if request.params.structured_output is not None and grammar is None:
            raise RequestRejected("structured_output", "was not compiled")
        self.refuse_if_full()
        number = self._accepted
        state = RequestState(request, number, self._sequences(request, number, grammar))
        self._requests[request.request_id] = state
        self.scheduler.add(state.sequences[0])
        if request.deadline is not None:
            insort(self._deadlines, (request.deadline, number, request.request_id))
        self._accepted += 1
        self._not_started += 1

    def abort(self, request_id: str, cause: AbortCause = AbortCause.CANCELLED) -> None:
        """Ends a request, if it is known, and frees its blocks; the next step returns its last outputs."""
        state = self._requests.get(request_id)
        if state is not None:
            self._outputs += self._end(state, cause)

    def step(self) -> list[RequestOutput]:
        """Runs the model once over whatever is scheduled and returns what that added.

        An exception leaves no request in a state that could go on.
        """
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            self._outputs += self._end(self._requests[self._deadlines[0][2]], AbortCause.DEADLINE)
        outputs, self._outputs = self._outputs, []
        if not self._requests:
            return outputs
        scheduled = self.scheduler.schedule()
        if not scheduled:
            raise RuntimeError("requests wait and nothing can be scheduled")
        self._note_starts(now)
        generating = [piece for piece in scheduled if piece.sequence.embedding is None]
        embedding = [piece for piece in scheduled if piece.sequence.embedding is not None]
        with torch.inference_mode():
            if generating:
                outputs += self._generate(generating)
            if embedding:
                outputs += self._embed(embedding)
        self._steps += 1
        return outputs

    def _generate(self, pieces: list[Scheduled]) -> list[RequestOutput]:
        step = self._batcher.build(pieces)
        logits = self._model.forward(step.forward, self._cache)
        self._note_computed(pieces)
        outputs = []
        if step.described:
            outputs += self._describe_prompts(step, logits[len(step.sampled) :])
        outputs += self._advance(step.sampled, self._sample(logits[: len(step.sampled)], step.sampled))
        return outputs

    def _embed(self, pieces: list[Scheduled]) -> list[RequestOutput]:
        step = self._batcher.build(pieces)
        hidden = self._model.hidden_states(step.forward, self._cache)
        outputs: list[RequestOutput] = []
        for piece, part in zip(pieces, step.forward.sequences, strict=True):
            sequence, pool = piece.sequence, piece.sequence.embedding
            assert pool is not None
            rows = hidden[part.query_start : part.query_start + part.query_length]
            pool.add(part.context_length - part.query_length, rows)
            self.scheduler.computed(piece)
            if sequence.remaining == 0:
                outputs += self._finish_embedding(sequence, pool)
        return outputs

    def _finish_embedding(self, sequence: Sequence, pool: EmbeddingPool) -> list[RequestOutput]:
        state = self._requests[sequence.request_id]
        output = RequestOutput(sequence.request_id, finish_reason=FinishReason.STOP)
        try:
            output.embedding = pool.vector()
        except ValueError:
            return self._fail(state)
        now = self._clock()
        state.first_token_at = now
        self._finish(state, sequence, output, now)
        return [output]

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
        scope = "" if self.config.prefix_caching else str(number)
        return f"{self.config.weights_digest}\0{self._adapter(request)}\0{scope}"

    def _sequences(self, request: EngineRequest, number: int, grammar: Grammar | None) -> list[Sequence]:
        params, prompt, eos = request.params, request.prompt_token_ids, self.config.eos_token_ids
        turn = request.arrived_at - request.priority * self.config.priority_seconds
        first_hash = root_hash(self._prefix_key(request, number))
        vocab_size = self.config.vocab_size
        return [
            Sequence(
                request_id=request.request_id,
                order=(turn, number, index),
                prompt_token_ids=prompt,
                first_hash=first_hash,
                sampling=SamplingState(params, prompt, index, vocab_size, eos, grammar and grammar.copy()),
                text=TextOutput(self._tokenizer, prompt, params, eos),
                wants_prompt_logprobs=params.prompt_logprobs is not None and index == 0,
                embedding=EmbeddingPool(request.embedding) if request.embedding else None,
            )
            for index in range(params.n)
        ]

    def _note_starts(self, now: float) -> None:
        for sequence in self.scheduler.admitted:
            state = self._requests[sequence.request_id]
            if state.started_at is not None:
                continue
            state.started_at = now
            state.cached_tokens = sequence.num_computed
            self._not_started -= 1
            self._prompt_tokens += sequence.prompt_length
            self._cached_tokens += sequence.num_computed
            if self._last_start is not None:
                self._start_interval += 0.2 * (now - self._last_start - self._start_interval)
            self._last_start = now

    def _note_computed(self, scheduled: list[Scheduled]) -> None:
        for piece in scheduled:
            sequence = piece.sequence
            self.scheduler.computed(piece)
            if sequence.index == 0 and sequence.num_computed >= sequence.prompt_length:
                state = self._requests[sequence.request_id]
                if state.siblings_held:
                    state.siblings_held = False
                    for sibling in state.sequences[1:]:
                        self.scheduler.add(sibling)

    def _describe_prompts(self, step: StepBatch, logits: torch.Tensor) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        row = 0
        for sequence, count in step.described:
            state = self._requests[sequence.request_id]
            known = len(sequence.prompt_logprobs)
            next_ids = sequence.token_ids[known : known + count]
            top = state.request.params.prompt_logprobs or 0
            try:
                sequence.prompt_logprobs += prompt_logprobs(logits[row : row + count], next_ids, top)
            except ValueError:
                outputs += self._fail(state)
            row += count
        return outputs

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        try:
            return sample(logits, [sequence.sampling for sequence in sequences])
        except Exception:
            # One request's constraint may be at fault: alone, only that one fails.
            logger.exception("sampling failed; sampling its %d rows one by one", len(sequences))
        alone: list[SampledToken] = []
        for row, sequence in enumerate(sequences):
            try:
                alone += sample(logits[row : row + 1], [sequence.sampling])
            except Exception as error:
                alone.append(SampledToken(-1, error=repr(error)))
        return alone

    def _advance(self, sequences: list[Sequence], tokens: list[SampledToken]) -> list[RequestOutput]:
        now = self._clock()
        outputs: list[RequestOutput] = []
        for sequence, token in zip(sequences, tokens, strict=True):
            state = self._requests.get(sequence.request_id)
            if state is None:
                continue  # the request failed in this step
            try:
                if token.error is not None:
                    raise ValueError(token.error)
                outputs.append(self._append(state, sequence, token, now))
            except Exception:
                outputs += self._fail(state)
        return outputs

    def _fail(self, state: RequestState) -> list[RequestOutput]:
        logger.exception("request %s failed", state.request.request_id)
        return self._end(state, AbortCause.ERROR)

    def _append(
        self, state: RequestState, sequence: Sequence, token: SampledToken, now: float
    ) -> RequestOutput:
        token_id, params = token.token_id, state.request.params
        sequence.sampling.accept(token_id)
        sequence.token_ids.append(token_id)
        self._generated_tokens += 1
        if state.first_token_at is None:
            state.first_token_at = now
        delta = sequence.text.append(token_id)
        output = RequestOutput(sequence.request_id, sequence.index, delta.text, [token_id])
        if token.logprobs is not None:
            output.logprobs.append(token.logprobs)
        if sequence.prompt_logprobs and sequence.num_generated == 1:
            output.prompt_logprobs = sequence.prompt_logprobs

        is_end = token_id in params.stop_token_ids or (
            token_id in self.config.eos_token_ids and not params.ignore_eos
        )
        if delta.stop_reason is not None or is_end or sequence.sampling.is_finished:
            output.finish_reason = FinishReason.STOP
        elif (
            sequence.num_generated >= params.max_tokens or len(sequence.token_ids) >= self.max_sequence_length
        ):
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is not None:
            output.text += sequence.text.finish()
            if sequence.text.stop_reason is not None:
                # The last characters, complete only now, may have completed a stop string.
                output.finish_reason, output.stop_reason = FinishReason.STOP, sequence.text.stop_reason
            self._finish(state, sequence, output, now)
        return output

    def _end(self, state: RequestState, cause: AbortCause) -> list[RequestOutput]:
        now = self._clock()
        outputs = []
        for sequence in list(state.unfinished.values()):
            text = "" if cause is AbortCause.ERROR else sequence.text.finish()
            output = RequestOutput(sequence.request_id, sequence.index, text)
            output.finish_reason, output.stop_reason = FinishReason.ABORT, cause.value
            self._finish(state, sequence, output, now)
            outputs.append(output)
        return outputs

    def _finish(self, state: RequestState, sequence: Sequence, output: RequestOutput, now: float) -> None:
        self.scheduler.remove(sequence)
        del state.unfinished[sequence.index]
        if state.unfinished:
            return
        request = state.request
        del self._requests[request.request_id]
        if request.deadline is not None:
            deadline = (request.deadline, state.number, request.request_id)
            del self._deadlines[bisect_left(self._deadlines, deadline)]
        if state.started_at is None:
            self._not_started -= 1
        output.request_finished = True
        output.prompt_tokens = len(request.prompt_token_ids)
        output.completion_tokens = sum(sequence.num_generated for sequence in state.sequences)
        output.cached_tokens = state.cached_tokens
        output.total_seconds = now - request.arrived_at
        output.queued_seconds = (now if state.started_at is None else state.started_at) - request.arrived_at
        if state.first_token_at is not None:
            output.first_token_seconds = state.first_token_at - request.arrived_at
