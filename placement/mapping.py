"""Memory mappings made by address, so that they can be aligned, bound, advised and verified.

Python's own `mmap` hides the address and its alignment. Sources: mmap(2), madvise(2), prctl(2), memfd_create(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os

HUGE_PAGE = 2 * 1024 * 1024

MADV_HUGEPAGE = 14
MADV_POPULATE_READ = 22
# About 5 ms of work where pages are small. A multiple of the largest page that a mapping is aligned to.
_POPULATE_BYTES = 64 << 20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_PR_SET_VMA = 0x53564D41
_PR_SET_VMA_ANON_NAME = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_char_p]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def _raise_errno(call: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{call}: {os.strerror(code)}")


class Mapping:
    """A mapping of `length` bytes at a 2 MiB aligned address. It must outlive every view and tensor made over it."""

    def __init__(self, address: int, length: int) -> None:
        self.address = address
        self.length = length

    @classmethod
    def of_file(cls, fd: int, length: int, writable: bool) -> Mapping:
        """Map the first `length` bytes of `fd`, shared. Raises OSError where the kernel refuses (EPERM if sealed)."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return cls._map(length, protection, mmap.MAP_SHARED, fd)

    @classmethod
    def anonymous(cls, length: int, name: str) -> Mapping:
        """Private zeroed memory, untouched yet, that smaps shows as an entry of its own.

        The entry carries `name` where the kernel can name it (CONFIG_ANON_VMA_NAME).
        """
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = cls._map(length, protection, flags, -1, guarded=True)
        _libc.prctl(_PR_SET_VMA, _PR_SET_VMA_ANON_NAME, mapping.address, mapping.length, name.encode())
        return mapping

    @classmethod
    def _map(cls, length: int, protection: int, flags: int, fd: int, guarded: bool = False) -> Mapping:
        # Reserve more than is needed, then place the mapping at an aligned address inside: huge pages need it.
        reserved = round_up(length, HUGE_PAGE) + 2 * HUGE_PAGE
        base = _libc.mmap(
            None, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
        )
        if base is None or base == ctypes.c_void_p(-1).value:
            _raise_errno("mmap")
        aligned = round_up(base + mmap.PAGESIZE, HUGE_PAGE)
        end = aligned + round_up(length, mmap.PAGESIZE)
        # A guarded mapping keeps inaccessible neighbours, so that the kernel never merges it with other memory.
        if not guarded:
            _libc.munmap(base, aligned - base)
            _libc.munmap(end, base + reserved - end)
        address = _libc.mmap(aligned, length, protection, flags | _MAP_FIXED, fd, 0)
        if address != aligned:
            code = ctypes.get_errno()
            _libc.munmap(aligned, end - aligned)
            raise OSError(code, f"mmap of {length} bytes: {os.strerror(code)}")
        return cls(aligned, length)

    def view(self, offset: int = 0, length: int | None = None) -> memoryview:
        """Bytes of the mapping. Writing through it where the mapping is read-only ends the process with SIGSEGV."""
        length = self.length - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(
                f"bytes {offset}..{offset + length} lie outside a mapping of {self.length} bytes"
            )
        return memoryview((ctypes.c_char * length).from_address(self.address + offset)).cast("B")

    def advise(self, advice: int) -> bool:
        """madvise(2) over the whole mapping; False where the kernel does not know or refuses the advice."""
        return _libc.madvise(self.address, self.length, advice) == 0

    def populate(self) -> None:
        """Fault every page in for reading, where the kernel can (MADV_POPULATE_READ, Linux 5.14).

        It goes piece by piece: the kernel lets no other thread map memory while it works on one.
        """
        for start in range(0, self.length, _POPULATE_BYTES):
            length = min(_POPULATE_BYTES, self.length - start)
            if _libc.madvise(self.address + start, length, MADV_POPULATE_READ) != 0:
                return

    def close(self) -> None:
        """Unmap. Every view made before is invalid from here on."""
        if self.length and _libc.munmap(self.address, self.length) != 0:
            _raise_errno("munmap")
        self.length = 0
