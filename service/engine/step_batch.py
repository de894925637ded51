"""Turns what was scheduled into the tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from service.engine.scheduler import Piece
from service.engine.sequence import Sequence
from service.engine.slots import Generating, Integers, SlotTable
from service.models.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's input and what its logits are for.

    First come the rows of `sampled`, one for each sequence that gets a token; then for each of `described` so
    many rows whose next tokens in the prompt are to be given log probabilities.
    """

    forward: ForwardBatch
    sampled: list[Sequence]
    described: list[tuple[Sequence, int]]


class StepBatcher:
    """Builds step batches over the scheduler's slots; tensors are made on the CPU and moved to `device`."""

    def __init__(self, table: SlotTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._is_on_cpu = device.type == "cpu"
        self._numbers: Integers = np.arange(len(table.blocks))

    def build(self, generating: Generating, pieces: list[Piece]) -> StepBatch:
        """The batch of a step in which at least one token is computed: the last one of each of `generating`, then `pieces`.

        Its tensors may be columns of `generating`, which change when this goes on to the next step.
        """
        generating.read_tokens()
        token_ids, positions, places = generating.token_ids, generating.computed, generating.places
        tables, slices = generating.tables, generating.slices.copy()
        sampled, described = generating.sequences, []
        logit_rows = self._numbers[: len(sampled)]
        if pieces:
            added = _Pieces(self._table, pieces, first_row=len(sampled))
            token_ids = np.concatenate((token_ids, added.token_ids))
            positions = np.concatenate((positions, added.positions))
            places = np.concatenate((places, added.places))
            slots = np.concatenate((generating.slots, added.slots))
            tables = self._table.blocks[slots, : max(tables.shape[1], added.most_blocks)]
            slices = np.concatenate((slices, added.slices))
            logit_rows = np.concatenate((logit_rows, added.logit_rows))
            sampled, described = sampled + added.sampled, added.described
        forward = ForwardBatch(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            slot_mapping=self._tensor(places),
            block_tables=self._tensor(tables),
            logit_rows=self._tensor(logit_rows),
            slices=slices,
        )
        return StepBatch(forward, sampled, described)

    def _tensor(self, values: Integers) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._is_on_cpu else tensor.to(self._device)


class _Pieces:
    """What pieces add to a batch, whose rows are counted from its first one; theirs begin with `first_row`."""

    def __init__(self, table: SlotTable, pieces: list[Piece], first_row: int) -> None:
        self.sampled: list[Sequence] = []
        self.described: list[tuple[Sequence, int]] = []
        self._logit_rows: list[int] = []
        self._described_rows: list[int] = []
        tokens: list[int] = []
        slices: list[tuple[int, int, int, int]] = []
        slots = [piece.sequence.slot for piece in pieces if piece.sequence.slot is not None]
        for piece, slot in zip(pieces, slots, strict=True):
            sequence, start = piece.sequence, slot.computed
            end, row = start + piece.count, first_row + len(tokens)
            tokens += sequence.token_ids[start:end]
            slices.append((row, piece.count, end, sequence.prompt_length))
            self._want_logits(sequence, start, end, row)

        self.token_ids: Integers = np.array(tokens)
        self.slices: Integers = np.array(slices)
        self.slots: Integers = np.array([slot.number for slot in slots])
        self.logit_rows: Integers = np.array(self._logit_rows + self._described_rows, dtype=np.int64)
        self.most_blocks = max(slot.room for slot in slots) // table.block_size
        first_rows, counts, ends, _ = self.slices.T
        owners = np.arange(len(pieces)).repeat(counts)
        self.positions: Integers = (
            np.arange(first_row, first_row + len(tokens)) + (ends - counts - first_rows)[owners]
        )
        blocks, offsets = np.divmod(self.positions, table.block_size)
        self.places: Integers = table.blocks[self.slots[owners], blocks] * table.block_size + offsets

    def _want_logits(self, sequence: Sequence, start: int, end: int, row: int) -> None:
        """Of a sequence's tokens from `start` up to `end`, which stand in the batch from `row`."""
        if end == len(sequence.token_ids) and sequence.embedding is None:
            self.sampled.append(sequence)
            self._logit_rows.append(row + end - start - 1)
        if sequence.lacks_prompt_logprobs:
            # A recomputed prompt may begin before the first position that is still to be described.
            first = max(start, len(sequence.prompt_logprobs) - 1)
            last = min(end, sequence.prompt_length - 1)
            if last > first:
                self.described.append((sequence, last - first))
                self._described_rows += range(row + first - start, row + last - start)
