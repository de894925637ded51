"""Picks the next token of each sequence of a batch.

A row's outcome depends on its logits and its own state alone, never on the rows beside it: rows are only
compared, gathered and summed as integers, and random numbers come from (seed, completion, position). Order of
the steps, as in transformers' `generate`: bias, penalties, minimum length, grammar; then temperature and
filters, then the draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from service.engine.distribution import RowSoftmax, draw
from service.engine.likeliest import Floats, Likeliest, likeliest
from service.engine.logit_edits import edited_logits
from service.engine.logprobs import position_logprobs, prompt_logprobs
from service.engine.request import PositionLogprobs
from service.engine.sampling_state import SamplingState

__all__ = ["SampledToken", "SamplingState", "edited_logits", "prompt_logprobs", "sample"]

_NOT_FINITE = "the model's logits hold NaN or infinity"


class SampledToken(NamedTuple):
    """The token picked for one row. Where `error` is set no token could be picked, and `token_id` is -1."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    error: str | None = None


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """The next token of each row of logits [rows, vocab] fp32, which stay as they are.

    A row with NaN or infinity, or one in which nothing may be picked, gets a `SampledToken` with `error` set;
    the other rows are not touched by it.
    """
    if logits.dim() != 2 or logits.shape[0] != len(states) or logits.dtype != torch.float32:
        raise ValueError(
            f"logits must be fp32 [{len(states)}, vocab], not {logits.dtype} {list(logits.shape)}"
        )
    if not states:
        return []
    changes = [state.changes_logits for state in states]
    narrows = [state.narrows and not changed for state, changed in zip(states, changes, strict=True)]
    survey = _survey(logits, narrows)
    errors = {row: _NOT_FINITE for row, value in enumerate(survey.highest) if not math.isfinite(value)}
    changed = [row for row in range(len(states)) if changes[row] and row not in errors]
    scores_of: dict[int, Floats] = {}
    if changed:
        edited = edited_logits(logits, states, changed, errors)
        scores_of = dict(zip(changed, edited.cpu().numpy(), strict=True))
        survey.replace(changed, _survey(edited, [states[row].narrows for row in changed]))
        for row in changed:
            if not math.isfinite(survey.highest[row]):
                errors.setdefault(row, "no token may be picked here")
    tokens = survey.tokens
    drawn = [row for row, state in enumerate(states) if not state.is_greedy and row not in errors]
    if drawn:
        softmax, all_scores = RowSoftmax(logits.shape[1]), logits.cpu().numpy()
        for row in drawn:
            scores, highest = scores_of.get(row, all_scores[row]), survey.highest[row]
            candidates = softmax.filtered(scores, highest, states[row].filters, survey.known.get(row))
            tokens[row] = candidates.token_id(draw(candidates.weights, states[row].uniform()))
    return _with_logprobs(logits, states, tokens, errors)


@dataclass
class _Survey:
    """What one pass over some rows found: the largest value of each, its first column (-1 where not asked for),
    and the likeliest tokens of the rows that were to be narrowed. A NaN counts as the largest value.
    """

    highest: list[float]
    tokens: list[int]
    known: dict[int, Likeliest]

    def replace(self, rows: Sequence[int], other: _Survey) -> None:
        """Puts the rows of another survey in place of `rows`."""
        for place, row in enumerate(rows):
            self.highest[row], self.tokens[row] = other.highest[place], other.tokens[place]
            if place in other.known:
                self.known[row] = other.known[place]


def _survey(logits: torch.Tensor, narrows: Sequence[bool]) -> _Survey:
    count = len(narrows)
    found = _Survey([0.0] * count, [-1] * count, {})
    narrowed = [row for row in range(count) if narrows[row]]
    if narrowed:
        part = logits if len(narrowed) == count else logits[torch.tensor(narrowed, device=logits.device)]
        found.known = dict(zip(narrowed, likeliest(part.cpu()), strict=True))
        for row, known in found.known.items():
            found.highest[row] = known.highest
    others = [row for row in range(count) if not narrows[row]]
    if others and logits.device.type == "cpu":
        # Row by row nothing is copied; numpy's argmax is many times as fast as torch's here.
        scores = logits.numpy()
        for row in others:
            token_id = int(scores[row].argmax())
            found.tokens[row], found.highest[row] = token_id, float(scores[row, token_id])
    elif others:
        columns = logits.argmax(dim=1)
        values = logits.gather(1, columns[:, None])[:, 0].tolist()
        for row, token_id in enumerate(columns.tolist()):
            if not narrows[row]:
                found.tokens[row], found.highest[row] = token_id, values[row]
    return found


def _with_logprobs(
    logits: torch.Tensor, states: Sequence[SamplingState], tokens: Sequence[int], errors: dict[int, str]
) -> list[SampledToken]:
    wanted = {
        row: state.params.logprobs
        for row, state in enumerate(states)
        if state.params.logprobs is not None and row not in errors
    }
    logprobs: dict[int, PositionLogprobs] = {}
    if wanted:
        found = position_logprobs(
            logits[torch.tensor(list(wanted), device=logits.device)],
            [tokens[row] for row in wanted],
            list(wanted.values()),
        )
        logprobs = dict(zip(wanted, found, strict=True))
    if not logprobs and not errors:
        return [SampledToken(token_id) for token_id in tokens]
    return [
        SampledToken(-1, error=errors[row]) if row in errors else SampledToken(token_id, logprobs.get(row))
        for row, token_id in enumerate(tokens)
    ]
