"""The engine's limits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """The engine's limits. `context_length` is prompt and answer together, in tokens.

    A step computes at most `max_batch_tokens` tokens of at most `max_sequences` sequences; `max_queue`
    requests may wait. A priority of p puts a request before those that arrived up to p * `priority_seconds`
    earlier: whatever keeps arriving with a higher priority, each request's turn comes. `weights_digest` keeps
    cached prefixes of other weights apart.
    """

    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    max_sequences: int = 64
    max_batch_tokens: int = 512
    max_queue: int = 512
    prefix_caching: bool = True
    weights_digest: str = ""
    priority_seconds: float = 30.0
