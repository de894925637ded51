"""NUMA memory policy by system call, under the names of mbind(2), set_mempolicy(2), get_mempolicy(2),
move_pages(2) and migrate_pages(2). No libnuma is needed.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MPOL_DEFAULT = 0
MPOL_PREFERRED = 1
MPOL_BIND = 2
MPOL_INTERLEAVE = 3
MPOL_LOCAL = 4
MPOL_PREFERRED_MANY = 5

MPOL_F_STATIC_NODES = 1 << 15
MPOL_F_RELATIVE_NODES = 1 << 14
MPOL_F_NUMA_BALANCING = 1 << 13

MPOL_F_NODE = 1 << 0
MPOL_F_ADDR = 1 << 1
MPOL_F_MEMS_ALLOWED = 1 << 2

MPOL_MF_STRICT = 1 << 0
MPOL_MF_MOVE = 1 << 1
MPOL_MF_MOVE_ALL = 1 << 2

CALLS = ("mbind", "set_mempolicy", "get_mempolicy", "move_pages", "migrate_pages")

_GENERIC = {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239}
_NUMBERS = {
    "x86_64": {
        "mbind": 237,
        "set_mempolicy": 238,
        "get_mempolicy": 239,
        "migrate_pages": 256,
        "move_pages": 279,
    },
    "ppc64le": {
        "migrate_pages": 258,
        "mbind": 259,
        "get_mempolicy": 260,
        "set_mempolicy": 261,
        "move_pages": 301,
    },
    "s390x": {
        "mbind": 268,
        "get_mempolicy": 269,
        "set_mempolicy": 270,
        "migrate_pages": 287,
        "move_pages": 310,
    },
    "aarch64": _GENERIC,
    "riscv64": _GENERIC,
    "loongarch64": _GENERIC,
}

_BITS_PER_LONG = 8 * ctypes.sizeof(ctypes.c_ulong)
# get_mempolicy answers EINVAL for a mask smaller than the kernel's own, which has 1024 bits at most.
_MAX_NODES = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

_refused: dict[str, int] = {}


class NumaCallError(OSError):
    """A NUMA system call that failed. `call` is its name, `errno` the kernel's answer."""

    def __init__(self, call: str, code: int):
        super().__init__(code, f"{call}: {os.strerror(code)}")
        self.call = call


@dataclass(frozen=True)
class MemoryPolicy:
    """A policy as get_mempolicy reports it: mode (with its mode flags) and nodes."""

    mode: int
    nodes: tuple[int, ...]


