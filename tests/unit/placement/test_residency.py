import ctypes
import errno
import mmap
import os
import subprocess
import sys

import pytest
from fake_host import write

from placement import mapping as mapping_module
from placement import numa
from placement.mapping import Mapping
from placement.permissions import Refused
from placement.residency import (
    Method,
    Residency,
    VerdictKind,
    judge,
    judge_page_cache,
    merge,
    pages_per_node,
    process_memory,
)

PAGE = mmap.PAGESIZE
MBIND = Refused("mbind", errno.EPERM, "a seccomp filter is active", "add CAP_SYS_NICE")
NAME = "numaserve-weights-node0"


@pytest.fixture
def segment():
    """A memfd of 64 pages, 48 of them filled, as (mapping, address)."""
    fd = os.memfd_create(NAME)
    os.ftruncate(fd, 64 * PAGE)
    memory = mmap.mmap(fd, 64 * PAGE)
    os.close(fd)
    view = ctypes.c_char.from_buffer(memory)
    for page in range(48):
        memory[page * PAGE] = 1
    yield memory, ctypes.addressof(view)
    del view
    memory.close()


def pages(counts, untouched=0, unknown=0, method=Method.MOVE_PAGES):
    return Residency(counts, untouched, unknown, PAGE, method)


def own_node():
    return numa.get_mempolicy(flags=numa.MPOL_F_MEMS_ALLOWED).nodes[0]


@pytest.mark.parametrize("refuse", [{}, {"move_pages": errno.EPERM}, {"move_pages": errno.ENOSYS}])
def test_both_methods_count_the_same_pages(segment, refuse):
    with numa.refusing(**refuse):
        found = pages_per_node(segment[1], 64 * PAGE)
    assert sum(found.pages.values()) == found.present == 48
    assert set(found.pages) <= set(numa.get_mempolicy(flags=numa.MPOL_F_MEMS_ALLOWED).nodes)
    assert (found.untouched, found.unknown, found.page_size) == (16, 0, PAGE)
    assert found.method is (Method.NUMA_MAPS if refuse else Method.MOVE_PAGES)
    assert (found.refused is not None) == bool(refuse)


def test_a_range_is_rounded_out_to_whole_pages(segment):
    assert pages_per_node(segment[1] + 10, PAGE).present == 2


def test_chunks_do_not_lose_pages(segment, monkeypatch):
    monkeypatch.setattr("placement.residency._CHUNK_PAGES", 7)
    found = pages_per_node(segment[1], 64 * PAGE)
    assert (found.present, found.untouched) == (48, 16)


def test_an_empty_range_is_an_error(segment):
    with pytest.raises(ValueError, match="positive"):
        pages_per_node(segment[1], 0)


def test_neither_method_is_reported_as_uncounted(segment, tmp_path):
    with numa.refusing(move_pages=errno.EPERM):
        found = pages_per_node(segment[1], 64 * PAGE, procfs=tmp_path)
    assert (found.method, found.unknown) == (Method.NONE, 64)
    verdict = judge(found, [0])
    assert (verdict.kind, verdict.local) == (VerdictKind.UNBOUND, False)
    assert "could not be counted" in verdict.explanation
    assert "move_pages refused" in verdict.explanation


def test_numa_maps_counts_huge_pages_in_their_own_size(tmp_path):
    start = 0x7F0000000000
    write(
        tmp_path / "self/maps",
        f"{start:x}-{start + 8 * 2**20:x} rw-s 0 00:01 9 /memfd:{NAME}\n{start + 2**30:x}-{start + 2**31:x} rw-p 0 00:00 0",
    )
    write(
        tmp_path / "self/numa_maps",
        f"{start:x} bind:1 file=/memfd:{NAME} huge dirty=3 N0=1 N1=2 kernelpagesize_kB=2048\n"
        f"{start + 2**30:x} default anon=7 N0=7 kernelpagesize_kB=4",
    )
    with numa.refusing(move_pages=errno.EPERM):
        found = pages_per_node(start, 8 * 2**20, procfs=tmp_path)
    per_huge_page = 2 * 2**20 // PAGE
    assert found.pages == {0: per_huge_page, 1: 2 * per_huge_page}
    assert found.untouched == per_huge_page


