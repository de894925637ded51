"""The requests that an engine has taken: what each step adds to them, how they end, and what was counted."""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable

from service.engine.request import EngineRequest, EngineStats, FinishReason, RequestOutput, RequestSummary
from service.engine.sampler import SampledToken
from service.engine.scheduler import Scheduler
from service.engine.sequence import AbortCause, RequestState, Sequence
from service.engine.waiting_line import WaitingLine

logger = logging.getLogger(__name__)


class RequestBook:
    """Keeps every request from when it is taken until its last output is made; who ends leaves the scheduler.

    `clock` is in the same seconds as the requests' times.
    """

    def __init__(self, scheduler: Scheduler, max_queue: int, clock: Callable[[], float]) -> None:
        self.line = WaitingLine(max_queue)
        self.taken = 0
        self._scheduler = scheduler
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._cached_tokens = 0

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._states)

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of this id has not ended."""
        return request_id in self._states

    def stats(self, steps: int) -> EngineStats:
        """A snapshot; `running` and `waiting` count completions."""
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks_total=scheduler.pool.num_blocks,
            kv_blocks_free=scheduler.pool.free_count,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=self._cached_tokens,
            requests=self.taken,
            preemptions=scheduler.preemptions,
            steps=steps,
        )

    def take(self, request: EngineRequest, sequences: list[Sequence]) -> None:
        """Queues a request that has become these sequences."""
        state = RequestState(request, self.taken, sequences)
        self._states[request.request_id] = state
        self._scheduler.add(sequences[0])
        if request.deadline is not None:
            insort(self._deadlines, (request.deadline, state.number, request.request_id))
        self.taken += 1
        self.line.enter()

    def state_of(self, sequence: Sequence) -> RequestState:
        """The request that a sequence completes."""
        return self._states[sequence.request_id]

    def note_starts(self, now: float) -> None:
        """Notes which requests the scheduler's last step was the first of."""
        for sequence in self._scheduler.admitted:
            state = self._states[sequence.request_id]
            if state.started_at is not None:
                continue
            state.started_at = now
            state.cached_tokens = sequence.num_computed
            self._prompt_tokens += sequence.prompt_length
            self._cached_tokens += sequence.num_computed
            self.line.start(now)

    def let_siblings_go(self, sequence: Sequence) -> None:
        """Queues the other completions of a request, once this first one has computed the prompt."""
        state = self._states[sequence.request_id]
        if state.siblings_held:
            state.siblings_held = False
            for sibling in state.sequences[1:]:
                self._scheduler.add(sibling)

    def advance(self, sequences: list[Sequence], tokens: list[SampledToken]) -> list[RequestOutput]:
        """Adds a token to each sequence; a request that a token fails ends."""
        now = self._clock()
        outputs: list[RequestOutput] = []
        for sequence, token in zip(sequences, tokens, strict=True):
            if sequence.slot is None:
                continue  # the request failed in this step
            try:
                outputs.append(self._append(sequence, token, now))
            except Exception:
                outputs += self.fail(self.state_of(sequence))
        return outputs

    def finish_embedding(self, sequence: Sequence) -> list[RequestOutput]:
        """Ends a request whose prompt is embedded."""
        state, pool = self._states[sequence.request_id], sequence.embedding
        assert pool is not None
        output = RequestOutput(sequence.request_id, finish_reason=FinishReason.STOP)
        try:
            vector = pool.vector()
        except ValueError:
            return self.fail(state)
        now = self._clock()
        state.first_token_at = now
        self._finish(state, sequence, output, now)
        assert output.summary is not None
        output.summary.embedding = vector
        return [output]

    def abort(self, request_id: str, cause: AbortCause) -> list[RequestOutput]:
        """Ends a request, if it is known."""
        state = self._states.get(request_id)
        return [] if state is None else self._end(state, cause)

    def abort_overdue(self, now: float) -> list[RequestOutput]:
        """Ends the requests whose deadlines have passed."""
        outputs: list[RequestOutput] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            outputs += self._end(self._states[self._deadlines[0][2]], AbortCause.DEADLINE)
        return outputs

    def fail(self, state: RequestState) -> list[RequestOutput]:
        """Ends a request for the exception that is being handled."""
        logger.exception("request %s failed", state.request.request_id)
        return self._end(state, AbortCause.ERROR)

    def _append(self, sequence: Sequence, token: SampledToken, now: float) -> RequestOutput:
        """Takes one token; raises whatever its request is to fail for. Runs for every token of every stream."""
        token_id, logprobs, error = token
        if error is not None:
            raise ValueError(error)
        token_ids, sampling, text = sequence.token_ids, sequence.sampling, sequence.text
        if sampling.follows_tokens:
            sampling.accept(token_id)
        token_ids.append(token_id)
        self._generated_tokens += 1
        added = text.append(token_id)
        output = RequestOutput(
            sequence.request_id, sequence.index, added, (token_id,), () if logprobs is None else (logprobs,)
        )
        length = len(token_ids)
        if length == sequence.prompt_length + 1:
            self._note_first(sequence, output, now)
        if text.has_ended or sampling.is_finished:
            output.finish_reason = FinishReason.STOP
        elif length >= sequence.longest:
            output.finish_reason = FinishReason.LENGTH
        else:
            return output
        output.text += text.finish()
        if text.stop_reason is not None:
            # The last characters, complete only now, may have completed a stop string.
            output.finish_reason, output.stop_reason = FinishReason.STOP, text.stop_reason
        self._finish(self.state_of(sequence), sequence, output, now)
        return output

    def _note_first(self, sequence: Sequence, output: RequestOutput, now: float) -> None:
        output.prompt_logprobs = tuple(sequence.prompt_logprobs)
        state = self.state_of(sequence)
        if state.first_token_at is None:
            state.first_token_at = now

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
        self._scheduler.remove(sequence)
        del state.unfinished[sequence.index]
        if state.unfinished:
            return
        request = state.request
        del self._states[request.request_id]
        if request.deadline is not None:
            deadline = (request.deadline, state.number, request.request_id)
            del self._deadlines[bisect_left(self._deadlines, deadline)]
        if state.started_at is None:
            self.line.leave()
        started_at = now if state.started_at is None else state.started_at
        first_token_at = request.arrived_at if state.first_token_at is None else state.first_token_at
        output.summary = RequestSummary(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=sum(sequence.num_generated for sequence in state.sequences),
            cached_tokens=state.cached_tokens,
            queued_seconds=started_at - request.arrived_at,
            first_token_seconds=first_token_at - request.arrived_at,
            total_seconds=now - request.arrived_at,
        )