def syscall_number(call: str, machine: str | None = None) -> int | None:
    """The system call's number on `machine` (this one where None), None where the machine is unknown."""
    if machine is None:
        # A 32-bit interpreter on a 64-bit kernel enters another table.
        machine = platform.machine() if sys.maxsize > 2**32 else "32-bit"
    return _NUMBERS.get({"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine), {}).get(call)


def mbind(address: int, length: int, mode: int, nodes: Iterable[int] = (), flags: int = 0) -> None:
    """Set the policy of the pages in [address, address + length); `address` must be page aligned. Raises
    NumaCallError.

    For a shared mapping the policy belongs to the file: every process that maps it obeys.
    """
    mask, maxnode = _mask(nodes)
    _call(
        "mbind",
        ctypes.c_ulong(address),
        ctypes.c_ulong(length),
        ctypes.c_long(mode),
        mask,
        ctypes.c_ulong(maxnode),
        ctypes.c_ulong(flags),
    )


def set_mempolicy(mode: int, nodes: Iterable[int] = ()) -> None:
    """Set the calling thread's policy for memory that has none of its own. Raises NumaCallError."""
    mask, maxnode = _mask(nodes)
    _call("set_mempolicy", ctypes.c_long(mode), mask, ctypes.c_ulong(maxnode))


def get_mempolicy(address: int | None = None, flags: int = 0) -> MemoryPolicy:
    """The calling thread's policy, or with `address` the policy of the memory there. Raises NumaCallError.

    With MPOL_F_MEMS_ALLOWED `nodes` are those that policies may name. With MPOL_F_NODE | MPOL_F_ADDR `mode`
    is the node of the page at `address`.
    """
    mode = ctypes.c_int(0)
    mask = (ctypes.c_ulong * (_MAX_NODES // _BITS_PER_LONG))()
    if address is not None:
        flags |= MPOL_F_ADDR
    _call(
        "get_mempolicy",
        ctypes.byref(mode),
        mask,
        ctypes.c_ulong(_MAX_NODES + 1),
        ctypes.c_void_p(address),
        ctypes.c_ulong(flags),
    )
    return MemoryPolicy(mode.value, _nodes_in(mask))


def move_pages(
    addresses: Sequence[int], nodes: Sequence[int] | None = None, pid: int = 0, flags: int = MPOL_MF_MOVE
) -> Sequence[int]:
    """Move the page at each address to the node beside it, or ask where each page is when `nodes` is None.

    Returns one status per page: its node, or a negative errno (-ENOENT: not present in this mapping, -EFAULT:
    a zero page or nothing mapped, -EACCES: other processes map it too). Raises NumaCallError, ValueError
    where the lengths differ.
    """
    if nodes is not None and len(nodes) != len(addresses):
        raise ValueError(f"move_pages: {len(addresses)} addresses but {len(nodes)} nodes")
    if not addresses:
        return array.array("i")
    pages = array.array("Q", addresses)
    targets = None if nodes is None else array.array("i", nodes)
    # A status that the kernel does not get to write must not read as node 0.
    status = array.array("i", [-errno.ENOENT]) * len(pages)
    _call(
        "move_pages",
        ctypes.c_int(pid),
        ctypes.c_ulong(len(pages)),
        ctypes.c_void_p(pages.buffer_info()[0]),
        ctypes.c_void_p(None if targets is None else targets.buffer_info()[0]),
        ctypes.c_void_p(status.buffer_info()[0]),
        ctypes.c_int(0 if targets is None else flags),
    )
    return status


def migrate_pages(old_nodes: Iterable[int], new_nodes: Iterable[int], pid: int = 0) -> int:
    """Move all pages of a process from the old nodes to the new. Returns the number that could not be moved.

    Raises NumaCallError.
    """
    old, new = sorted(set(old_nodes)), sorted(set(new_nodes))
    highest = max([*old, *new], default=0)
    old_mask, maxnode = _mask(old, highest)
    new_mask, _ = _mask(new, highest)
    return _call("migrate_pages", ctypes.c_int(pid), ctypes.c_ulong(maxnode), old_mask, new_mask)


@contextlib.contextmanager
def refusing(**errnos: int) -> Iterator[None]:
    """Make the named calls fail with the given errno instead of entering the kernel, in this process and
    those it forks.

    For tests of what happens where a container refuses them: `with refusing(mbind=errno.EPERM): ...`.
    """
    unknown = set(errnos) - set(CALLS)
    if unknown:
        raise ValueError(f"not a NUMA system call: {', '.join(sorted(unknown))}")
    before = dict(_refused)
    _refused.update(errnos)
    try:
        yield
    finally:
        _refused.clear()
        _refused.update(before)


def _call(call: str, *arguments: object) -> int:
    if call in _refused:
        raise NumaCallError(call, _refused[call])
    number = syscall_number(call)
    if number is None:
        raise NumaCallError(call, errno.ENOSYS)
    ctypes.set_errno(0)
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise NumaCallError(call, ctypes.get_errno())
    return result


def _mask(nodes: Iterable[int], highest: int | None = None) -> tuple[object, int]:
    """A node mask and its `maxnode`. The kernel reads maxnode - 1 bits, so one more than the mask holds is
    passed.
    """
    members = set(nodes)
    if not members and highest is None:
        return ctypes.c_void_p(None), 0
    if any(node < 0 or node >= _MAX_NODES for node in members):
        raise ValueError(f"node ids must lie in 0..{_MAX_NODES - 1}, got {sorted(members)}")
    top = max(members) if highest is None else highest
    longs = top // _BITS_PER_LONG + 1
    mask = (ctypes.c_ulong * longs)()
    for node in members:
        mask[node // _BITS_PER_LONG] |= 1 << (node % _BITS_PER_LONG)
    return mask, longs * _BITS_PER_LONG + 1


def _nodes_in(mask: Iterable[int]) -> tuple[int, ...]:
    return tuple(
        word * _BITS_PER_LONG + bit
        for word, bits in enumerate(mask)
        for bit in range(_BITS_PER_LONG)
        if bits >> bit & 1
    )
