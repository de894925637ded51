"""Runs a decoder over a checkpoint as an engine would: paged cache, sequences in any order, prompts in any chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from service.kernels.library import KernelPool, load
from service.loader.checkpoint import open_checkpoint
from service.loader.fill import fill
from service.models.batch import ForwardBatch, PagedKVCache, SequenceSlice
from service.models.config import parse_config
from service.models.decoder import Decoder
from service.models.native_decoder import NativeDecoder
from service.models.native_weights import native_weights
from service.models.packing import Quantization, pack_plan
from service.models.weights import WeightPlan, plan_weights
from service.ops.torch_ops import TorchOps

# What computes where a test does not say; the fixture `each_backend` runs a test with each.
BACKEND = "torch"


def fill_memory(plan: WeightPlan, threads: int = 1) -> tuple[dict[str, memoryview], str]:
    """Memory for each tensor of the plan, filled by the loader, and the digest of the checkpoint's contents."""
    views = {tensor.name: memoryview(bytearray(tensor.nbytes)) for tensor in plan.tensors}
    return views, fill(plan, views, threads, lambda _: None)


def load_weights(
    model_dir: Path, dtype: str = "auto", threads: int = 1
) -> tuple[dict[str, torch.Tensor], str]:
    """The reference decoder's tensors by name, as the loader makes them, and the digest of the checkpoint's contents."""
    checkpoint = open_checkpoint(model_dir)
    plan = plan_weights(parse_config(checkpoint.config, checkpoint.generation_config), checkpoint, dtype)
    memory, digest = fill_memory(plan, threads)
    tensors = {
        tensor.name: torch.frombuffer(memory[tensor.name], dtype=getattr(torch, tensor.dtype)).view(
            tensor.shape
        )
        for tensor in plan.tensors
    }
    return tensors, digest


def load_decoder(
    model_dir: Path, dtype: str = "auto", quantization: Quantization | None = None
) -> Decoder | NativeDecoder:
    """A decoder of BACKEND over a copy of the checkpoint in `dtype`, rounded as `quantization` says."""
    checkpoint = open_checkpoint(model_dir)
    config = parse_config(checkpoint.config, checkpoint.generation_config)
    if BACKEND == "torch":
        return Decoder(config, load_weights(model_dir, dtype)[0], TorchOps())
    plan = pack_plan(plan_weights(config, checkpoint, dtype), quantization)
    library = load()
    assert library is not None, "the native kernels are not built: python -m service.kernels.build"
    pool = KernelPool(library, threads=torch.get_num_threads())
    return NativeDecoder(config, native_weights(plan.tensors, fill_memory(plan)[0]), pool)


@dataclass
class Stream:
    """One sequence: its tokens, how many of them are computed, and its blocks of the cache."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)


class Harness:
    """A cache of its own and the streams in it. Blocks are handed out in a scrambled order; the cache starts as garbage."""

    def __init__(
        self,
        decoder: Decoder | NativeDecoder,
        num_blocks: int = 256,
        block_size: int = 16,
        kv_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        config = decoder.config
        self.decoder = decoder
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.cache = PagedKVCache(
            torch.full(shape, torch.nan, dtype=kv_dtype), torch.full(shape, torch.nan, dtype=kv_dtype)
        )
        generator = torch.Generator().manual_seed(seed)
        self._free = torch.randperm(num_blocks, generator=generator).tolist()

    def start(self, prompt: Sequence[int]) -> Stream:
        """A stream of which nothing is computed yet."""
        return Stream(list(prompt), [])

    def batch(self, pieces: Sequence[tuple[Stream, int]], all_rows: bool = False) -> ForwardBatch:
        """The next `count` tokens of each stream; logits of its last row, or of all rows."""
        size = self.cache.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        slices = []
        for stream, count in pieces:
            end = stream.computed + count
            while len(stream.blocks) * size < end:
                stream.blocks.append(self._free.pop())
            slices.append(SequenceSlice(len(tokens), count, end, stream.prompt_length))
            for position in range(stream.computed, end):
                tokens.append(stream.tokens[position])
                positions.append(position)
                slots.append(stream.blocks[position // size] * size + position % size)
            logit_rows += range(len(tokens) - (count if all_rows else 1), len(tokens))
            stream.computed = end
        most = max(len(stream.blocks) for stream, _ in pieces)
        return ForwardBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor(
                [stream.blocks + [0] * (most - len(stream.blocks)) for stream, _ in pieces]
            ),
            logit_rows=torch.tensor(logit_rows),
            slices=np.array(slices),
        )

    def step(self, pieces: Sequence[tuple[Stream, int]], all_rows: bool = False) -> torch.Tensor:
        """Runs one step; a copy of the logits, which a decoder may overwrite in the next."""
        return self.decoder.forward(self.batch(pieces, all_rows), self.cache).clone()

    def prefill(self, stream: Stream, chunk: int | None = None) -> torch.Tensor:
        """Computes all tokens of a stream that are not computed yet, in chunks; the logits of all those rows."""
        parts = []
        while stream.computed < len(stream.tokens):
            left = len(stream.tokens) - stream.computed
            parts.append(self.step([(stream, min(chunk or left, left))], all_rows=True))
        return torch.cat(parts)

    def decode(self, stream: Stream, tokens: Sequence[int]) -> torch.Tensor:
        """Appends the tokens one step at a time; the logits after each."""
        parts = []
        for token in tokens:
            stream.tokens.append(token)
            parts.append(self.step([(stream, 1)]))
        return torch.cat(parts)
