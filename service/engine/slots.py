"""What every step needs of the running sequences, in columns, so that a step is built by few operations over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class SlotTable:
    """A row for each sequence that may run, in arrays that stay in place.

    `computed` [slots] int64: how many of a sequence's tokens are in the cache; `room` [slots] int64: how many its blocks
    have places for; `blocks` [slots, max_blocks] int64: its block table, of which room / block_size entries count.
    """

    def __init__(self, slots: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.computed: Integers = np.zeros(slots, dtype=np.int64)
        self.room: Integers = np.zeros(slots, dtype=np.int64)
        self.blocks: Integers = np.zeros((slots, max_blocks), dtype=np.int64)
        self._free = list(reversed(range(slots)))

    def take(self, blocks: Sequence[int], computed: int) -> Slot:
        """A free row, now for a sequence with these blocks. IndexError when none is free."""
        slot = Slot(self, self._free.pop())
        self.blocks[slot.number, : len(blocks)] = blocks
        self.room[slot.number] = len(blocks) * self.block_size
        self.computed[slot.number] = computed
        return slot

    def give_back(self, slot: Slot) -> None:
        """Frees the row; its owner lets go of `slot`."""
        self._free.append(slot.number)


class Slot:
    """One sequence's row of the table, which alone says what is in it."""

    __slots__ = ("_table", "number")

    def __init__(self, table: SlotTable, number: int) -> None:
        self._table = table
        self.number = number

    @property
    def computed(self) -> int:
        """How many of the sequence's tokens are in the cache."""
        return self._table.computed.item(self.number)

    @computed.setter
    def computed(self, count: int) -> None:
        self._table.computed[self.number] = count

    @property
    def blocks(self) -> list[int]:
        """The sequence's blocks in the order of its tokens, as a new list."""
        table = self._table
        return table.blocks[self.number, : table.room.item(self.number) // table.block_size].tolist()

    def add_block(self, block: int) -> None:
        """Appends a block."""
        table, room = self._table, self._table.room.item(self.number)
        table.blocks[self.number, room // table.block_size] = block
        table.room[self.number] = room + table.block_size

    def block(self, index: int) -> int:
        """The block of that place in the sequence's order."""
        return self._table.blocks.item(self.number, index)
