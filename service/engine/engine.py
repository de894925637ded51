"""The engine: takes requests, steps the model over all of them, and says what each step added to each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from service.engine.admission import Admission
from service.engine.block_pool import BlockPool
from service.engine.config import EngineConfig
from service.engine.picker import Picker, open_picker
from service.engine.request import EngineRequest, EngineStats, RequestOutput, RequestRejected
from service.engine.request_book import RequestBook
from service.engine.sampler import SampledToken, prompt_logprobs, sample
from service.engine.scheduler import Piece, Scheduler
from service.engine.sequence import AbortCause, Sequence
from service.engine.slots import Generating
from service.engine.step_batch import StepBatch, StepBatcher
from service.models.batch import ForwardBatch, PagedKVCache, nothing

if TYPE_CHECKING:
    from service.text.structured import Grammar
    from service.text.tokenizer import Tokenizer

__all__ = ["Engine", "EngineConfig", "Model"]

logger = logging.getLogger(__name__)


class Model(Protocol):
    """What the engine needs of a decoder, whose methods are to run in inference mode."""

    def forward(
        self, batch: ForwardBatch, cache: PagedKVCache, before_computing: Callable[[], None]
    ) -> torch.Tensor:
        """Writes the rows' keys and values to the cache; returns float32 logits [samples, vocab].

        Calls `before_computing` once, when as little as can be is left to do in the interpreter.
        """

    def hidden_states(
        self, batch: ForwardBatch, cache: PagedKVCache, before_computing: Callable[[], None]
    ) -> torch.Tensor:
        """As `forward`, but returns the rows' last hidden states [rows, hidden]."""


