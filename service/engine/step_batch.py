"""Turns what was scheduled into the tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from service.engine.scheduler import Scheduled
from service.engine.sequence import Sequence
from service.models.batch import ForwardBatch, SequenceSlice

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepBatch:
    """A step's input and what its logits are for.

    First come the rows of `sampled`, one for each sequence that gets a token; then for each of `described` so
    many rows whose next tokens in the prompt are to be given log probabilities.
    """

    forward: ForwardBatch
    sampled: list[Sequence]
    described: list[tuple[Sequence, int]]


class StepBatcher:
    """Builds step batches over a block table that stays in place, so that a step costs few operations.

    `max_sequences` rows of `max_blocks` entries; tensors are made on the CPU and moved to `device`.
    """

    def __init__(self, max_sequences: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._table = np.zeros((max_sequences, max_blocks), dtype=np.int64)
        self._block_size = block_size
        self._device = device

    def build(self, scheduled: list[Scheduled]) -> StepBatch:
        """The batch of a step in which at least one token is computed."""
        tokens: list[int] = []
        starts: list[int] = []
        slots: list[int] = []
        slices: list[SequenceSlice] = []
        sampled: list[Sequence] = []
        logit_rows: list[int] = []
        described: list[tuple[Sequence, int]] = []
        described_rows: list[int] = []
        most_blocks = 0
        for piece in scheduled:
            sequence, count = piece.sequence, piece.count
            token_ids, start, first_row = sequence.token_ids, sequence.num_computed, len(tokens)
            end = start + count
            slices.append(SequenceSlice(first_row, count, end, sequence.prompt_length))
            starts.append(start)
            slots.append(sequence.slot)
            if count == 1:
                tokens.append(token_ids[start])
            else:
                tokens += token_ids[start:end]
            if end == len(token_ids) and sequence.embedding is None:
                sampled.append(sequence)
                logit_rows.append(first_row + count - 1)
            if sequence.prompt_logprobs and sequence.lacks_prompt_logprobs:
                # A recomputed prompt may begin before the first position that is still to be described.
                first = max(start, len(sequence.prompt_logprobs) - 1)
                last = min(end, sequence.prompt_length - 1)
                if last > first:
                    described.append((sequence, last - first))
                    described_rows += range(first_row + first - start, first_row + last - start)
            blocks = len(sequence.block_table)
            if blocks > most_blocks:
                most_blocks = blocks
            if sequence.blocks_in_table != blocks:
                self._write_table(sequence)

        positions = np.array(starts)
        owners = np.arange(len(scheduled))
        if len(tokens) > len(scheduled):
            counts = [piece.count for piece in scheduled]
            first_rows = [part.query_start for part in slices]
            owners = owners.repeat(counts)
            positions = np.arange(len(tokens)) + (positions - first_rows)[owners]
        tables = self._table[np.array(slots), :most_blocks]
        places, offsets = np.divmod(positions, self._block_size)
        forward = ForwardBatch(
            token_ids=self._tensor(np.array(tokens)),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(tables[owners, places] * self._block_size + offsets),
            block_tables=self._tensor(tables),
            logit_rows=self._tensor(np.array(logit_rows + described_rows, dtype=np.int64)),
            sequences=tuple(slices),
        )
        return StepBatch(forward, sampled, described)

    def _tensor(self, values: Integers) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _write_table(self, sequence: Sequence) -> None:
        done, blocks = sequence.blocks_in_table, sequence.block_table
        self._table[sequence.slot, done : len(blocks)] = blocks[done:]
        sequence.blocks_in_table = len(blocks)
