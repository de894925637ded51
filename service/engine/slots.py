"""What every step needs of the running sequences, in columns, so that a step is built by few operations over all of them."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from service.engine.sequence import Sequence

Integers = npt.NDArray[np.int64]


class SlotTable:
    """A row for each sequence that may run, in arrays that stay in place.

    `blocks` [slots, max_blocks] int64: its block table, of which room / block_size entries count. Of sequences that are in
    no `Generating`, `computed` [slots] int64: how many tokens are in the cache, and `room` [slots] int64: how many the
    blocks have places for.
    """

    def __init__(self, slots: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: Integers = np.zeros((slots, max_blocks), dtype=np.int64)
        self.computed: Integers = np.zeros(slots, dtype=np.int64)
        self.room: Integers = np.zeros(slots, dtype=np.int64)
        self._free = list(reversed(range(slots)))

    def take(self, blocks: ListLike[int], computed: int) -> Slot:
        """A free row, now for a sequence with these blocks. IndexError when none is free."""
        number = self._free.pop()
        self.blocks[number, : len(blocks)] = blocks
        self.room[number] = len(blocks) * self.block_size
        self.computed[number] = computed
        return Slot(self, number)

    def give_back(self, slot: Slot) -> None:
        """Frees the row; its owner lets go of `slot`."""
        self._free.append(slot.number)


class Slot:
    """One sequence's row of the table. What changes from step to step stands at `place` of the columns that hold it now:
    the table's or a `Generating`'s, and nowhere else.
    """

    __slots__ = ("columns", "number", "place", "table")

    def __init__(self, table: SlotTable, number: int) -> None:
        self.table = table
        self.number = number
        self.columns: SlotTable | Generating = table
        self.place = number

    @property
    def computed(self) -> int:
        """How many of the sequence's tokens are in the cache."""
        return self.columns.computed.item(self.place)

    @computed.setter
    def computed(self, count: int) -> None:
        self.columns.computed[self.place] = count

    @property
    def room(self) -> int:
        """How many tokens its blocks have places for."""
        return self.columns.room.item(self.place)

    @property
    def blocks(self) -> list[int]:
        """The sequence's blocks in the order of its tokens, as a new list."""
        return self.table.blocks[self.number, : self.room // self.table.block_size].tolist()

    def block(self, index: int) -> int:
        """The block of that place in the sequence's order."""
        return self.table.blocks.item(self.number, index)


class Generating:
    """Sequences that each compute their last token in a step, in their order, with columns that go on from step to step as
    long as these are the ones.

    Of each sequence, [sequences] int64: `computed` and `room`, as in `SlotTable`; `places`: where the keys and values of
    its last token go, as block * block_size + offset; `token_ids`: that token, once `read_tokens` was called. `slices`
    [sequences, 4] int64: the `SequenceSlice` of that token if nobody stands before these in the batch. `full` holds the
    indices of those whose blocks are full, so that there is no place for the last token yet.
    """

    room: Integers
    computed: Integers
    places: Integers
    token_ids: Integers

    def __init__(self, table: SlotTable, sequences: list[Sequence]) -> None:
        slots = [each.slot for each in sequences if each.slot is not None]
        columns: Integers = np.zeros((8, len(slots)), dtype=np.int64)
        columns[0] = np.arange(len(slots))
        columns[1] = 1
        columns[3] = [each.prompt_length for each in sequences]
        columns[4] = [slot.columns.room.item(slot.place) for slot in slots]
        columns[5] = [slot.columns.computed.item(slot.place) for slot in slots]
        columns[2] = columns[5] + 1
        self._columns = columns
        self.slices = columns[:4].T
        self.room, self.computed, self.places, self.token_ids = columns[4:]
        self.full = self._full()
        self.sequences = sequences
        self.slots: Integers = np.array([slot.number for slot in slots], dtype=np.int64)
        self._table = table
        self._tables: Integers | None = None
        blocks = table.blocks[self.slots, self.computed // table.block_size]
        self.places[:] = blocks * table.block_size + self.computed % table.block_size
        for place, slot in enumerate(slots):
            slot.columns, slot.place = self, place

    @property
    def tables(self) -> Integers:
        """The rows of `SlotTable.blocks` [sequences, most_blocks], cut after the last block of whoever has most."""
        if self._tables is None:
            most_blocks = self.room.max(initial=0) // self._table.block_size
            self._tables = self._table.blocks[self.slots, :most_blocks]
        return self._tables

    def read_tokens(self) -> None:
        """Reads each sequence's last token."""
        self.token_ids[:] = [sequence.token_ids[-1] for sequence in self.sequences]

    def go_on(self) -> None:
        """Notes that each last token is in the cache; each sequence then gets one more."""
        self._columns += _STEP
        self.full = self._full()

    def add_block(self, place: int, block: int) -> None:
        """Gives one that is full a block, in which its last token is then the first."""
        table, room = self._table, self.room.item(place)
        table.blocks[self.slots[place], room // table.block_size] = block
        self.room[place] = room + table.block_size
        self.places[place] = block * table.block_size
        self.full.remove(place)
        self._tables = None

    def _full(self) -> list[int]:
        return (self.computed == self.room).nonzero()[0].tolist()


# Of a generating sequence's columns only context length, `computed` and `places` grow.
_STEP: Integers = np.array([[0], [0], [1], [0], [0], [1], [1], [0]])
