"""Turns what was scheduled into the tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from service.engine.scheduler import Scheduled
from service.engine.sequence import Sequence
from service.models.batch import ForwardBatch, SequenceSlice


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
        self._table = torch.zeros(max_sequences, max_blocks, dtype=torch.int64)
        self._block_size = block_size
        self._device = device

    def build(self, scheduled: list[Scheduled]) -> StepBatch:
        """The batch of a step in which at least one token is computed."""
        tokens: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        slices: list[SequenceSlice] = []
        sampled: list[Sequence] = []
        logit_rows: list[int] = []
        described: list[tuple[Sequence, int]] = []
        described_rows: list[int] = []
        most_blocks = 0
        for number, piece in enumerate(scheduled):
            sequence, count = piece.sequence, piece.count
            start = sequence.num_computed
            end = start + count
            first_row = len(tokens)
            slices.append(SequenceSlice(first_row, count, end, sequence.prompt_length))
            if count == 1:
                tokens.append(sequence.token_ids[start])
                positions.append(start)
                owners.append(number)
            else:
                tokens += sequence.token_ids[start:end]
                positions += range(start, end)
                owners += [number] * count
            if end == len(sequence.token_ids) and sequence.embedding is None:
                sampled.append(sequence)
                logit_rows.append(first_row + count - 1)
            if sequence.lacks_prompt_logprobs:
                # A recomputed prompt may begin before the first position that is still to be described.
                first = max(start, len(sequence.prompt_logprobs) - 1)
                last = min(end, sequence.prompt_length - 1)
                if last > first:
                    described.append((sequence, last - first))
                    described_rows += range(first_row + first - start, first_row + last - start)
            blocks = len(sequence.block_table)
            most_blocks = max(most_blocks, blocks)
            if sequence.blocks_in_table != blocks:
                self._write_table(sequence)

        slots = torch.tensor([piece.sequence.slot for piece in scheduled])
        tables = self._table[:, :most_blocks].index_select(0, slots)
        places = torch.tensor(positions)
        own_blocks = tables[torch.tensor(owners), places // self._block_size]
        forward = ForwardBatch(
            token_ids=torch.tensor(tokens).to(self._device),
            positions=places.to(self._device),
            slot_mapping=(own_blocks * self._block_size + places % self._block_size).to(self._device),
            block_tables=tables.to(self._device),
            logit_rows=torch.tensor(logit_rows + described_rows, dtype=torch.int64).to(self._device),
            sequences=tuple(slices),
        )
        return StepBatch(forward, sampled, described)

    def _write_table(self, sequence: Sequence) -> None:
        done, blocks = sequence.blocks_in_table, sequence.block_table
        self._table[sequence.slot, done : len(blocks)] = torch.tensor(blocks[done:])
        sequence.blocks_in_table = len(blocks)
