"""A segment: one block of weights in a sealed memfd that outlives every process that uses it.

Layout: a fixed header, the manifest as JSON, then the tensors from a 2 MiB aligned offset on, each aligned to 64 bytes.
The file describes itself, so that its descriptor is all that a process needs. Sources: memfd_create(2), fcntl(2) on seals.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable
from collections.abc import Mapping as MappingType
from dataclasses import asdict, dataclass

from placement.mapping import HUGE_PAGE, MADV_HUGEPAGE, Mapping, round_up

MAGIC = b"NUMASEG\x00"
VERSION = 1
MEMFD_PREFIX = "numaserve-weights-"
TENSOR_ALIGNMENT = 64

_HEADER = struct.Struct("<8sIIQQQ32s")
ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
# JSON of the digest and the verdict is written after the tensors are laid out; this much is kept free for it.
_MANIFEST_SLACK = 4096


class SegmentError(ValueError):
    """A descriptor that does not hold a segment of this version, or one whose manifest is damaged."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be laid out. `dtype` is a torch name such as "bfloat16"; `nbytes` its size in the segment.

    `packing` and `group` are the backend's words for the arrangement of its bytes; "" is row after row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    packing: str = ""
    group: int = 0


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a segment; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    packing: str = ""
    group: int = 0


@dataclass(frozen=True)
class Manifest:
    """What a segment holds: `digest` is over the checkpoint's contents, `layout` names the backend's arrangement of them.

    `dtype` is the type of most of its bytes.
    """

    unit: str
    layout: str
    dtype: str
    digest: str
    tensors: tuple[TensorEntry, ...]

    def to_json(self) -> bytes:
        """UTF-8 JSON, as stored in the segment."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Inverse of `to_json`; raises SegmentError on anything else."""
        try:
            fields = json.loads(data)
            tensors = tuple(
                TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in fields.pop("tensors")
            )
            return cls(tensors=tensors, **fields)
        except (ValueError, KeyError, TypeError) as error:
            raise SegmentError(f"segment manifest is damaged: {error}") from error


def _lay_out(tensors: Iterable[TensorSpec]) -> tuple[int, list[TensorEntry], int]:
    """Offsets for tensors: (offset of the data, entries, total length of the file)."""
    specs = list(tensors)
    described = sum(len(spec.name) + 24 * len(spec.shape) + 192 for spec in specs)
    data_offset = round_up(_HEADER.size + described + _MANIFEST_SLACK, HUGE_PAGE)
    entries, cursor = [], data_offset
    for spec in specs:
        entries.append(
            TensorEntry(spec.name, spec.dtype, spec.shape, cursor, spec.nbytes, spec.packing, spec.group)
        )
        cursor = round_up(cursor + spec.nbytes, TENSOR_ALIGNMENT)
    return data_offset, entries, max(round_up(cursor, os.sysconf("SC_PAGESIZE")), data_offset)


class SegmentBuilder:
    """A segment that is being filled. Bind `mapping` to nodes first, write through `destinations`, then `seal`."""

    def __init__(self, unit: str, layout: str, dtype: str, tensors: Iterable[TensorSpec]) -> None:
        self.unit = unit
        self.layout = layout
        self.dtype = dtype
        self.data_offset, self._entries, self.length = _lay_out(tensors)
        self._fd = os.memfd_create(MEMFD_PREFIX + unit, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, self.length)
        self.mapping = Mapping.of_file(self._fd, self.length, writable=True)
        self.huge_pages_advised = self.mapping.advise(MADV_HUGEPAGE)

    @property
    def data_length(self) -> int:
        """Bytes from the first tensor to the end: what placement is judged by."""
        return self.length - self.data_offset

    def destinations(self) -> dict[str, memoryview]:
        """A writable view per tensor. They are invalid once the segment is sealed."""
        return {entry.name: self.mapping.view(entry.offset, entry.nbytes) for entry in self._entries}

    def seal(self, digest: str) -> int:
        """Write the manifest, unmap, seal against every change, and return a read-only descriptor.

        Raises OSError (EBUSY) when another writable mapping is left.
        """
        manifest = Manifest(self.unit, self.layout, self.dtype, digest, tuple(self._entries)).to_json()
        if _HEADER.size + len(manifest) > self.data_offset:
            raise SegmentError(f"manifest of {len(manifest)} bytes does not fit before the tensors")
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            _HEADER.size,
            len(manifest),
            self.data_offset,
            self.length,
            hashlib.sha256(manifest).digest(),
        )
        self.mapping.view(0, _HEADER.size)[:] = header
        self.mapping.view(_HEADER.size, len(manifest))[:] = manifest
        self.mapping.close()
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, ALL_SEALS)
        # Before Linux 6.7 a sealed memfd can be mapped shared only through a descriptor that is not open for writing.
        read_only = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(self._fd)
        return read_only


class Segment:
    """A sealed segment, mapped read-only. Raises SegmentError when `fd` holds something else."""

    def __init__(self, fd: int) -> None:
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or header[: len(MAGIC)] != MAGIC:
            raise SegmentError("descriptor does not hold a numaserve segment")
        _, version, manifest_offset, manifest_length, data_offset, length, manifest_hash = _HEADER.unpack(
            header
        )
        if version != VERSION:
            raise SegmentError(f"segment has version {version}, this program reads version {VERSION}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & ALL_SEALS != ALL_SEALS:
            raise SegmentError("segment is not sealed: its contents could still change")
        if os.fstat(fd).st_size != length:
            raise SegmentError(f"segment is {os.fstat(fd).st_size} bytes long, its header says {length}")
        manifest = os.pread(fd, manifest_length, manifest_offset)
        if hashlib.sha256(manifest).digest() != manifest_hash:
            raise SegmentError("segment manifest is damaged: its hash differs")
        self.manifest = Manifest.from_json(manifest)
        self.length = length
        self.data_offset = data_offset
        self.mapping = Mapping.of_file(fd, length, writable=False)

    def views(self) -> MappingType[str, memoryview]:
        """The bytes of each tensor. A store through one ends the process with SIGSEGV."""
        return {entry.name: self.mapping.view(entry.offset, entry.nbytes) for entry in self.manifest.tensors}

    @property
    def parameters(self) -> int:
        """Number of scalars in all tensors."""
        return sum(math.prod(entry.shape) for entry in self.manifest.tensors)

    def populate(self) -> None:
        """Fault every page in: what follows then waits for none, and each process can be asked where they are."""
        self.mapping.populate()

    def check(self) -> None:
        """Nothing of it can have changed: it is sealed."""

    def close(self) -> None:
        """Unmap. Every view made before is invalid from here on."""
        self.mapping.close()
