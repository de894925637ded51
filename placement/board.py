"""The board: a small shared-memory table with one row per worker, written by that worker and read by all.

Every field is one aligned 64-bit word, stored at once, so a reader never sees half a value; rows need no lock. Behind
the rows lie two tables for balancing: how many completions each worker has placed on each, and which prefixes each
worker's cache holds.
"""

from __future__ import annotations

import enum
import os
from dataclasses import astuple, dataclass, fields

from placement.mapping import Mapping

_MAGIC = 0x4E554D41424F5244
_VERSION = 2
_HEADER_WORDS = 8
_ROW_WORDS = 32
# A power of two. Pages of it that no prefix falls on are never touched, so they take no memory.
_PREFIX_SLOTS = 8192


class WorkerState(enum.IntEnum):
    """What a worker is doing."""

    STOPPED = 0
    STARTING = 1
    SERVING = 2
    DRAINING = 3


@dataclass(frozen=True)
class BoardRow:
    """One worker's row. Counters grow from the start of the process. `heartbeat_ns` is written by the engine's thread,
    `loop_heartbeat_ns` by the event loop, both from CLOCK_MONOTONIC.

    `generation` counts the weights that the server has loaded: only workers of equal generation serve the same model.
    `unit` is the number of the worker's unit, `node` the first node of its memory.
    """

    state: int = WorkerState.STOPPED
    pid: int = 0
    heartbeat_ns: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    preemptions: int = 0
    steps: int = 0
    kv_cache_bytes: int = 0
    kv_cache_address: int = 0
    generation: int = 0
    unit: int = 0
    node: int = 0
    loop_heartbeat_ns: int = 0


_FIELD_INDEX = {field.name: index for index, field in enumerate(fields(BoardRow))}


class Board:
    """The table over a shared descriptor. Raises ValueError when the descriptor holds another table."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._mapping = Mapping.of_file(fd, os.fstat(fd).st_size, writable=True)
        self._words = self._mapping.view().cast("Q")
        if self._words[0] != _MAGIC or self._words[1] != _VERSION or self._words[3] != _ROW_WORDS:
            raise ValueError("descriptor does not hold a board of this version")
        self.rows = self._words[2]
        self._placed_start = _HEADER_WORDS + self.rows * _ROW_WORDS
        self._prefix_start = self._placed_start + self.rows * self.rows

    @classmethod
    def create(cls, rows: int) -> Board:
        """A new board of `rows` workers."""
        fd = os.memfd_create("numaserve-board", os.MFD_CLOEXEC)
        length = 8 * (_HEADER_WORDS + rows * (_ROW_WORDS + rows + _PREFIX_SLOTS))
        os.ftruncate(fd, length)
        mapping = Mapping.of_file(fd, length, writable=True)
        words = mapping.view().cast("Q")
        words[0], words[1], words[2], words[3] = _MAGIC, _VERSION, rows, _ROW_WORDS
        words.release()
        mapping.close()
        return cls(fd)

    def serving(self, generation: int) -> list[int]:
        """Rows of the workers that serve the weights of a generation. Most rows of a board are spare."""
        states, generations = (
            self._words[_HEADER_WORDS + _FIELD_INDEX[name] : self._placed_start : _ROW_WORDS].tolist()
            for name in ("state", "generation")
        )
        return [
            row
            for row, state in enumerate(states)
            if state == WorkerState.SERVING and generations[row] == generation
        ]

    def _start(self, row: int) -> int:
        if not 0 <= row < self.rows:
            raise IndexError(f"the board has {self.rows} rows, not one numbered {row}")
        return _HEADER_WORDS + row * _ROW_WORDS

    def read(self, row: int) -> BoardRow:
        """A snapshot of one row."""
        start = self._start(row)
        return BoardRow(*self._words[start : start + len(_FIELD_INDEX)].tolist())

    def write(self, row: int, values: BoardRow) -> None:
        """Replace a row, field by field."""
        start = self._start(row)
        for offset, value in enumerate(astuple(values)):
            self._words[start + offset] = value

    def update(self, row: int, **values: int) -> None:
        """Store some fields of a row, leaving the others to whoever writes them."""
        start = self._start(row)
        for name, value in values.items():
            self._words[start + _FIELD_INDEX[name]] = value

    def set(self, row: int, field: str, value: int) -> None:
        """Store one field of a row."""
        self._words[self._start(row) + _FIELD_INDEX[field]] = value

    def place(self, origin: int, target: int, change: int) -> None:
        """Add to the number of completions that worker `origin` has running on worker `target`.

        Only `origin` writes its counts, so that no two processes add to one word.
        """
        self._words[self._placed_at(origin, target)] += change

    def placed(self, target: int) -> int:
        """Completions that run or wait on a worker, counted by those who placed them: it lags behind nothing."""
        first = self._placed_at(0, target)
        return sum(self._words[first : self._prefix_start : self.rows])

    def clear_placed(self, origin: int) -> None:
        """Forget what a worker that is gone had placed."""
        for target in range(self.rows):
            self._words[self._placed_at(origin, target)] = 0

    def _placed_at(self, origin: int, target: int) -> int:
        self._start(origin), self._start(target)
        return self._placed_start + origin * self.rows + target

    def prefixes(self, row: int) -> PrefixTable:
        """Which prefixes a worker's cache holds."""
        self._start(row)
        first = self._prefix_start + row * _PREFIX_SLOTS
        return PrefixTable(self._words[first : first + _PREFIX_SLOTS])


class PrefixTable:
    """Hashes of the prefixes that a worker has cached: direct-mapped and so approximate, for choosing and no more."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    @staticmethod
    def _key(digest: bytes) -> int:
        # 0 stands for an empty slot.
        return int.from_bytes(digest[:8], "little") or 1

    def add(self, digest: bytes) -> None:
        """The prefix with this hash (8 bytes or more) is cached."""
        key = self._key(digest)
        self._words[key % _PREFIX_SLOTS] = key

    def discard(self, digest: bytes) -> None:
        """It no longer is."""
        key = self._key(digest)
        if self._words[key % _PREFIX_SLOTS] == key:
            self._words[key % _PREFIX_SLOTS] = 0

    def __contains__(self, digest: bytes) -> bool:
        key = self._key(digest)
        return bool(self._words[key % _PREFIX_SLOTS] == key)

    def clear(self) -> None:
        """Nothing is cached."""
        self._words[:] = memoryview(bytes(8 * _PREFIX_SLOTS)).cast("Q")
