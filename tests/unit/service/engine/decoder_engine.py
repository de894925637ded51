"""The real engine over the real decoder of a tiny model, for tests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import torch
from decoder_harness import load_decoder
from engine_fakes import Collector

from service.engine.engine import Engine, EngineConfig
from service.engine.request import EngineRequest, SamplingParams
from service.models.batch import ForwardBatch, PagedKVCache
from service.models.decoder import Decoder
from service.text.tokenizer import Tokenizer

BLOCK_SIZE = 16


class RecordingDecoder:
    """A decoder that keeps the shape of each step it ran."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.batches: list[ForwardBatch] = []

    def forward(
        self, batch: ForwardBatch, cache: PagedKVCache, before_computing: Callable[[], None]
    ) -> torch.Tensor:
        self.batches.append(batch)
        return self.decoder.forward(batch, cache, before_computing)

    def hidden_states(
        self, batch: ForwardBatch, cache: PagedKVCache, before_computing: Callable[[], None]
    ) -> torch.Tensor:
        self.batches.append(batch)
        return self.decoder.hidden_states(batch, cache, before_computing)


@dataclasses.dataclass(frozen=True)
class Served:
    """A model on disk, its decoder and its tokenizer."""

    directory: Path
    decoder: Decoder
    tokenizer: Tokenizer

    @classmethod
    def load(cls, directory: Path) -> Served:
        return cls(directory, load_decoder(directory), Tokenizer.from_dir(directory))

    def engine(self, blocks: int = 256, **options: object) -> Engine:
        """An engine with a cache full of NaN, so that reading what nobody wrote shows."""
        config = self.decoder.config
        shape = (config.num_layers, blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        cache = PagedKVCache(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        settings = {
            "context_length": 4096,
            "vocab_size": config.vocab_size,
            "prefix_caching": config.length_dependent_from is None,
            "max_sequences": 32,
            "max_batch_tokens": 96,
        }
        return Engine(
            RecordingDecoder(self.decoder), cache, self.tokenizer, EngineConfig(**{**settings, **options})
        )

    def alone(self, request: EngineRequest, **options: object) -> list[list[int]]:
        """The tokens of each completion when nothing else runs, in one piece and with room to spare."""
        engine = self.engine(max_batch_tokens=2048, **options)
        engine.add(request)
        collector = Collector(engine).run()
        return [collector.answers[request.request_id, index].token_ids for index in range(request.params.n)]


def generate(name: str, prompt: list[int], count: int, **params: object) -> EngineRequest:
    settings = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
    return EngineRequest(name, tuple(prompt), SamplingParams(**{**settings, **params}), time.monotonic())
