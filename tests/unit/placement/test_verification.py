import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from placement import numa
from placement.board import BoardRow
from placement.file_segment import WeightsFile
from placement.mapping import MADV_POPULATE_READ, Mapping
from placement.messages import SegmentState, ServerState, WorkerPlace
from placement.residency import Method, VerdictKind
from placement.segment import Segment, SegmentBuilder, TensorSpec
from placement.verification import repair_cache, verify_cache, verify_segments

PAGE = 4096
NODE = numa.get_mempolicy(flags=numa.MPOL_F_MEMS_ALLOWED).nodes[0]
ELSEWHERE = NODE + 1
# A name of this file's own: other tests of the same process leave segments of a node0 mapped.
UNIT = "verified0"


def build(unit: str = UNIT) -> tuple[Segment, int]:
    """A sealed segment of 16 pages of data, mapped here, and where its data begins."""
    builder = SegmentBuilder(unit, "plain", "uint8", [TensorSpec("t", "uint8", (16 * PAGE,), 16 * PAGE)])
    builder.destinations()["t"][:] = bytes(16 * PAGE)
    fd = builder.seal("digest")
    segment = Segment(fd)
    os.close(fd)
    return segment, builder.data_offset


@pytest.fixture
def segment() -> Iterator[tuple[Segment, int]]:
    found = build()
    yield found
    found[0].mapping.close()


def state_of(
    data_offset: int, nodes: tuple[int, ...] = (NODE,), pids: tuple[int, ...] | None = None, code: int = 0
):
    segment = SegmentState(UNIT, 1, "d", "uint8", "bound", "", 0.1, (), nodes, data_offset, code)
    pids = (os.getpid(),) if pids is None else pids
    return ServerState("serving", "m", "a", "0", 1, 0.0, "replicate", "r", pids, (segment,), ())


def place(pid: int, nodes: tuple[int, ...] = (NODE,), code: int = 0) -> WorkerPlace:
    return WorkerPlace(3, UNIT, pid, True, (0,), 1, 0, "a", nodes, code)


@pytest.mark.parametrize("refuse", [{}, {"move_pages": errno.EPERM}])
def test_a_segment_is_seen_through_the_process_that_maps_it(segment, refuse) -> None:
    segment[0].mapping.advise(MADV_POPULATE_READ)
    with numa.refusing(**refuse):
        (check,) = verify_segments(state_of(segment[1]))
    assert (check.verdict.kind, check.verdict.local) == (VerdictKind.BOUND, True)
    (sight,) = check.sights
    assert sight.pid == os.getpid()
    assert sight.residency.method is (Method.NUMA_MAPS if refuse else Method.MOVE_PAGES)
    assert sight.residency.on([NODE]) >= 16


def test_the_process_that_touched_most_of_it_decides(segment) -> None:
    segment[0].mapping.advise(MADV_POPULATE_READ)
    # A forked child has the mapping, and no page of it until it reads.
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), 19)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    try:
        (check,) = verify_segments(state_of(segment[1], pids=(child, os.getpid())))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert [sight.residency.present for sight in check.sights] == [0, 16]
    assert check.verdict.local


def test_a_segment_on_another_node_than_wanted_is_not_local(segment) -> None:
    segment[0].mapping.advise(MADV_POPULATE_READ)
    (check,) = verify_segments(state_of(segment[1], nodes=(ELSEWHERE,)))
    assert (check.verdict.kind, check.verdict.local) == (VerdictKind.UNBOUND, False)
    assert f"the rest on node {NODE}" in check.verdict.explanation


def test_a_segment_whose_policy_was_refused_says_what_would_lift_that(segment) -> None:
    segment[0].mapping.advise(MADV_POPULATE_READ)
    (check,) = verify_segments(state_of(segment[1], code=errno.EPERM))
    assert (check.verdict.kind, check.verdict.local) == (VerdictKind.UNBOUND, True)
    assert "mbind refused (EPERM" in check.verdict.explanation


def test_while_weights_are_replaced_both_segments_are_looked_at(segment) -> None:
    other, _ = build()
    for mapping in (segment[0].mapping, other.mapping):
        mapping.advise(MADV_POPULATE_READ)
    assert [check.verdict.local for check in verify_segments(state_of(segment[1]))] == [True, True]
    other.mapping.close()


def test_a_segment_that_nobody_maps_is_not_proven() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (check,) = verify_segments(state_of(0, pids=(child.pid, 2**22 - 1)))
        child.communicate(b"\n")
    assert not check.verdict.local
    assert "nothing is proven" in check.verdict.explanation


@pytest.fixture
def cache() -> Iterator[Mapping]:
    mapping = Mapping.anonymous(8 * PAGE, "cache")
    yield mapping
    mapping.close()


