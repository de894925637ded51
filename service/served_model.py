"""What the servicers know about the model that is served and about the process that serves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.text.chat_template import ChatTemplate
    from service.text.tokenizer import Tokenizer

# A lower temperature overflows the logits, and picks the likeliest token anyway.
GREEDY_BELOW_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling values for fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, object]) -> SamplingDefaults:
        """Take what a checkpoint's generation_config.json gives; absent and null values keep our defaults.

        Raises ValueError naming the file and the field when a value is out of range.
        """
        values: dict[str, Any] = {}
        for name, (kind, allowed, wanted) in _RANGES.items():
            value = config.get(name)
            if value is None:
                continue
            if not isinstance(value, int | float) or not math.isfinite(value) or not allowed(value):
                raise ValueError(f"generation_config.json: {name} is {value!r}, must be {wanted}")
            values[name] = kind(value)
        return cls(**values)


_RANGES: dict[str, tuple[type[int] | type[float], Callable[..., bool], str]] = {
    "temperature": (float, lambda value: value >= 0, "0 or more"),
    "top_p": (float, lambda value: 0 < value <= 1, "in (0, 1]"),
    "top_k": (int, lambda value: value >= 0 and value == int(value), "a whole number, 0 or more"),
    "min_p": (float, lambda value: 0 <= value <= 1, "in [0, 1]"),
    "typical_p": (float, lambda value: 0 < value <= 1, "in (0, 1]"),
    "repetition_penalty": (float, lambda value: value > 0, "above 0"),
}


@dataclass(frozen=True)
class ServedModel:
    """One served model as one worker sees it.

    `vocab_size` counts the rows of the embedding, so that each id below it can be run.
    `max_context_length` is prompt and answer together, in tokens, and no more than the KV cache holds.
    `chat_template` is None for a model that has none. `weights_digest` is the SHA-256 over the contents of
    the checkpoint's tensors, `weights_bytes` the size of the shared segment, `placement` its verdict in
    words. `worker`, `pid`, `unit` and `nodes` tell which process this is and which NUMA nodes hold the
    weights it reads.
    """

    name: str
    model_type: str
    model_path: str
    dtype: str
    parameters: int
    vocab_size: int
    max_context_length: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    weights_digest: str
    weights_bytes: int
    placement: str
    worker: int
    pid: int
    unit: str
    nodes: tuple[int, ...]
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    server_version: str = field(default_factory=lambda: version("numaserve"))
