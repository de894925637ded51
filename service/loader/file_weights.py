"""`--placement shared`: the checkpoint's files themselves are the weights, read into the page cache and mapped by all.

Where page cache lies is up to whoever reads a file first, whatever policy is set on a mapping (mbind(2)). Pages that an
earlier reader left on another node are dropped and read again here, which works while nobody has them mapped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from placement.file_segment import (
    FileManifest,
    FilePart,
    FileSegment,
    FileTensor,
    WeightsFile,
    map_file,
)
from placement.mapping import MADV_POPULATE_READ, Mapping
from placement.residency import Residency, Verdict, judge_page_cache, merge, pages_per_node
from service.loader.as_stored import stored_parts
from service.loader.checkpoint import CheckpointError, TensorSource
from service.loader.fill import content_digest
from service.loader.part_reader import CHUNK_BYTES, digest_entry, open_files, read
from service.models.weights import WeightPlan
from service.ops.torch_ops import Weight


@dataclass(frozen=True)
class SharedFiles:
    """What came of it. `fd` is the sealed table; `dropped` counts misplaced pages of which the page cache was freed."""

    fd: int
    manifest: FileManifest
    verdict: Verdict
    residency: Residency
    dropped: int

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.manifest.files)


def share_files(
    unit: str,
    memory_nodes: tuple[int, ...],
    plan: WeightPlan,
    threads: int,
    on_progress: Callable[[int], None],
) -> SharedFiles:
    """Read every tensor's file on this unit's CPUs, hash contents, and say where the page cache is.

    `on_progress` gets the bytes hashed since its last call. Raises CheckpointError for a file that cannot be read or
    changes meanwhile, SegmentError for one that cannot be mapped.
    """
    paths = sorted({part.source.file for tensor in plan.tensors for part in stored_parts(tensor)})
    with contextlib.ExitStack() as stack:
        descriptors = open_files(paths, stack)
        files = tuple(WeightsFile.of(path, fd) for path, fd in descriptors.items())
        sources = [part.source for tensor in plan.tensors for part in stored_parts(tensor)]
        digest = _hash(sources, descriptors, threads, on_progress)
        residency, dropped = _settle(descriptors, memory_nodes)
        for path, file in zip(paths, files, strict=True):
            if file.change():
                raise CheckpointError(path, "changed while it was loaded")
    numbers = {path: number for number, path in enumerate(paths)}
    tensors = tuple(
        FileTensor(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            tuple(
                FilePart(numbers[part.source.file], part.source.offset, part.source.nbytes)
                for part in stored_parts(tensor)
            ),
        )
        for tensor in plan.tensors
    )
    manifest = FileManifest(unit, plan.dtype, digest, files, tensors)
    verdict = judge_page_cache(residency, memory_nodes)
    return SharedFiles(manifest.seal(), manifest, verdict, residency, dropped)


def file_tensors(segment: FileSegment) -> dict[str, Weight]:
    """The decoder's weights over mapped files. Of vectors in several parts, which biases are, a joined copy is made."""
    views = segment.views()
    weights: dict[str, Weight] = {}
    for tensor in segment.manifest.tensors:
        dtype, columns = getattr(torch, tensor.dtype), tensor.shape[1:][-1:]
        parts = [torch.frombuffer(view, dtype=dtype).view(-1, *columns) for view in views[tensor.name]]
        if len(parts) == 1:
            weights[tensor.name] = parts[0].view(tensor.shape)
        elif len(tensor.shape) == 1:
            weights[tensor.name] = torch.cat(parts)
        elif len(tensor.shape) == 2:
            weights[tensor.name] = tuple(parts)
        else:
            each = len(parts) // tensor.shape[0]
            experts = [tuple(parts[start : start + each]) for start in range(0, len(parts), each)]
            weights[tensor.name] = tuple(expert if each > 1 else expert[0] for expert in experts)
    return weights


def _hash(
    sources: list[TensorSource],
    descriptors: dict[Path, int],
    threads: int,
    on_progress: Callable[[int], None],
) -> str:
    """The digest of contents, as `service.loader.fill.fill` defines it."""

    def entry(source: TensorSource) -> list[object]:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(CHUNK_BYTES, source.nbytes)))
        for start in range(0, source.nbytes, CHUNK_BYTES):
            chunk = buffer[: source.nbytes - start]
            read(descriptors, source, start, chunk)
            digest.update(chunk)
        return digest_entry(source, digest.hexdigest())

    entries = []
    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        # In the order of the files, so that a disk reads them from start to end.
        ordered = sorted(sources, key=lambda source: (source.file, source.offset))
        for source, hashed in zip(ordered, pool.map(entry, ordered), strict=True):
            entries.append(hashed)
            on_progress(source.nbytes)
    return content_digest(entries)


def _settle(descriptors: dict[Path, int], memory_nodes: tuple[int, ...]) -> tuple[Residency, int]:
    """Where the files' page cache is in the end, and how many misplaced pages were dropped for it."""
    residencies, dropped = [], 0
    for path, fd in descriptors.items():
        residency = _look(path, fd)
        misplaced = residency.present - residency.on(memory_nodes)
        if misplaced:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            residency = _look(path, fd)
            dropped += misplaced - (residency.present - residency.on(memory_nodes))
        residencies.append(residency)
    return merge(residencies), dropped


def _look(path: Path, fd: int) -> Residency:
    """Read a file into the page cache through a mapping, and count its pages by node."""
    with _mapped(path, fd) as mapping:
        mapping.advise(MADV_POPULATE_READ)
        return pages_per_node(mapping.address, mapping.length)


@contextlib.contextmanager
def _mapped(path: Path, fd: int) -> Iterator[Mapping]:
    mapping = map_file(path, fd, os.fstat(fd).st_size)
    try:
        yield mapping
    finally:
        mapping.close()
