"""The shared table of workers."""

import os

import pytest

from placement.board import Board, BoardRow, WorkerState


def test_a_row_written_by_a_child_is_read_by_the_parent() -> None:
    board = Board.create(3)
    child = os.fork()
    if child == 0:
        Board(board.fd).write(1, BoardRow(state=WorkerState.SERVING, pid=os.getpid(), running=7, steps=2**63))
        os._exit(0)
    os.waitpid(child, 0)
    assert board.read(1) == BoardRow(state=WorkerState.SERVING, pid=child, running=7, steps=2**63)
    assert board.read(0) == board.read(2) == BoardRow()


def test_one_field_can_be_stored_alone() -> None:
    board = Board.create(1)
    board.write(0, BoardRow(pid=1, waiting=5))
    board.set(0, "state", WorkerState.DRAINING)
    assert board.read(0) == BoardRow(state=WorkerState.DRAINING, pid=1, waiting=5)


@pytest.mark.parametrize("row", [-1, 2])
def test_rows_that_do_not_exist_are_refused(row: int) -> None:
    with pytest.raises(IndexError, match="has 2 rows"):
        Board.create(2).read(row)


def test_another_file_is_not_taken_for_a_board() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="does not hold a board"):
        Board(fd)


def test_what_workers_placed_is_summed_per_target_and_forgotten_with_its_origin() -> None:
    board = Board.create(3)
    other = Board(board.fd)
    board.place(0, 2, 3)
    other.place(1, 2, 1)
    other.place(2, 0, 5)
    assert [board.placed(worker) for worker in range(3)] == [5, 0, 4]
    other.place(1, 2, -1)
    assert board.placed(2) == 3
    board.clear_placed(0)
    assert [other.placed(worker) for worker in range(3)] == [5, 0, 0]
    assert [board.read(row) for row in range(3)] == [BoardRow()] * 3


def test_a_prefix_table_knows_what_was_added_and_nothing_else() -> None:
    board = Board.create(2)
    mine, seen = board.prefixes(1), Board(board.fd).prefixes(1)
    digests = [bytes([number]) * 16 for number in range(50)]
    for digest in digests:
        mine.add(digest)
    assert all(digest in seen for digest in digests)
    assert bytes([99]) * 16 not in seen
    assert digests[3] not in board.prefixes(0)
    mine.discard(digests[3])
    assert digests[3] not in seen
    assert digests[4] in seen
    mine.clear()
    assert not any(digest in seen for digest in digests)
