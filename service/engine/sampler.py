"""Picks the next token of each sequence of a batch.

A row's outcome depends on its logits and its own state alone, never on the rows beside it: rows are only
compared, gathered and summed as integers, and random numbers come from (seed, completion, position). Order of
the steps, as in transformers' `generate`: bias, penalties, minimum length, grammar; then temperature and
filters, then the draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from service.engine.distribution import RowSoftmax, draw
from service.engine.logit_edits import edited_logits
from service.engine.logprobs import position_logprobs, prompt_logprobs
from service.engine.narrowed import draw_narrowed
from service.engine.request import PositionLogprobs
from service.engine.sampling_state import SamplingState

__all__ = ["SampledToken", "SamplingState", "edited_logits", "prompt_logprobs", "sample"]


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
    highest, tokens = _pick(
        logits,
        [
            None if changed or state.is_greedy else state
            for state, changed in zip(states, changes, strict=True)
        ],
    )
    errors = {
        row: "the model's logits hold NaN or infinity"
        for row, value in enumerate(highest)
        if not math.isfinite(value)
    }
    changed = [row for row in range(len(states)) if changes[row] and row not in errors]
    if changed:
        edited = edited_logits(logits, states, changed, errors)
        drawn = [None if states[row].is_greedy else states[row] for row in changed]
        for row, value, token_id in zip(changed, *_pick(edited, drawn), strict=True):
            tokens[row] = token_id
            if not math.isfinite(value):
                errors.setdefault(row, "no token may be picked here")
    return _with_logprobs(logits, states, tokens, errors)


def _pick(logits: torch.Tensor, drawn: Sequence[SamplingState | None]) -> tuple[list[float], list[int]]:
    """The largest value of each row, NaN where the row holds one, and its token: drawn, or the first of the
    likeliest where `drawn` is None. Where the largest value is not finite the token means nothing.
    """
    states = {row: state for row, state in enumerate(drawn) if state is not None}
    narrowed = [row for row, state in states.items() if state.narrows]
    others = range(len(drawn)) if not narrowed else [row for row in range(len(drawn)) if row not in narrowed]
    highest, tokens = [0.0] * len(drawn), [-1] * len(drawn)
    for row, value, token_id in zip(others, *_peaks(logits, others), strict=True):
        highest[row], tokens[row] = value, token_id
    if not states:
        return highest, tokens
    # Draws are made on the CPU.
    logits = logits.cpu()
    softmax = RowSoftmax(logits.shape[1])
    if narrowed:
        part = logits if len(narrowed) == len(drawn) else logits[torch.tensor(narrowed)]
        found = draw_narrowed(part, [states[row] for row in narrowed], softmax)
        for row, value, drawn_id in zip(narrowed, *found, strict=True):
            highest[row], tokens[row] = value, drawn_id
    scores = logits.numpy()
    for row, state in states.items():
        if math.isfinite(highest[row]) and (not state.narrows or tokens[row] < 0):
            candidates = softmax.filtered(scores[row], highest[row], state.filters)
            tokens[row] = candidates.token_id(draw(candidates.weights, state.uniform()))
    return highest, tokens


def _peaks(logits: torch.Tensor, rows: Sequence[int]) -> tuple[list[float], list[int]]:
    """The largest value of some rows and its first column; a NaN counts as the largest."""
    if logits.device.type == "cpu":
        # Row by row nothing is copied; numpy's argmax is many times as fast as torch's here.
        scores = logits.numpy()
        columns = [int(scores[row].argmax()) for row in rows]
        return scores[list(rows), columns].tolist(), columns
    best = logits.argmax(dim=1)
    values, columns = logits.gather(1, best[:, None])[:, 0].tolist(), best.tolist()
    return [values[row] for row in rows], [columns[row] for row in rows]


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
