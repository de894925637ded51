"""Which rows of the board are free. Workers of two generations and those that are added later have rows of their own."""

from __future__ import annotations

import heapq

_FEWEST_ROWS = 64
_ROWS_PER_WORKER = 4


def rows_for(workers: int) -> int:
    """Rows of a board for a server that starts with so many workers: a second generation fits, and growth."""
    return max(_FEWEST_ROWS, _ROWS_PER_WORKER * workers)


class RowPool:
    """Hands out the lowest free row, so that a server at rest uses the first ones."""

    def __init__(self, rows: int) -> None:
        self._free = list(range(rows))

    def take(self) -> int | None:
        """A row, None when all are taken."""
        return heapq.heappop(self._free) if self._free else None

    def give_back(self, row: int) -> None:
        """The worker of a row is gone. Raises ValueError when the row was free."""
        if row in self._free:
            raise ValueError(f"row {row} was free")
        heapq.heappush(self._free, row)
