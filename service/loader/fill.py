"""Reads a checkpoint into the memory that the decoder will use: converts, joins, packs and hashes in one pass."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from service.loader.integer_reader import IntegerReader
from service.loader.packer import Packer
from service.loader.part_reader import TORCH_DTYPES, PartReader, open_files
from service.models.integers import IntegerPart
from service.models.weights import ITEM_BYTES, WeightPart, WeightPlan, WeightTensor


@dataclass(frozen=True)
class _Copy:
    """One part of a tensor that is not packed, on its way from its file to its place in memory."""

    part: WeightPart
    destination: memoryview
    dtype: str

    @property
    def parts(self) -> tuple[WeightPart | IntegerPart, ...]:
        return (self.part,)

    def run(self, files: Mapping[Path, int], report: Callable[[int], None]) -> list[list[object]]:
        """Copies the part; returns the digest entries of what was read."""
        reader = PartReader(self.part, self.dtype, files)
        if TORCH_DTYPES[self.part.source.dtype] == TORCH_DTYPES[self.dtype]:
            for size in reader.copy(self.destination):
                report(size)
        else:
            start = 0
            for rows in reader.rows():
                place = self.destination[start : start + rows.nbytes]
                torch.frombuffer(place, dtype=rows.dtype).view(rows.shape).copy_(rows)
                start += rows.nbytes
                report(rows.nbytes)
        return reader.digests


@dataclass(frozen=True)
class _Pack:
    """A tensor that is packed: its parts one after the other, because rows of two can share a panel."""

    tensor: WeightTensor
    destination: memoryview

    @property
    def parts(self) -> tuple[WeightPart | IntegerPart, ...]:
        return self.tensor.parts

    def run(self, files: Mapping[Path, int], report: Callable[[int], None]) -> list[list[object]]:
        """Packs the tensor; returns the digest entries of what was read."""
        tensor, digests = self.tensor, []
        packer = Packer(tensor, self.destination)
        for part in tensor.parts:
            reader = (
                IntegerReader(part, files)
                if isinstance(part, IntegerPart)
                else PartReader(part, tensor.dtype, files)
            )
            for rows in reader.rows(packer.row_multiple):
                report(packer.add(rows))
            digests += reader.digests
        return digests


def fill(
    plan: WeightPlan,
    destinations: Mapping[str, memoryview],
    threads: int,
    on_progress: Callable[[int], None],
) -> str:
    """Fills `destinations[name]`, a writable view of `nbytes` bytes for each tensor of the plan; returns the content digest.

    The digest is the SHA-256, in hexadecimal, of the JSON list of [name, dtype, shape, SHA-256 of the bytes] of the
    checkpoint tensors that were read, sorted by name: files that hold the same tensors agree however they are sharded,
    and whatever they are converted to.
    `on_progress` gets the bytes of the plan filled since its last call; calls come from several threads, one at a time.
    Each thread holds a few chunks of 4 MiB at most; of a matrix of integers also its scales and zero points, and up to
    16 chunks where its file has the columns one after the other.
    Raises CheckpointError when a file is cut short or cannot be read.
    """
    jobs = [job for tensor in plan.tensors for job in _jobs_of(tensor, destinations[tensor.name])]
    jobs.sort(key=lambda job: sum(part.sources[0].nbytes for part in job.parts), reverse=True)
    lock = threading.Lock()

    def report(filled: int) -> None:
        with lock:
            on_progress(filled)

    with contextlib.ExitStack() as stack:
        sources = (source for job in jobs for part in job.parts for source in part.sources)
        files = open_files((source.file for source in sources), stack)
        # The pool is the parallelism: a conversion must not start threads of its own, nor off the pool's CPUs.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="fill"))
        stack.callback(pool.shutdown, cancel_futures=True)
        running = [pool.submit(job.run, files, report) for job in jobs]
        digests = [digest for job in running for digest in job.result()]
    return content_digest(digests)


def _jobs_of(tensor: WeightTensor, destination: memoryview) -> Sequence[_Copy | _Pack]:
    """What fills a tensor's memory: each part has its own stretch of it, unless they are packed."""
    view = destination.cast("B")
    if view.nbytes != tensor.nbytes or view.readonly:
        raise ValueError(
            f"destination of {tensor.name}: {view.nbytes} bytes, wanted {tensor.nbytes} writable ones"
        )
    if tensor.packing:
        return [_Pack(tensor, view)]
    copies, start = [], 0
    for part in tensor.parts:
        if isinstance(part, IntegerPart):
            raise ValueError(f"{tensor.name}: whole numbers can only be packed")
        size = math.prod(part.source.shape) * ITEM_BYTES[tensor.dtype]
        copies.append(_Copy(part, view[start : start + size], tensor.dtype))
        start += size
    return copies


def content_digest(entries: list[list[object]]) -> str:
    """The digest of a checkpoint from the entries of its tensors, in any order; see `fill`."""
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()
