"""Rows of the board are handed out lowest first, and once each."""

import pytest

from placement.board import Board, BoardRow, WorkerState
from placement.board_rows import RowPool, rows_for


def test_the_lowest_free_row_is_taken_and_none_twice() -> None:
    pool = RowPool(3)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, None]
    pool.give_back(1)
    pool.give_back(0)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, None]
    pool.give_back(2)
    with pytest.raises(ValueError, match="row 2 was free"):
        pool.give_back(2)


@pytest.mark.parametrize("workers", [1, 16, 17, 100])
def test_two_generations_and_growth_fit(workers: int) -> None:
    assert rows_for(workers) >= max(64, 4 * workers)


def test_only_serving_workers_of_the_generation_are_found_among_spare_rows() -> None:
    board = Board.create(64)
    board.write(3, BoardRow(state=WorkerState.SERVING, generation=1))
    board.write(7, BoardRow(state=WorkerState.SERVING, generation=2))
    board.write(9, BoardRow(state=WorkerState.DRAINING, generation=2))
    board.write(63, BoardRow(state=WorkerState.SERVING, generation=2))
    assert board.serving(2) == [7, 63]
    assert board.serving(1) == [3]
    assert board.serving(0) == []