@pytest.mark.parametrize(
    ("residency", "wanted", "refused", "interleaved", "kind", "local", "words"),
    [
        (pages({1: 100}), [1], [], False, VerdictKind.BOUND, True, ["all 100 pages on node 1"]),
        (
            pages({0: 3, 1: 97}),
            [1],
            [],
            False,
            VerdictKind.PARTLY_BOUND,
            False,
            ["97 of 100", "the rest on node 0"],
        ),
        (
            pages({0: 3, 1: 90, 2: 7}),
            [1],
            [],
            False,
            VerdictKind.PARTLY_BOUND,
            False,
            ["90 of 100", "the rest on node 0 (3), node 2 (7)"],
        ),
        (pages({0: 100}), [1], [], False, VerdictKind.UNBOUND, False, ["0 of 100", "the rest on node 0"]),
        (
            pages({1: 100}),
            [1],
            [MBIND],
            False,
            VerdictKind.UNBOUND,
            True,
            [
                "all 100 pages on node 1 by first touch",
                "no policy holds",
                "mbind refused (EPERM",
                "CAP_SYS_NICE",
            ],
        ),
        (
            pages({0: 40, 1: 60}),
            [1],
            [MBIND],
            False,
            VerdictKind.PARTLY_BOUND,
            False,
            ["60 of 100", "the rest on node 0", "CAP_SYS_NICE"],
        ),
        (pages({0: 50, 1: 50}), [0, 1], [], True, VerdictKind.BOUND, True, ["nodes 0-1, evenly"]),
        (pages({0: 5050, 1: 4950}), [0, 1], [], True, VerdictKind.BOUND, True, ["evenly"]),
        (
            pages({0: 5200, 1: 4800}),
            [0, 1],
            [],
            True,
            VerdictKind.PARTLY_BOUND,
            False,
            ["not evenly", "5200 on node 0, 4800 on node 1"],
        ),
        (pages({0: 2, 1: 1}), [0, 1], [], True, VerdictKind.BOUND, True, []),
        (pages({0: 100}), [0, 1], [], True, VerdictKind.PARTLY_BOUND, False, ["0 on node 1"]),
        (pages({0: 100}), [0, 1], [], False, VerdictKind.BOUND, True, ["nodes 0-1"]),
        (
            pages({1: 90}, unknown=10),
            [1],
            [],
            False,
            VerdictKind.PARTLY_BOUND,
            False,
            ["90 of 100", "unknown node"],
        ),
        (
            pages({1: 90}, untouched=10),
            [1],
            [],
            False,
            VerdictKind.BOUND,
            True,
            ["all 90", "10 more not in memory"],
        ),
        (pages({}, untouched=10), [1], [], False, VerdictKind.UNBOUND, False, ["none of 10 pages"]),
        (pages({1: 9}, method=Method.NUMA_MAPS), [1], [], False, VerdictKind.BOUND, True, ["numa_maps"]),
    ],
)
def test_verdicts(residency, wanted, refused, interleaved, kind, local, words):
    verdict = judge(residency, wanted, refused, interleaved)
    assert (verdict.kind, verdict.local) == (kind, local)
    for word in words:
        assert word in verdict.explanation
    assert str(verdict).startswith(f"{kind.value}: ")


def test_a_bound_memfd_of_this_host_is_judged_bound(segment):
    memory, address = segment
    numa.mbind(address, 64 * PAGE, numa.MPOL_BIND, [own_node()], numa.MPOL_MF_MOVE)
    memory[63 * PAGE] = 1
    assert judge(pages_per_node(address, 64 * PAGE), [own_node()]).kind is VerdictKind.BOUND
    assert judge(pages_per_node(address, 64 * PAGE), [own_node() + 1]).kind is VerdictKind.UNBOUND


