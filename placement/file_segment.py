"""Weights that stay in the checkpoint's own files: every process maps them, and their page cache is the one copy.

A sealed memfd holds a table of which bytes of which files the tensors are, so that one descriptor is all that a process
needs, as with `placement.segment`. The files cannot be sealed: one that is cut short ends its readers with SIGBUS
(mmap(2)), and one that is written in place changes what is served. So they are compared with the table before use.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping as MappingType
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from placement.mapping import Mapping
from placement.segment import ALL_SEALS, MEMFD_PREFIX, Segment, SegmentError

MAGIC = b"NUMAFILE"
VERSION = 1
LAYOUT = "checkpoint"

_HEADER = struct.Struct("<8sIQ32s")


class WeightsFile(NamedTuple):
    """A file as it was when its contents were hashed. `path` has no symbolic links, as /proc/PID/maps shows it."""

    path: str
    size: int
    device: int
    inode: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, fd: int) -> WeightsFile:
        """The file behind an open descriptor, found at `path`."""
        found = os.fstat(fd)
        return cls(os.path.realpath(path), found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns)

    def change(self) -> str:
        """How what is at `path` now differs, in words; empty when it does not."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            return f"{self.path}: cannot be found any more: {error.strerror}"
        if (found.st_dev, found.st_ino) != (self.device, self.inode):
            return f"{self.path}: another file has taken its place since it was loaded"
        if found.st_size != self.size:
            return f"{self.path}: was {self.size} bytes long when it was loaded, is {found.st_size} now"
        if found.st_mtime_ns != self.mtime_ns:
            return f"{self.path}: was written to since it was loaded"
        return ""


class FilePart(NamedTuple):
    """Bytes of a file, by its number in the table."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FileTensor:
    """One tensor of the decoder. Its rows are those of its parts, one part after the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[FilePart, ...]


@dataclass(frozen=True)
class FileManifest:
    """As `placement.segment.Manifest`, for weights in files."""

    unit: str
    dtype: str
    digest: str
    files: tuple[WeightsFile, ...]
    tensors: tuple[FileTensor, ...]
    layout: str = LAYOUT

    def seal(self) -> int:
        """A read-only descriptor of a sealed memfd that holds this table."""
        table = json.dumps(asdict(self), separators=(",", ":")).encode()
        header = _HEADER.pack(MAGIC, VERSION, len(table), hashlib.sha256(table).digest())
        fd = os.memfd_create(MEMFD_PREFIX + self.unit, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(header + table)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL_SEALS)
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(fd)
        return read_only

    @classmethod
    def read(cls, fd: int) -> FileManifest:
        """Inverse of `seal`. Raises SegmentError when `fd` holds something else."""
        header = os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or header[: len(MAGIC)] != MAGIC:
            raise SegmentError("descriptor does not hold a table of weights in files")
        _, version, length, table_hash = _HEADER.unpack(header)
        if version != VERSION:
            raise SegmentError(f"table of weights has version {version}, this program reads {VERSION}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & ALL_SEALS != ALL_SEALS:
            raise SegmentError("table of weights is not sealed: its contents could still change")
        table = os.pread(fd, length, _HEADER.size)
        if hashlib.sha256(table).digest() != table_hash:
            raise SegmentError("table of weights is damaged: its hash differs")
        fields = json.loads(table)
        files = tuple(WeightsFile(*entry) for entry in fields.pop("files"))
        tensors = tuple(
            FileTensor(
                entry["name"],
                entry["dtype"],
                tuple(entry["shape"]),
                tuple(FilePart(*part) for part in entry["parts"]),
            )
            for entry in fields.pop("tensors")
        )
        return cls(files=files, tensors=tensors, **fields)


def map_file(path: str | Path, fd: int, size: int) -> Mapping:
    """A whole file, read-only. Raises SegmentError where its file system cannot map files."""
    try:
        return Mapping.of_file(fd, size, writable=False)
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        raise SegmentError(
            f"{path}: cannot be mapped ({name}), which --placement shared needs; replicate and interleave do not"
        ) from error


class FileSegment:
    """The checkpoint's files, mapped read-only. Raises SegmentError when one is not what was loaded."""

    data_offset = 0

    def __init__(self, fd: int) -> None:
        self.manifest = FileManifest.read(fd)
        self.length = sum(file.size for file in self.manifest.files)
        self.mappings = tuple(map(self._map, self.manifest.files))

    def _map(self, known: WeightsFile) -> Mapping:
        try:
            fd = os.open(known.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentError(f"{known.path}: cannot be opened: {error.strerror}") from error
        try:
            if WeightsFile.of(Path(known.path), fd) != known:
                raise SegmentError(known.change() or f"{known.path}: changes while it is opened")
            return map_file(known.path, fd, known.size)
        finally:
            os.close(fd)

    def views(self) -> MappingType[str, tuple[memoryview, ...]]:
        """The bytes of each tensor, part by part. A store through one ends the process with SIGSEGV."""
        return {
            tensor.name: tuple(
                self.mappings[part.file].view(part.offset, part.nbytes) for part in tensor.parts
            )
            for tensor in self.manifest.tensors
        }

    @property
    def parameters(self) -> int:
        """Number of scalars in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.manifest.tensors)

    def populate(self) -> None:
        """Fault every page in, reading what is not in the page cache."""
        for mapping in self.mappings:
            mapping.populate()

    def check(self) -> None:
        """Raises SegmentError for a file that changed."""
        changes = [change for file in self.manifest.files if (change := file.change())]
        if changes:
            raise SegmentError("; ".join(changes))

    def close(self) -> None:
        """Unmap. Every view made before is invalid from here on."""
        for mapping in self.mappings:
            mapping.close()


AnySegment = Segment | FileSegment


def open_segment(fd: int) -> AnySegment:
    """What a loader built: weights of their own, or a table of those in files. Raises SegmentError."""
    return FileSegment(fd) if os.pread(fd, len(MAGIC), 0) == MAGIC else Segment(fd)