class Engine:
    """Synchronous and for one thread; `check`, `refuse_if_full` and `stats` may be called from any thread.

    `adapter_identity` gives what tells an adapter of a name from every other one ever loaded, or raises
    KeyError; without it no adapter is served. `clock` is in the same seconds as the requests' times. `picker` picks
    tokens, by default that of `open_picker` without a pool.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedKVCache,
        tokenizer: Tokenizer,
        config: EngineConfig,
        adapter_identity: Callable[[str], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        picker: Picker | None = None,
    ) -> None:
        self.config = config
        self.pool = BlockPool(cache.num_blocks, cache.block_size)
        most_blocks = min(cache.num_blocks, -(-config.context_length // cache.block_size))
        self.scheduler = Scheduler(self.pool, config.max_sequences, config.max_batch_tokens, most_blocks)
        self._nobody = Generating(self.scheduler.slots, [])
        self._batcher = StepBatcher(self.scheduler.slots, cache.keys.device)
        self._admission = Admission(config, self.pool, tokenizer, adapter_identity)
        self._book = RequestBook(self.scheduler, config.max_queue, clock)
        self._model = model
        self._cache = cache
        self._clock = clock
        self._picker = picker or open_picker()
        self._outputs: list[RequestOutput] = []
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do or return anything."""
        return bool(self._book or self._outputs)

    def stats(self) -> EngineStats:
        """A snapshot; `running` and `waiting` count completions."""
        return self._book.stats(self._steps)

    def check(self, request: EngineRequest) -> None:
        """Raises RequestRejected when the request can never run here."""
        self._admission.check(request)

    def refuse_if_full(self, arriving: int = 0) -> None:
        """Raises QueueFull when no further request may wait, `arriving` more being on their way."""
        self._book.line.refuse_if_full(arriving)

    def prefix_hashes(self, request: EngineRequest, most_blocks: int) -> list[bytes]:
        """The hashes by which the cache would know the full blocks of the prompt, `most_blocks` at most.

        Empty where cached prefixes are not kept. Raises RequestRejected for an unknown adapter.
        """
        return self._admission.prefix_hashes(request, most_blocks)

    def add(self, request: EngineRequest, grammar: Grammar | None = None) -> None:
        """Queues a request; `grammar` is its compiled constraint. Raises RequestRejected or QueueFull."""
        self.check(request)
        if request.request_id in self._book:
            raise RequestRejected("request_id", f"{request.request_id} is already running")
        if request.params.structured_output is not None and grammar is None:
            raise RequestRejected("structured_output", "was not compiled")
        self.refuse_if_full()
        self._book.take(request, self._admission.sequences(request, self._book.taken, grammar))

    def abort(self, request_id: str, cause: AbortCause = AbortCause.CANCELLED) -> None:
        """Ends a request, if it is known, and frees its blocks; the next step returns its last outputs."""
        self._outputs += self._book.abort(request_id, cause)

    def step(self, before_computing: Callable[[], None] = nothing) -> list[RequestOutput]:
        """Runs the model once over whatever is scheduled and returns what that added.

        `before_computing` is called whenever only the model's operations are next: other threads may well have the
        interpreter from there on. An exception leaves no request in a state that could go on.
        """
        now = self._clock()
        outputs, self._outputs = self._outputs + self._book.abort_overdue(now), []
        if not self._book:
            return outputs
        scheduled = self.scheduler.schedule()
        generating, pieces = scheduled.generating, scheduled.pieces
        if not generating.sequences and not pieces:
            raise RuntimeError("requests wait and nothing can be scheduled")
        self._book.note_starts(now)
        embedding = [piece for piece in pieces if piece.sequence.embedding is not None]
        if embedding:
            pieces = [piece for piece in pieces if piece.sequence.embedding is None]
        if generating.sequences or pieces:
            outputs += self._generate(generating, pieces, before_computing)
        if embedding:
            outputs += self._embed(embedding, before_computing)
        self._steps += 1
        return outputs

    def _generate(
        self, generating: Generating, pieces: list[Piece], before_computing: Callable[[], None]
    ) -> list[RequestOutput]:
        step = self._batcher.build(generating, pieces)
        logits = self._model.forward(step.forward, self._cache, before_computing)
        self.scheduler.computed_last(generating)
        for sequence in self.scheduler.computed(pieces):
            self._book.let_siblings_go(sequence)
        outputs = []
        if step.described:
            outputs += self._describe_prompts(step, logits[len(step.sampled) :])
        tokens = self._sample(logits[: len(step.sampled)], step.sampled)
        outputs += self._book.advance(step.sampled, tokens)
        return outputs

    def _embed(self, pieces: list[Piece], before_computing: Callable[[], None]) -> list[RequestOutput]:
        step = self._batcher.build(self._nobody, pieces)
        hidden = self._model.hidden_states(step.forward, self._cache, before_computing)
        outputs: list[RequestOutput] = []
        for piece, part in zip(pieces, step.forward.sequences, strict=True):
            sequence, pool = piece.sequence, piece.sequence.embedding
            assert pool is not None
            rows = hidden[part.query_start : part.query_start + part.query_length]
            pool.add(part.context_length - part.query_length, rows)
            self.scheduler.computed([piece])
            if sequence.remaining == 0:
                outputs += self._book.finish_embedding(sequence)
        return outputs

    def _describe_prompts(self, step: StepBatch, logits: torch.Tensor) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        row = 0
        for sequence, count in step.described:
            state = self._book.state_of(sequence)
            known = len(sequence.prompt_logprobs)
            next_ids = sequence.token_ids[known : known + count]
            top = state.request.params.prompt_logprobs or 0
            try:
                sequence.prompt_logprobs += prompt_logprobs(
                    logits[row : row + count], next_ids, top, self._picker
                )
            except ValueError:
                outputs += self._book.fail(state)
            row += count
        return outputs

    def _sample(self, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledToken]:
        try:
            return sample(logits, [sequence.sampling for sequence in sequences], self._picker)
        except Exception:
            # One request's constraint may be at fault: alone, only that one fails.
            logger.exception("sampling failed; sampling its %d rows one by one", len(sequences))
        alone: list[SampledToken] = []
        for row, sequence in enumerate(sequences):
            try:
                alone += sample(logits[row : row + 1], [sequence.sampling], self._picker)
            except Exception as error:
                alone.append(SampledToken(-1, error=repr(error)))
        return alone
