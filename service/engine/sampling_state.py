"""What the next token of one completion depends on beside its logits."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from service.engine.distribution import Filters
from service.engine.request import RequestRejected, SamplingParams

if TYPE_CHECKING:
    from service.text.structured import Grammar

# Below this a temperature is greedy: dividing by it would overflow.
_LOWEST_TEMPERATURE = 1e-5


class TokenCounts:
    """How often each of some tokens occurred, in memory that grows: `ids` int64 and `counts` fp32."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        occurrences: dict[int, int] = {}
        for token_id in token_ids:
            occurrences[token_id] = occurrences.get(token_id, 0) + 1
        self._slots = {token_id: slot for slot, token_id in enumerate(occurrences)}
        room = 2 * len(occurrences) + 16
        # Setting one element of a tensor takes many times as long as one of an array.
        self._ids = np.zeros(room, dtype=np.int64)
        self._counts = np.zeros(room, dtype=np.float32)
        self._ids[: len(occurrences)] = list(occurrences)
        self._counts[: len(occurrences)] = list(occurrences.values())

    def add(self, token_id: int) -> None:
        """Counts one more occurrence."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids(self) -> torch.Tensor:
        """The tokens that occurred, each once."""
        return torch.from_numpy(self._ids[: len(self._slots)])

    @property
    def counts(self) -> torch.Tensor:
        """How often each of `ids` occurred."""
        return torch.from_numpy(self._counts[: len(self._slots)])


class SamplingState:
    """What the next token of one completion depends on beside its logits.

    `is_greedy` says whether the likeliest token is always taken, `narrows` whether the filters keep few tokens as
    a rule, `is_finished` whether the grammar is complete and allows nothing more, so that the completion must end.
    Unless it `follows_tokens`, no token bears on those after it, and none need be accepted.
    """

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
        self.filters = Filters(params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p)
        self.is_greedy = params.temperature < _LOWEST_TEMPERATURE
        self.narrows = params.typical_p >= 1.0 and bool(params.top_k or params.top_p < 1.0 or params.min_p)
        self.grammar = grammar
        self._completion_index = completion_index
        self._position = 0
        self._min_tokens = params.min_tokens
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
        self.follows_tokens = not self.is_greedy or self._always_changes_logits or params.min_tokens > 0
        self.is_finished = False

    @property
    def held_off_ids(self) -> torch.Tensor | None:
        """Ids that would end the completion before its minimum length, or None once that is reached."""
        return self._end_ids if self._position < self._min_tokens else None

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters bears on the next token."""
        return self._always_changes_logits or self._position < self._min_tokens

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
            self.is_finished = self.grammar.is_finished
