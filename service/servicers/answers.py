"""Turns the engine's outputs into answer messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numaserve.v1 import inference_pb2
from service.engine.request import FinishReason, PositionLogprobs, RequestOutput, RequestSummary, TokenLogprob
from service.served_model import ServedModel
from service.servicers.validation import CheckedRequest

FINISH_REASONS = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}


def usage_of(summary: RequestSummary) -> inference_pb2.Usage:
    """The token counts of a request that has ended."""
    return inference_pb2.Usage(
        prompt_tokens=summary.prompt_tokens,
        completion_tokens=summary.completion_tokens,
        cached_tokens=summary.cached_tokens,
    )


def timings_of(summary: RequestSummary) -> inference_pb2.Timings:
    """The times of a request that has ended, in milliseconds."""
    return inference_pb2.Timings(
        queued_ms=summary.queued_seconds * 1e3,
        first_token_ms=summary.first_token_seconds * 1e3,
        total_ms=summary.total_seconds * 1e3,
    )


@dataclass(frozen=True)
class AnswerWriter:
    """Makes the answer messages of one worker."""

    model: ServedModel
    served_by: inference_pb2.ServedBy

    @classmethod
    def of(cls, model: ServedModel) -> AnswerWriter:
        """A writer for the worker that `model` tells of."""
        served_by = inference_pb2.ServedBy(
            worker=model.worker, pid=model.pid, unit=model.unit, nodes=model.nodes
        )
        return cls(model, served_by)

    def whole(self, checked: CheckedRequest, outputs: Sequence[RequestOutput]) -> inference_pb2.InferResponse:
        """The unary answer from all outputs of a request, the last of which finished it."""
        completions = [
            inference_pb2.Completion(index=index, text=checked.echo_text)
            for index in range(checked.engine_request.params.n)
        ]
        texts: list[list[str]] = [[checked.echo_text] for _ in completions]
        prompt_logprobs: list[PositionLogprobs] = []
        for output in outputs:
            completion = completions[output.index]
            texts[output.index].append(output.text)
            completion.token_ids.extend(output.token_ids)
            completion.logprobs.extend(self._positions(output.logprobs))
            prompt_logprobs.extend(output.prompt_logprobs)
            if output.finish_reason is not None:
                completion.finish_reason = FINISH_REASONS[output.finish_reason]
                completion.stop_reason = output.stop_reason
        for completion, parts in zip(completions, texts, strict=True):
            completion.text = "".join(parts)
        first, others = completions[0], completions[1:]
        summary = outputs[-1].summary or RequestSummary()
        return inference_pb2.InferResponse(
            request_id=checked.engine_request.request_id,
            model=self.model.name,
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            stop_reason=first.stop_reason,
            logprobs=first.logprobs,
            prompt_logprobs=self._positions(prompt_logprobs),
            others=others,
            usage=usage_of(summary),
            timings=timings_of(summary),
            served_by=self._served_by(outputs[-1]),
        )

    def part(
        self, checked: CheckedRequest, output: RequestOutput, *, first: bool, echo: bool
    ) -> inference_pb2.InferStreamResponse:
        """One streamed part; `first` of the whole answer, `echo` puts the prompt in front of the text."""
        message = inference_pb2.InferStreamResponse(
            request_id=checked.engine_request.request_id,
            model=self.model.name,
            index=output.index,
            text=checked.echo_text + output.text if echo else output.text,
            token_ids=output.token_ids,
            finish_reason=FINISH_REASONS[output.finish_reason],
            stop_reason=output.stop_reason,
        )
        if output.logprobs:
            message.logprobs.extend(self._positions(output.logprobs))
        if output.prompt_logprobs:
            message.prompt_logprobs.extend(self._positions(output.prompt_logprobs))
        if first or output.request_finished:
            message.served_by.CopyFrom(self._served_by(output))
        if output.summary is not None:
            message.usage.CopyFrom(usage_of(output.summary))
            message.timings.CopyFrom(timings_of(output.summary))
        return message

    def _served_by(self, output: RequestOutput) -> inference_pb2.ServedBy:
        who = output.served_by
        if who is None:
            return self.served_by
        return inference_pb2.ServedBy(worker=who.worker, pid=who.pid, unit=who.unit, nodes=who.nodes)

    def _positions(self, positions: Sequence[PositionLogprobs]) -> list[inference_pb2.PositionLogprobs]:
        return [
            inference_pb2.PositionLogprobs(
                chosen=self._token(position.chosen) if position.chosen else None,
                top=[self._token(token) for token in position.top],
            )
            for position in positions
        ]

    def _token(self, token: TokenLogprob) -> inference_pb2.TokenLogprob:
        return inference_pb2.TokenLogprob(
            token_id=token.token_id,
            logprob=token.logprob,
            rank=token.rank,
            text=self.model.tokenizer.token_text(token.token_id),
        )
