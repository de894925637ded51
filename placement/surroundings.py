"""What units and their crews need of the launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from placement.board import Board
from placement.board_rows import RowPool
from placement.events import EventLoop
from placement.progress import LoadProgressView

EXIT_FAILURE = 1
EXIT_BAD_CONFIGURATION = 2
EXIT_CANNOT_START = 3


@dataclass(frozen=True)
class Surroundings:
    """`give_up` ends the generation, and the whole service with the one that serves: exit status and reason.

    `changed` publishes a new status. `exited` acts on the death of a process that may be any other unit's.
    """

    events: EventLoop
    board: Board
    rows: RowPool
    progress: LoadProgressView
    give_up: Callable[[int, str], None]
    changed: Callable[[], None]
    exited: Callable[[int, int], None]
