"""Changes the logits of rows as their requests ask: bias, penalties, minimum length, grammar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from service.engine.sampling_state import SamplingState, TokenCounts

if TYPE_CHECKING:
    from service.text.structured import Grammar


def edited_logits(
    logits: torch.Tensor, states: Sequence[SamplingState], rows: Sequence[int], errors: dict[int, str]
) -> torch.Tensor:
    """A copy of some rows with bias, penalties, minimum length and grammar applied; -inf is what may not be
    picked.
    """
    edited = logits[torch.tensor(rows, device=logits.device)]
    row_states = [states[row] for row in rows]
    _add_bias(edited, row_states)
    _apply_penalties(edited, row_states)
    for row, values, state in zip(rows, edited, row_states, strict=True):
        held_off = state.held_off_ids
        if state.grammar is not None:
            try:
                _apply_grammar(values, state.grammar, held_off)
            except ValueError as error:
                errors[row] = f"structured_output: {error}"
        elif held_off is not None:
            values[held_off.to(values.device)] = -math.inf
    return edited


def _flat_index(
    states: Sequence[SamplingState], ids: Sequence[torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of every id, `ids[i]` being columns of row i."""
    lengths = torch.tensor([len(row_ids) for row_ids in ids])
    rows = torch.arange(len(states)).repeat_interleave(lengths)
    return rows.to(device), torch.cat(list(ids)).to(device)


def _add_bias(edited: torch.Tensor, states: Sequence[SamplingState]) -> None:
    if not any(len(state.bias_ids) for state in states):
        return
    index = _flat_index(states, [state.bias_ids for state in states], edited.device)
    edited[index] += torch.cat([state.bias for state in states]).to(edited.device)


def _apply_penalties(edited: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Repetition penalty over prompt and output, then frequency and presence penalty over the output."""
    none = TokenCounts()
    if any(state.seen is not None for state in states):
        seen = [(state.seen or none).ids for state in states]
        rows, columns = _flat_index(states, seen, edited.device)
        penalties = torch.tensor([state.params.repetition_penalty for state in states], device=edited.device)
        scores, penalty = edited[rows, columns], penalties[rows]
        edited[rows, columns] = torch.where(scores < 0, scores * penalty, scores / penalty)
    if any(state.generated is not None for state in states):
        generated = [state.generated or none for state in states]
        rows, columns = _flat_index(states, [tokens.ids for tokens in generated], edited.device)
        counts = torch.cat([tokens.counts for tokens in generated]).to(edited.device)
        frequency = torch.tensor([state.params.frequency_penalty for state in states], device=edited.device)
        presence = torch.tensor([state.params.presence_penalty for state in states], device=edited.device)
        edited[rows, columns] -= frequency[rows] * counts + presence[rows]


def _apply_grammar(values: torch.Tensor, grammar: Grammar, held_off: torch.Tensor | None) -> None:
    """Drops what the grammar forbids; the end is held off only while the grammar allows anything else."""
    mask = np.zeros(grammar.mask_words, dtype=np.int32)
    grammar.fill_mask(mask)
    allowed = np.zeros(len(values), dtype=np.bool_)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(values)]
    allowed[: len(bits)] = bits
    if held_off is not None:
        without_end = allowed.copy()
        without_end[held_off.numpy()] = False
        allowed = without_end if without_end.any() else allowed
    values.masked_fill_(torch.from_numpy(~allowed).to(values.device), -math.inf)