def row_of(cache: Mapping) -> BoardRow:
    return BoardRow(kv_cache_address=cache.address, kv_cache_bytes=cache.length)


def touch(cache: Mapping, pages: int) -> None:
    view = cache.view()
    for page in range(pages):
        view[page * PAGE] = 1


@pytest.mark.parametrize(
    ("touched", "nodes", "code", "kind", "local", "words"),
    [
        (0, (NODE,), 0, VerdictKind.BOUND, True, f"held to node {NODE}, none of 8 pages used yet"),
        (3, (NODE,), 0, VerdictKind.BOUND, True, f"all 3 pages on node {NODE} (5 more not in memory)"),
        (0, (NODE,), errno.EPERM, VerdictKind.UNBOUND, True, "none of 8 used yet; mbind refused (EPERM"),
        (3, (NODE,), errno.ENOSYS, VerdictKind.UNBOUND, True, "by first touch, but no policy holds them"),
        (3, (ELSEWHERE,), 0, VerdictKind.UNBOUND, False, f"0 of 3 pages on node {ELSEWHERE}"),
    ],
)
def test_a_cache_is_judged_by_the_pages_it_uses(cache, touched, nodes, code, kind, local, words) -> None:
    touch(cache, touched)
    check = verify_cache(place(os.getpid(), nodes, code), row_of(cache))
    assert (check.worker, check.verdict.kind, check.verdict.local) == (3, kind, local)
    assert words in check.verdict.explanation


@pytest.mark.parametrize(
    ("pid", "row", "words"),
    [
        (0, BoardRow(kv_cache_address=PAGE, kv_cache_bytes=PAGE), "worker 3 is not running"),
        (os.getpid(), BoardRow(), "has not reported its cache yet"),
        (2**22 - 1, BoardRow(kv_cache_address=PAGE, kv_cache_bytes=PAGE), "could not be counted"),
    ],
    ids=["ended", "silent", "unreadable"],
)
def test_a_cache_that_cannot_be_measured_is_not_local(pid, row, words) -> None:
    check = verify_cache(place(pid), row)
    assert not check.verdict.local
    assert words in check.verdict.explanation


def test_a_repair_that_is_refused_says_so(cache) -> None:
    touch(cache, 2)
    with numa.refusing(move_pages=errno.EPERM):
        repair = repair_cache(place(os.getpid(), (ELSEWHERE,)), row_of(cache))
    assert "0 pages moved, then move_pages refused (EPERM" in str(repair)


def test_a_cache_that_is_in_place_has_nothing_to_repair(cache) -> None:
    touch(cache, 2)
    assert str(repair_cache(place(os.getpid()), row_of(cache))) == "0 pages moved"


@pytest.fixture
def shared_file(tmp_path: Path) -> Iterator[tuple[ServerState, Path]]:
    """A server whose weights are a file of 16 pages, mapped here."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"w" * 16 * PAGE)
    with path.open("rb") as file:
        known = WeightsFile.of(path, file.fileno())
        mapping = Mapping.of_file(file.fileno(), known.size, writable=False)
    mapping.advise(MADV_POPULATE_READ)
    segment = replace(state_of(0).segments[0], files=(tuple(known),))
    yield replace(state_of(0), segments=(segment,)), path
    mapping.close()


def test_weights_in_files_are_seen_through_their_mappings(shared_file) -> None:
    (check,) = verify_segments(shared_file[0])
    assert (check.verdict.kind, check.verdict.local) == (VerdictKind.UNBOUND, True)
    assert [sight.residency.pages for sight in check.sights] == [{NODE: 16}]
    elsewhere = replace(shared_file[0].segments[0], memory_nodes=(ELSEWHERE,))
    (check,) = verify_segments(replace(shared_file[0], segments=(elsewhere,)))
    assert not check.verdict.local
    assert "page cache lies where its first reader ran" in check.verdict.explanation


def test_a_file_that_changed_is_no_longer_sound(shared_file) -> None:
    state, path = shared_file
    os.utime(path, ns=(1, 1))
    (check,) = verify_segments(state)
    assert not check.verdict.local
    assert f"{path}: was written to since it was loaded" in check.verdict.explanation
    path.unlink()
    (check,) = verify_segments(state)
    assert [sight.residency.present for sight in check.sights] == [16]
    assert "cannot be found any more" in check.verdict.explanation


def test_files_that_nobody_maps_prove_nothing(shared_file) -> None:
    (check,) = verify_segments(replace(shared_file[0], helper_pids=()))
    assert not check.verdict.local
    assert "nothing is proven" in check.verdict.explanation
