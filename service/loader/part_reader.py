"""Reads a checkpoint tensor piece by piece: converts, scales and hashes on the way.

Files are read with preadv(2), not mapped: a file that shrinks while it is read is then an error and not a SIGBUS.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from service.loader.checkpoint import CheckpointError, TensorSource
from service.models.weights import WeightPart

CHUNK_BYTES = 4 << 20
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class PartReader:
    """One part on its way to the decoder, as `dtype`; `digests` tell what was read, once it all was."""

    def __init__(self, part: WeightPart, dtype: str, files: Mapping[Path, int]) -> None:
        self._part = part
        self._dtype = TORCH_DTYPES[dtype]
        self._files = files
        self.digests: list[list[object]] = []

    def copy(self, destination: memoryview) -> Iterator[int]:
        """Reads bytes that need no conversion to where they belong; yields how many came with each chunk."""
        source, digest = self._part.source, hashlib.sha256()
        for start in range(0, destination.nbytes, CHUNK_BYTES):
            chunk = destination[start : start + CHUNK_BYTES]
            read(self._files, source, start, chunk)
            digest.update(chunk)
            yield chunk.nbytes
        self.digests.append(digest_entry(source, digest.hexdigest()))

    def rows(self, multiple: int = 1) -> Iterator[torch.Tensor]:
        """The part's rows in order, as chunks [rows, columns]; a multiple of rows in each but the last.

        A chunk is valid until the next is asked for. Raises CheckpointError for a file that is cut short, and for values
        that float16 cannot hold.
        """
        source, scale = self._part.source, self._read_scale()
        columns = source.shape[-1] if source.shape else 1
        count = math.prod(source.shape) // columns if columns else 0
        row_bytes = source.nbytes // max(count, 1)
        at_once = max(1, CHUNK_BYTES // max(row_bytes, 1) // multiple) * multiple
        buffer = memoryview(bytearray(min(at_once, count) * row_bytes))
        digest = hashlib.sha256()
        for row in range(0, count, at_once):
            chunk = buffer[: min(at_once, count - row) * row_bytes]
            read(self._files, source, row * row_bytes, chunk)
            digest.update(chunk)
            values = torch.frombuffer(chunk, dtype=TORCH_DTYPES[source.dtype]).view(-1, columns)
            if scale is not None:
                values = values.float() * _scale_rows(scale, self._part.scale_block, row, values.shape)
            narrowed = self._dtype is torch.float16 and values.dtype is not torch.float16
            values = values.to(self._dtype)
            if narrowed and not values.isfinite().all():
                raise CheckpointError(
                    source.file, f"tensor {source.name} has values that float16 cannot hold"
                )
            yield values
        self.digests.append(digest_entry(source, digest.hexdigest()))

    def _read_scale(self) -> torch.Tensor | None:
        source = self._part.scale
        if source is None:
            return None
        data = bytearray(source.nbytes)
        read(self._files, source, 0, memoryview(data))
        self.digests.append(digest_entry(source, hashlib.sha256(data).hexdigest()))
        return torch.frombuffer(data, dtype=TORCH_DTYPES[source.dtype]).view(source.shape).float()


def open_files(paths: Iterable[Path], stack: contextlib.ExitStack) -> dict[Path, int]:
    """Descriptors of the files, closed with the stack. Raises CheckpointError."""
    files: dict[Path, int] = {}
    for path in paths:
        if path not in files:
            try:
                files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
            stack.callback(os.close, files[path])
    return files


def read(files: Mapping[Path, int], source: TensorSource, start: int, buffer: memoryview) -> None:
    """Fills `buffer` from byte `start` of the tensor on. Raises CheckpointError."""
    done = 0
    while done < buffer.nbytes:
        try:
            count = os.preadv(files[source.file], [buffer[done:]], source.offset + start + done)
        except OSError as error:
            raise CheckpointError(source.file, f"cannot be read: {error.strerror}") from error
        if count == 0:
            raise CheckpointError(source.file, f"was truncated while tensor {source.name} was read")
        done += count


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


def digest_entry(source: TensorSource, digest: str) -> list[object]:
    """What the content digest is made of: a tensor's name, dtype and shape, and the SHA-256 of its bytes."""
    return [source.name, source.dtype, list(source.shape), digest]
