import ctypes
import errno
import mmap
import os
import subprocess
import sys

import pytest

from placement import numa

PAGE = mmap.PAGESIZE


@pytest.fixture
def scratch():
    """Four untouched private pages and their address."""
    memory = mmap.mmap(-1, 4 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = ctypes.c_char.from_buffer(memory)
    yield memory, ctypes.addressof(view)
    del view
    memory.close()


@pytest.fixture
def own_policy():
    before = numa.get_mempolicy()
    yield
    numa.set_mempolicy(before.mode, before.nodes)


def own_node():
    return numa.get_mempolicy(flags=numa.MPOL_F_MEMS_ALLOWED).nodes[0]


def test_mbind_is_what_get_mempolicy_then_reports(scratch):
    _, address = scratch
    numa.mbind(address, 2 * PAGE, numa.MPOL_BIND, [own_node()])
    assert numa.get_mempolicy(address) == numa.MemoryPolicy(numa.MPOL_BIND, (own_node(),))
    assert numa.get_mempolicy(address + 2 * PAGE).mode == numa.MPOL_DEFAULT


@pytest.mark.usefixtures("own_policy")
def test_set_mempolicy_is_what_get_mempolicy_then_reports():
    numa.set_mempolicy(numa.MPOL_INTERLEAVE, [own_node()])
    assert numa.get_mempolicy() == numa.MemoryPolicy(numa.MPOL_INTERLEAVE, (own_node(),))
    numa.set_mempolicy(numa.MPOL_DEFAULT)
    assert numa.get_mempolicy() == numa.MemoryPolicy(numa.MPOL_DEFAULT, ())


def test_move_pages_reports_node_of_touched_and_an_error_for_untouched_pages(scratch):
    memory, address = scratch
    memory[0] = 1
    first, second = numa.move_pages([address, address + PAGE])
    assert first in numa.get_mempolicy(flags=numa.MPOL_F_MEMS_ALLOWED).nodes
    # Which of the two depends on whether a page table exists there already.
    assert second in (-errno.ENOENT, -errno.EFAULT)
    assert list(numa.move_pages([address], [own_node()])) == [own_node()]
    assert list(numa.move_pages([])) == []


def test_move_pages_wants_a_node_for_each_address(scratch):
    with pytest.raises(ValueError, match="2 addresses but 1 nodes"):
        numa.move_pages([scratch[1], scratch[1] + PAGE], [0])


def test_migrate_pages_to_the_node_where_they_are_leaves_none():
    assert numa.migrate_pages([own_node()], [own_node()]) == 0


@pytest.mark.parametrize("node", [63, 64, 65, 127, 128, 1023])
def test_a_node_that_is_absent_is_refused_whatever_word_of_the_mask_it_is_in(scratch, node):
    with pytest.raises(numa.NumaCallError) as caught:
        numa.mbind(scratch[1], PAGE, numa.MPOL_BIND, [node])
    assert (caught.value.call, caught.value.errno) == ("mbind", errno.EINVAL)


@pytest.mark.parametrize("node", [0, 1, 62, 63, 64, 127, 1023])
def test_maxnode_counts_one_more_bit_than_the_kernel_reads(node):
    mask, maxnode = numa._mask([node])
    # get_nodes() in mm/mempolicy.c decrements maxnode before it reads.
    assert node < maxnode - 1
    assert (maxnode - 1) % 64 == 0
    assert numa._nodes_in(mask) == (node,)


def test_node_ids_beyond_any_kernel_are_a_value_error(scratch):
    with pytest.raises(ValueError, match="1024"):
        numa.mbind(scratch[1], PAGE, numa.MPOL_BIND, [1024])


@pytest.mark.parametrize("call", numa.CALLS)
@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_each_call_can_be_refused_by_itself(scratch, call, code):
    _, address = scratch
    actions = {
        "mbind": lambda: numa.mbind(address, PAGE, numa.MPOL_BIND, [own_node()]),
        "set_mempolicy": lambda: numa.set_mempolicy(numa.MPOL_DEFAULT),
        "get_mempolicy": lambda: numa.get_mempolicy(),
        "move_pages": lambda: numa.move_pages([address]),
        "migrate_pages": lambda: numa.migrate_pages([0], [0]),
    }
    with numa.refusing(**{call: code}), pytest.raises(OSError, match=call) as caught:
        actions[call]()
    assert caught.value.errno == code
    actions[call]()


def test_refusing_an_unknown_call_is_an_error():
    with pytest.raises(ValueError, match="mlock"), numa.refusing(mlock=errno.EPERM):
        pass


@pytest.mark.parametrize(
    ("machine", "mbind", "move_pages"),
    [
        ("x86_64", 237, 279),
        ("aarch64", 235, 239),
        ("arm64", 235, 239),
        ("riscv64", 235, 239),
        ("s390x", 268, 310),
    ],
)
def test_system_call_numbers(machine, mbind, move_pages):
    assert numa.syscall_number("mbind", machine) == mbind
    assert numa.syscall_number("move_pages", machine) == move_pages


def test_an_unknown_machine_answers_enosys(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "vax")
    with pytest.raises(OSError, match="get_mempolicy") as caught:
        numa.get_mempolicy()
    assert caught.value.errno == errno.ENOSYS


def test_what_the_topology_script_imports_is_standard_library_alone():
    code = (
        "import sys; before = set(sys.modules); import placement.topology_report;"
        "names = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(names - set(sys.stdlib_module_names) - {'placement'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
