"""Turns what was scheduled into the tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from service.engine.scheduler import Generating, Piece
from service.engine.sequence import Sequence
from service.engine.slots import Integers, SlotTable
from service.models.batch import ForwardBatch


@dataclass(frozen=True)
class StepBatch:
    """A step's input and what its logits are for.

    First come the rows of `sampled`, one for each sequence that gets a token; then for each of `described` so
    many rows whose next tokens in the prompt are to be given log probabilities.
    """

    forward: ForwardBatch
    sampled: list[Sequence]
    described: list[tuple[Sequence, int]]


@dataclass
class _Pieces:
    """What pieces add to a batch; rows are counted from the batch's first one."""

    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    described: list[tuple[Sequence, int]] = field(default_factory=list)
    described_rows: list[int] = field(default_factory=list)


class StepBatcher:
    """Builds step batches over the scheduler's slots; tensors are made on the CPU and moved to `device`."""

    def __init__(self, table: SlotTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._numbers: Integers = np.arange(len(table.computed))
        self._ones: Integers = np.ones_like(self._numbers)

    def build(self, generating: Generating, pieces: list[Piece]) -> StepBatch:
        """The batch of a step in which at least one token is computed: of `generating` each the last one, then `pieces`."""
        table, count = self._table, len(generating.sequences)
        sampled, slots, prompt_lengths = generating.sequences, generating.slots, generating.prompt_lengths
        tokens = [sequence.token_ids[-1] for sequence in sampled]
        counts, logit_rows = self._ones[:count], self._numbers[:count]
        added = _Pieces()
        if pieces:
            added = _added(pieces, first_row=count)
            tokens += added.tokens
            sampled = sampled + added.sampled
            slots = np.concatenate((slots, added.slots))
            counts = np.concatenate((counts, added.counts))
            prompt_lengths = np.concatenate((prompt_lengths, added.prompt_lengths))
            rows = added.logit_rows + added.described_rows
            logit_rows = np.concatenate((logit_rows, np.array(rows, dtype=np.int64)))

        starts = positions = table.computed[slots]
        first_rows = owners = self._numbers[: len(slots)]
        if len(tokens) > len(slots):
            first_rows = counts.cumsum() - counts
            owners = owners.repeat(counts)
            positions = np.arange(len(tokens)) + (starts - first_rows)[owners]
        most_blocks = table.room[slots].max() // table.block_size
        tables = table.blocks[slots, :most_blocks]
        blocks = tables[owners, positions // table.block_size]
        forward = ForwardBatch(
            token_ids=self._tensor(np.array(tokens)),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(blocks * table.block_size + positions % table.block_size),
            block_tables=self._tensor(tables),
            logit_rows=self._tensor(logit_rows),
            slices=np.stack((first_rows, counts, starts + counts, prompt_lengths), axis=1),
        )
        return StepBatch(forward, sampled, added.described)

    def _tensor(self, values: Integers) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _added(pieces: list[Piece], first_row: int) -> _Pieces:
    added = _Pieces()
    for piece in pieces:
        sequence, count, slot = piece.sequence, piece.count, piece.sequence.slot
        assert slot is not None
        start = slot.computed
        end, row = start + count, first_row + len(added.tokens)
        added.tokens += sequence.token_ids[start:end]
        added.slots.append(slot.number)
        added.counts.append(count)
        added.prompt_lengths.append(sequence.prompt_length)
        if end == len(sequence.token_ids) and sequence.embedding is None:
            added.sampled.append(sequence)
            added.logit_rows.append(row + count - 1)
        if sequence.lacks_prompt_logprobs:
            # A recomputed prompt may begin before the first position that is still to be described.
            first = max(start, len(sequence.prompt_logprobs) - 1)
            last = min(end, sequence.prompt_length - 1)
            if last > first:
                added.described.append((sequence, last - first))
                added.described_rows += range(row + first - start, row + last - start)
    return added
