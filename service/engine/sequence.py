"""What the engine keeps of a request while it lives, and of each of its completions."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from service.engine.block_pool import block_hash
from service.engine.request import EngineRequest, PositionLogprobs

if TYPE_CHECKING:
    from service.engine.embedding import EmbeddingPool
    from service.engine.sampling_state import SamplingState
    from service.engine.slots import Slot
    from service.text.output import TextOutput


class AbortCause(enum.StrEnum):
    """Why a completion ended with FinishReason.ABORT; `RequestOutput.stop_reason` holds the value."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    SHUTDOWN = "shutdown"


class Sequence:
    """One completion: its tokens, the blocks that hold their keys and values, and how far they are computed.

    `order` sorts sequences by who goes first. `slot` is a running sequence's row in the scheduler's table, None while
    it does not run. With `longest` tokens, the prompt's included, its answer has `max_tokens`.
    """

    __slots__ = (
        "block_hashes",
        "embedding",
        "first_hash",
        "index",
        "longest",
        "order",
        "prompt_length",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "slot",
        "text",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        order: tuple[float, int, int],
        prompt_token_ids: tuple[int, ...],
        first_hash: bytes,
        sampling: SamplingState,
        text: TextOutput,
        max_tokens: int = 0,
        wants_prompt_logprobs: bool = False,
        embedding: EmbeddingPool | None = None,
    ) -> None:
        self.request_id = request_id
        self.order = order
        self.index = order[2]
        self.token_ids = list(prompt_token_ids)
        self.prompt_length = len(prompt_token_ids)
        self.longest = self.prompt_length + max_tokens
        self.first_hash = first_hash
        self.sampling = sampling
        self.text = text
        self.embedding = embedding
        # Nothing stands before the first token, so nothing predicts it.
        self.prompt_logprobs = [PositionLogprobs(None, ())] if wants_prompt_logprobs else []
        self.block_hashes: list[bytes] = []
        self.slot: Slot | None = None

    @property
    def num_computed(self) -> int:
        """Tokens in the cache: none while it does not run."""
        return 0 if self.slot is None else self.slot.computed

    @property
    def block_table(self) -> list[int]:
        """The blocks that it holds, as a new list."""
        return [] if self.slot is None else self.slot.blocks

    @property
    def generates(self) -> bool:
        """Whether its prompt is in the cache and of the answer all but the last token, as in every step that adds one."""
        return self.prompt_length <= self.num_computed == len(self.token_ids) - 1

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log probabilities of prompt tokens are wanted and not all there."""
        return 0 < len(self.prompt_logprobs) < self.prompt_length

    @property
    def reusable_tokens(self) -> int:
        """How many leading tokens may come from the prefix cache: not those whose logits or hidden states
        are still wanted.
        """
        if self.lacks_prompt_logprobs:
            # The logits at position p describe token p + 1.
            return len(self.prompt_logprobs) - 1
        if self.embedding is not None and self.embedding.needs_all:
            return min(self.embedding.covered, len(self.token_ids) - 1)
        return len(self.token_ids) - 1

    def hash_blocks(self, count: int, block_size: int) -> list[bytes]:
        """The hashes of the first `count` full blocks."""
        for start in range(len(self.block_hashes) * block_size, count * block_size, block_size):
            previous = self.block_hashes[-1] if self.block_hashes else self.first_hash
            self.block_hashes.append(block_hash(previous, self.token_ids[start : start + block_size]))
        return self.block_hashes[:count]


class RequestState:
    """A request that the engine has taken: its completions, and its times in clock seconds.

    `number` counts the requests that the engine took. `siblings_held` says that the other completions still
    wait for the first one to compute the prompt that they share.
    """

    __slots__ = (
        "cached_tokens",
        "first_token_at",
        "number",
        "request",
        "sequences",
        "siblings_held",
        "started_at",
        "unfinished",
    )

    def __init__(self, request: EngineRequest, number: int, sequences: list[Sequence]) -> None:
        self.request = request
        self.number = number
        self.sequences = sequences
        self.unfinished = {sequence.index: sequence for sequence in sequences}
        self.siblings_held = len(sequences) > 1
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.cached_tokens = 0
