"""Picks the next token of each sequence of a batch.

A row's outcome depends on its logits and its own state alone, never on the rows beside it: weights are summed as
integers, and random numbers come from (seed, completion, position). Order of the steps, as in transformers'
`generate`: bias, penalties, minimum length, grammar; then temperature and filters, then the draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from service.engine.logit_edits import edited_logits
from service.engine.picker import Picker
from service.engine.request import PositionLogprobs
from service.engine.sampling_state import SamplingState

__all__ = ["SampledToken", "SamplingState", "edited_logits", "prompt_logprobs", "sample"]


class SampledToken(NamedTuple):
    """The token picked for one row. Where `error` is set no token could be picked, and `token_id` is -1."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    error: str | None = None


def sample(logits: torch.Tensor, states: Sequence[SamplingState], picker: Picker) -> list[SampledToken]:
    """The next token of each row of logits [rows, vocab] fp32, which stay as they are, by `picker`.

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
    highest, tokens = picker.pick(
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
        for row, value, token_id in zip(changed, *picker.pick(edited, drawn), strict=True):
            tokens[row] = token_id
            if not math.isfinite(value):
                errors.setdefault(row, "no token may be picked here")
    return _with_logprobs(logits, states, tokens, errors, picker)


def prompt_logprobs(
    logits: torch.Tensor, next_ids: Sequence[int], top: int, picker: Picker
) -> list[PositionLogprobs]:
    """Log probabilities of a prompt's tokens: row i of logits [rows, vocab] fp32 predicts `next_ids[i]`.

    The first token of a prompt is predicted by no row; the caller reports it without `chosen`. Raises
    ValueError for a row without finite maximum.
    """
    return picker.logprobs(logits, next_ids, [top] * len(next_ids))


def _with_logprobs(
    logits: torch.Tensor,
    states: Sequence[SamplingState],
    tokens: Sequence[int],
    errors: dict[int, str],
    picker: Picker,
) -> list[SampledToken]:
    wanted = {
        row: state.params.logprobs
        for row, state in enumerate(states)
        if state.params.logprobs is not None and row not in errors
    }
    logprobs: dict[int, PositionLogprobs] = {}
    if wanted:
        whole = len(wanted) == len(states)
        found = picker.logprobs(
            logits if whole else logits[torch.tensor(list(wanted), device=logits.device)],
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
