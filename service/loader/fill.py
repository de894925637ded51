"""Reads a checkpoint into the memory that the decoder will use: converts, joins and hashes in one pass.

Files are read with preadv(2), not mapped: a file that shrinks while it is read is then an error and not a SIGBUS.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from service.loader.checkpoint import CheckpointError, TensorSource
from service.models.weights import ITEM_BYTES, WeightPart, WeightPlan, WeightTensor

_CHUNK_BYTES = 4 << 20
_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class _Copy:
    """One part of a tensor on its way from its file to its place in memory."""

    part: WeightPart
    destination: memoryview
    dtype: str

    def run(self, files: Mapping[Path, int], report: Callable[[int], None]) -> list[list[object]]:
        """Copies the part; returns the digest entries of what was read."""
        source = self.part.source
        if source.nbytes == 0:
            return [digest_entry(source, hashlib.sha256().hexdigest())]
        if _TORCH_DTYPES[source.dtype] == _TORCH_DTYPES[self.dtype]:
            return [digest_entry(source, self._read_in_place(files, report))]
        entries = []
        scale = None
        if self.part.scale is not None:
            scale, digest = _read_whole(files, self.part.scale)
            entries.append(digest_entry(self.part.scale, digest))
        entries.append(digest_entry(source, self._convert(files, report, scale)))
        return entries

    def _read_in_place(self, files: Mapping[Path, int], report: Callable[[int], None]) -> str:
        digest = hashlib.sha256()
        for start in range(0, self.destination.nbytes, _CHUNK_BYTES):
            chunk = self.destination[start : start + _CHUNK_BYTES]
            _read(files, self.part.source, start, chunk)
            digest.update(chunk)
            report(chunk.nbytes)
        return digest.hexdigest()

    def _convert(
        self, files: Mapping[Path, int], report: Callable[[int], None], scale: torch.Tensor | None
    ) -> str:
        source = self.part.source
        columns = source.shape[-1] if source.shape else 1
        row_bytes = source.nbytes // (math.prod(source.shape) // columns)
        rows_at_once = max(1, _CHUNK_BYTES // row_bytes)
        buffer = memoryview(bytearray(min(rows_at_once * row_bytes, source.nbytes)))
        out = torch.frombuffer(self.destination, dtype=_TORCH_DTYPES[self.dtype]).view(-1, columns)
        digest = hashlib.sha256()
        for row in range(0, out.shape[0], rows_at_once):
            target = out[row : row + rows_at_once]
            chunk = buffer[: len(target) * row_bytes]
            _read(files, source, row * row_bytes, chunk)
            digest.update(chunk)
            values = torch.frombuffer(chunk, dtype=_TORCH_DTYPES[source.dtype]).view(-1, columns)
            if scale is None:
                target.copy_(values)
            else:
                target.copy_(values.float() * _scale_rows(scale, self.part.scale_block, row, values.shape))
            if self.dtype == "float16" and not target.isfinite().all():
                raise CheckpointError(
                    source.file, f"tensor {source.name} has values that float16 cannot hold"
                )
            report(target.nbytes)
        return digest.hexdigest()


def fill(
    plan: WeightPlan,
    destinations: Mapping[str, memoryview],
    threads: int,
    on_progress: Callable[[int], None],
) -> str:
    """Fills `destinations[name]`, a writable view of `nbytes` bytes for each tensor of the plan; returns the content digest.

    The digest is the SHA-256, in hexadecimal, of the JSON list of [name, dtype, shape, SHA-256 of the bytes] of the
    checkpoint tensors that were read, sorted by name: files that hold the same tensors agree however they are sharded.
    `on_progress` gets the bytes of the plan filled since its last call; calls come from several threads, one at a time.
    Each thread holds a few chunks of 4 MiB at most.
    Raises CheckpointError when a file is cut short or cannot be read.
    """
    copies = [copy for tensor in plan.tensors for copy in _copies_of(tensor, destinations[tensor.name])]
    copies.sort(key=lambda copy: copy.part.source.nbytes, reverse=True)
    lock = threading.Lock()

    def report(filled: int) -> None:
        with lock:
            on_progress(filled)

    with contextlib.ExitStack() as stack:
        files = _open_files(copies, stack)
        # The pool is the parallelism: a conversion must not start threads of its own, nor off the pool's CPUs.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="fill"))
        stack.callback(pool.shutdown, cancel_futures=True)
        jobs = [pool.submit(copy.run, files, report) for copy in copies]
        digests = [digest for job in jobs for digest in job.result()]
    return content_digest(digests)


def _open_files(copies: Sequence[_Copy], stack: contextlib.ExitStack) -> dict[Path, int]:
    files: dict[Path, int] = {}
    for copy in copies:
        for source in (copy.part.source, copy.part.scale):
            if source is not None and source.file not in files:
                try:
                    files[source.file] = os.open(source.file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(source.file, f"cannot be read: {error.strerror}") from error
                stack.callback(os.close, files[source.file])
    return files


def _copies_of(tensor: WeightTensor, destination: memoryview) -> list[_Copy]:
    """One copy for each part, with its own stretch of the tensor's memory."""
    view = destination.cast("B")
    if view.nbytes != tensor.nbytes or view.readonly:
        raise ValueError(
            f"destination of {tensor.name}: {view.nbytes} bytes, wanted {tensor.nbytes} writable ones"
        )
    copies, start = [], 0
    for part in tensor.parts:
        size = math.prod(part.source.shape) * ITEM_BYTES[tensor.dtype]
        copies.append(_Copy(part, view[start : start + size], tensor.dtype))
        start += size
    return copies


def _read(files: Mapping[Path, int], source: TensorSource, start: int, buffer: memoryview) -> None:
    """Fills `buffer` from byte `start` of the tensor on."""
    done = 0
    while done < buffer.nbytes:
        try:
            count = os.preadv(files[source.file], [buffer[done:]], source.offset + start + done)
        except OSError as error:
            raise CheckpointError(source.file, f"cannot be read: {error.strerror}") from error
        if count == 0:
            raise CheckpointError(source.file, f"was truncated while tensor {source.name} was read")
        done += count


def _read_whole(files: Mapping[Path, int], source: TensorSource) -> tuple[torch.Tensor, str]:
    data = bytearray(source.nbytes)
    _read(files, source, 0, memoryview(data))
    values = torch.frombuffer(data, dtype=_TORCH_DTYPES[source.dtype]).view(source.shape).float()
    return values, hashlib.sha256(data).hexdigest()


def _scale_rows(
    scale: torch.Tensor, block: tuple[int, int] | None, row: int, shape: torch.Size
) -> torch.Tensor:
    """The scales of `shape[0]` rows from `row` on, broadcastable to `shape`."""
    if scale.numel() == 1:
        return scale.view(1, 1)
    if block is None:
        return scale.view(-1, 1)[row : row + shape[0]]
    by_row = scale[torch.arange(row, row + shape[0]) // block[0]]
    return by_row.repeat_interleave(block[1], dim=1)[:, : shape[1]]


def content_digest(entries: list[list[object]]) -> str:
    """The digest of a checkpoint from the entries of its tensors, in any order; see `fill`."""
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()


def digest_entry(source: TensorSource, digest: str) -> list[object]:
    """What one tensor adds to the digest; `digest` is the SHA-256 of its bytes."""
    return [source.name, source.dtype, list(source.shape), digest]
