"""The tensors of one engine step, as the model takes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class SequenceSlice(NamedTuple):
    """The rows of one sequence in a batch: `query_length` rows from row `query_start`.

    Its first row has position `context_length - query_length`; after the step `context_length` tokens are in the cache.
    `prompt_length` matters to models whose rotations depend on the length of the prompt (dynamic and longrope) and must
    be given for them when a prompt comes in more than one piece; 0 takes this piece for the end of the prompt.
    """

    query_start: int
    query_length: int
    context_length: int
    prompt_length: int = 0


@dataclass(frozen=True)
class ForwardBatch:
    """One step's input. Rows of a sequence are contiguous and in order of position; sequences never share a row.

    token_ids [rows] int64; positions [rows] int64; slot_mapping [rows] int64: where each row's key and value go, as
    block * block_size + offset; block_tables [sequences, most_blocks] int64, of which what lies behind a sequence's last
    block means nothing, but is the number of a block; logit_rows [samples] int64: the rows whose logits are wanted;
    slices [sequences, 4] int64, in the CPU's memory: each sequence's `SequenceSlice`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
    slices: npt.NDArray[np.int64]

    @cached_property
    def sequences(self) -> tuple[SequenceSlice, ...]:
        """The rows of `slices`."""
        return tuple(map(SequenceSlice._make, self.slices.tolist()))


@dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of every layer: each [layers, blocks, block_size, kv_heads, head_dim], one contiguous tensor each.

    Within a block the native kernels have an order of their own, which service/kernels/cache.h describes.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.keys.shape[2]

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.keys.shape[1]


def nothing() -> None:
    """For callers of a model that have nothing to do before it computes."""


def rope_lengths(batch: ForwardBatch, whole_prompts: bool) -> torch.Tensor:
    """The length that each row's rotation is for, [rows] int64; see service.models.rope.

    `whole_prompts`: a prompt's rows are rotated for the length of all of it, which matters to some ropes alone.
    """
    lengths = batch.positions + 1
    if whole_prompts:
        for sequence in batch.sequences:
            rows = lengths[sequence.query_start : sequence.query_start + sequence.query_length]
            rows.clamp_(min=sequence.prompt_length or sequence.context_length)
    return lengths
