"""Picks the next token of each sequence of a batch.

A row's outcome depends on its logits and its own state alone, never on the rows beside it: rows are only
compared, gathered and summed as integers, and random numbers come from (seed, completion, position). Order of
the steps, as in transformers' `generate`: bias, penalties, minimum length, grammar; then temperature and
filters, then the draw.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from service.engine.distribution import Filters, RowSoftmax, draw
from service.engine.logprobs import position_logprobs, prompt_logprobs
from service.engine.request import PositionLogprobs, RequestRejected, SamplingParams

if TYPE_CHECKING:
    from service.text.structured import Grammar

__all__ = ["SampledToken", "SamplingState", "prompt_logprobs", "sample"]

# Below this a temperature is greedy: dividing by it would overflow.
_LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SampledToken:
    """The token picked for one row. Where `error` is set no token could be picked, and `token_id` is -1."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    error: str | None = None


class TokenCounts:
    """How often each of some tokens occurred, as tensors that grow: `ids` int64 and `counts` fp32."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        occurrences: dict[int, int] = {}
        for token_id in token_ids:
            occurrences[token_id] = occurrences.get(token_id, 0) + 1
        self._slots = {token_id: slot for slot, token_id in enumerate(occurrences)}
        room = 2 * len(occurrences) + 16
        self._ids = torch.zeros(room, dtype=torch.int64)
        self._counts = torch.zeros(room)
        self._ids[: len(occurrences)] = torch.tensor(list(occurrences), dtype=torch.int64)
        self._counts[: len(occurrences)] = torch.tensor(list(occurrences.values()), dtype=torch.float32)

    def add(self, token_id: int) -> None:
        """Counts one more occurrence."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
            self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids(self) -> torch.Tensor:
        """The tokens that occurred, each once."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> torch.Tensor:
        """How often each of `ids` occurred."""
        return self._counts[: len(self._slots)]


class SamplingState:
    """What the next token of one completion depends on beside its logits."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        completion_index: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        grammar: Grammar | None = None,
    ) -> None:
        """`vocab_size` is the number of logits. Raises `RequestRejected` for a token id outside it in
        `logit_bias`.
        """
        outside = [token_id for token_id in params.logit_bias if not 0 <= token_id < vocab_size]
        if outside:
            raise RequestRejected("logit_bias", f"token id {outside[0]} is not in [0, {vocab_size})")
        self.params = params
        self.grammar = grammar
        self._completion_index = completion_index
        self._position = 0
        end_ids = params.stop_token_ids | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
        self._end_ids = torch.tensor(sorted(i for i in end_ids if 0 <= i < vocab_size), dtype=torch.int64)
        self.bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self.bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self.seen: TokenCounts | None = None
        self.generated: TokenCounts | None = None
        if params.repetition_penalty != 1.0:
            self.seen = TokenCounts(token_id for token_id in prompt_token_ids if 0 <= token_id < vocab_size)
        if params.presence_penalty or params.frequency_penalty:
            self.generated = TokenCounts()
        self._always_changes_logits = (
            bool(params.logit_bias)
            or self.seen is not None
            or self.generated is not None
            or grammar is not None
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.params.temperature < _LOWEST_TEMPERATURE

    @property
    def is_finished(self) -> bool:
        """Whether the grammar is complete and allows nothing more, so that the completion must end here."""
        return self.grammar is not None and self.grammar.is_finished

    @property
    def held_off_ids(self) -> torch.Tensor | None:
        """Ids that would end the completion before its minimum length, or None once that is reached."""
        return self._end_ids if self._position < self.params.min_tokens else None

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters bears on the next token."""
        return self._always_changes_logits or self.held_off_ids is not None

    @property
    def filters(self) -> Filters:
        """Temperature and filters."""
        params = self.params
        return Filters(params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p)

    def uniform(self) -> int:
        """The random number of the next token: an integer in [0, 2**64) made of seed, completion and
        position.
        """
        seed = self.params.seed & 0xFFFF_FFFF_FFFF_FFFF
        counter = struct.pack("<QQQ", seed, self._completion_index, self._position)
        return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little")

    def accept(self, token_id: int) -> None:
        """Takes the token at the next position. Raises ValueError where the grammar forbids it."""
        self._position += 1
        if self.seen is not None:
            self.seen.add(token_id)
        if self.generated is not None:
            self.generated.add(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)


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
    highest, tokens = _likeliest(logits)
    errors = {
        row: "the model's logits hold NaN or infinity"
        for row, value in enumerate(highest)
        if not math.isfinite(value)
    }
    changed = [row for row, state in enumerate(states) if state.changes_logits and row not in errors]
    logits_of: dict[int, torch.Tensor] = {}
    if changed:
        edited = edited_logits(logits, states, changed, errors)
        logits_of = dict(zip(changed, edited, strict=True))
        for row, value, token_id in zip(changed, *_likeliest(edited), strict=True):
            highest[row], tokens[row] = value, token_id
            if not math.isfinite(value):
                errors.setdefault(row, "no token may be picked here")
    softmax = RowSoftmax(logits.shape[1])
    for row, state in enumerate(states):
        if not state.is_greedy and row not in errors:
            scores = logits_of.get(row, logits[row]).cpu().numpy()
            candidates = softmax.filtered(scores, highest[row], state.filters)
            tokens[row] = candidates.token_id(draw(candidates.weights, state.uniform()))
    return _with_logprobs(logits, states, tokens, errors)


def _likeliest(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """The largest value of each row and its first column; a NaN counts as the largest."""
    if logits.device.type == "cpu":
        # numpy's argmax is many times as fast as torch's here.
        columns = torch.from_numpy(logits.numpy().argmax(axis=1))
    else:
        columns = logits.argmax(dim=1)
    return logits.gather(1, columns[:, None])[:, 0].tolist(), columns.tolist()


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
    return [
        SampledToken(-1, error=errors[row]) if row in errors else SampledToken(token_id, logprobs.get(row))
        for row, token_id in enumerate(tokens)
    ]


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