def test_weights_are_told_from_the_rest_of_a_process(segment):
    assert segment[0][0] == 1
    found = process_memory(os.getpid(), "/memfd:numaserve-weights-")
    assert found.weights_pss == 48 * PAGE
    assert found.pss > found.weights_pss
    assert process_memory(os.getpid(), "/memfd:another").weights_pss == 0


def test_rollup_and_smaps_agree_on_an_idle_process():
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    child.stdout.readline()
    try:
        whole, parts = process_memory(child.pid).pss, process_memory(child.pid, "x").pss
    finally:
        child.communicate(b"\n")
    # smaps rounds each mapping down to a kB, the rollup only the sum; other processes map the same libraries.
    assert abs(whole - parts) < 0.05 * whole


def test_without_a_rollup_smaps_is_summed(tmp_path):
    write(
        tmp_path / "7/smaps",
        "7f00-7f10 r--s 0 00:01 9 /memfd:numaserve-weights-node0 (deleted)\nRss: 8 kB\nPss: 4 kB\nSwapPss: 0 kB\n"
        "7f20-7f30 rw-p 0 00:00 0 \nPss: 6 kB\n7f40-7f50 r--p 0 00:00 0 [heap]\nPss: 1 kB",
    )
    assert process_memory(7, procfs=tmp_path).pss == 11 * 1024
    assert process_memory(7, "/memfd:numaserve-weights-node0", procfs=tmp_path).weights_pss == 4 * 1024


def test_a_process_that_is_gone_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        process_memory(7, procfs=tmp_path)


def test_a_kv_cache_is_known_by_its_address(tmp_path):
    write(
        tmp_path / "7/smaps",
        "7f00-7f10 rw-p 0 00:00 0 \nPss: 9 kB\n7f20-7f30 rw-p 0 00:00 0 \nPss: 6 kB",
    )
    assert process_memory(7, "/memfd:x", kv_address=0x7F20, procfs=tmp_path).kv_pss == 6 * 1024


def test_page_cache_is_never_called_bound():
    found = judge_page_cache(pages({0: 5}, untouched=2), [0])
    assert (found.kind, found.local) == (VerdictKind.UNBOUND, True)
    assert found.explanation == (
        "all 5 pages on node 0 (2 more not in memory), "
        "in the page cache of the checkpoint, which no policy holds there"
    )
    partly = judge_page_cache(pages({0: 5, 1: 3}), [0])
    assert (partly.kind, partly.local) == (VerdictKind.PARTLY_BOUND, False)
    assert partly.explanation == (
        "5 of 8 pages on node 0, the rest on node 1; page cache lies where its first reader ran"
    )
    assert not judge_page_cache(pages({}, untouched=2), [0]).local


def test_ranges_add_up_and_the_worst_method_counts():
    merged = merge([pages({0: 1, 1: 2}, 3, 4), pages({1: 5}, method=Method.NUMA_MAPS)])
    assert (merged.pages, merged.untouched, merged.unknown) == ({0: 1, 1: 7}, 3, 4)
    assert merged.method is Method.NUMA_MAPS
    assert merge([pages({0: 1}), pages({}, unknown=1, method=Method.NONE)]).method is Method.NONE


@pytest.mark.usefixtures("segment")
def test_weights_may_have_several_names(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"w" * 8 * PAGE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        assert memory[::PAGE] == b"w" * 8
        both = process_memory(os.getpid(), (NAME, str(path)))
    assert both.weights_pss == (48 + 8) * PAGE


def test_populating_piece_by_piece_leaves_no_page_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping_module, "_POPULATE_BYTES", 2 * PAGE)
    descriptor = os.memfd_create("populate")
    os.ftruncate(descriptor, 5 * PAGE)
    mapping = Mapping.of_file(descriptor, 5 * PAGE, writable=False)
    assert pages_per_node(mapping.address, mapping.length).untouched == 5
    mapping.populate()
    assert pages_per_node(mapping.address, mapping.length).untouched == 0
    mapping.close()
    os.close(descriptor)
