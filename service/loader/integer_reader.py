"""Reads a matrix that a checkpoint holds as whole numbers, some rows at a time, and hashes what it reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from service.loader import part_reader
from service.loader.checkpoint import CheckpointError, TensorSource
from service.loader.part_reader import TORCH_DTYPES, digest_entry, read
from service.models.integers import IntegerPart

# Where the file holds columns one after the other, it is read once for each so many chunks of rows.
_CHUNKS_AT_ONCE = 16
# Row o of eight is in place _AWQ_PLACES[o] of a word.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True)
class IntegerRows:
    """Rows of a weight (values - zeros) * scales, in groups of the kernels.

    values [rows, columns] uint8 from 0 to 15, or int8 without zeros; scales float32 and zeros uint8 [rows, groups].
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> IntegerRows:
        return IntegerRows(
            self.values[rows], self.scales[rows], None if self.zeros is None else self.zeros[rows]
        )


class IntegerReader:
    """One part on its way to the kernels; `digests` tell what was read, once it all was."""

    def __init__(self, part: IntegerPart, files: Mapping[Path, int]) -> None:
        self._part = part
        self._files = files
        self.digests: list[list[object]] = []

    def rows(self, multiple: int = 1) -> Iterator[IntegerRows]:
        """The part's rows in order; a multiple of `multiple` rows at a time, but for the last.

        Holds the packed values of a few chunks of rows, and the part's scales and zero points. Raises CheckpointError for a
        file that is cut short, and for zero points that the kernels cannot have.
        """
        scales, zeros = self._read_scales(), self._read_zeros()
        for source in self._part.described_by:
            self._read_whole(source)
        by_rows = self._part.layout in ("packed", "int8")
        row = 0
        for values in self._by_rows(multiple) if by_rows else self._by_columns(multiple):
            if self._part.scheme.bits == 8 and self._part.layout != "int8":
                values = (values ^ 128).view(torch.int8)
            end = row + len(values)
            yield IntegerRows(values, scales[row:end], None if zeros is None else zeros[row:end])
            row = end

    def _read_scales(self) -> torch.Tensor:
        part = self._part
        scales = self._read_whole(part.scales).float()
        scales = scales.t() if part.layout in ("gptq", "awq") else scales.reshape(-1, part.groups)
        return self._in_kernel_groups(scales.expand(part.shape[0], -1))

    def _read_zeros(self) -> torch.Tensor | None:
        """Zero points [rows, groups] of four bits; None for eight, where they must all be the middle of the range."""
        part, bits = self._part, self._part.scheme.bits
        middle = 0 if part.layout == "int8" else 1 << (bits - 1)
        if part.zeros is None:
            zeros = torch.full((part.shape[0], part.groups), middle, dtype=torch.uint8)
        else:
            zeros = self._unpack_zeros(self._read_whole(part.zeros))
        if bits == 4:
            return self._in_kernel_groups(zeros)
        if (zeros != middle).any():
            assert part.zeros is not None
            problem = f"has values other than {middle}: the kernels have no zero points for 8 bits"
            raise CheckpointError(part.zeros.file, f"tensor {part.zeros.name} {problem}")
        return None

    def _unpack_zeros(self, stored: torch.Tensor) -> torch.Tensor:
        part, bits = self._part, self._part.scheme.bits
        if part.layout == "int8":
            return stored.reshape(-1, part.groups)
        if part.layout == "packed":
            return _unpack(stored.t(), bits)[:, : part.shape[0]].t()
        if part.zeros_less_one:
            # Writers subtract from whole words, so a borrow goes over into the next number: only so is it undone.
            stored = stored + (0x11111111 if bits == 4 else 0x01010101)
        zeros = _unpack(stored, bits)
        return (_in_awq_order(zeros) if part.layout == "awq" else zeros).t()

    def _in_kernel_groups(self, numbers: torch.Tensor) -> torch.Tensor:
        """[rows, groups] of the checkpoint, repeated where the kernels' groups are parts of those."""
        part = self._part
        if part.group != part.scheme.group:
            groups = -(-part.shape[1] // part.group)
            numbers = numbers.repeat_interleave(part.scheme.group // part.group, dim=1)[:, :groups]
        return numbers.contiguous()

    def _by_rows(self, multiple: int) -> Iterator[torch.Tensor]:
        """Values [count, columns], from a file that holds a row after the other."""
        part, source = self._part, self._part.values
        rows, columns = part.shape
        row_bytes = source.nbytes // max(rows, 1)
        at_once = _rows_at_once(columns, multiple)
        buffer, digest = memoryview(bytearray(min(at_once, rows) * row_bytes)), hashlib.sha256()
        for row in range(0, rows, at_once):
            chunk = buffer[: min(at_once, rows - row) * row_bytes]
            read(self._files, source, row * row_bytes, chunk)
            digest.update(chunk)
            words = torch.frombuffer(chunk, dtype=TORCH_DTYPES[source.dtype]).view(-1, source.shape[1])
            values = words if part.layout == "int8" else _unpack(words, part.scheme.bits)
            yield values[:, :columns].contiguous()
        self.digests.append(digest_entry(source, digest.hexdigest()))

    def _by_columns(self, multiple: int) -> Iterator[torch.Tensor]:
        """Values [count, columns], from a file that holds a column, or those of a word, after the other."""
        part, source = self._part, self._part.values
        in_word = 1 if part.layout == "gptq" else 8
        at_once = _rows_at_once(part.shape[1], multiple * in_word)
        digest = hashlib.sha256()
        for first in range(0, part.shape[0], _CHUNKS_AT_ONCE * at_once):
            end = min(first + _CHUNKS_AT_ONCE * at_once, part.shape[0])
            block = self._read_words(first // in_word, end // in_word, digest if first == 0 else None)
            for row in range(0, end - first, at_once):
                words = block[:, row // in_word : (row + at_once) // in_word]
                yield _unpack(words.t(), part.scheme.bits) if part.layout == "gptq" else _rows_of_words(words)
        self.digests.append(digest_entry(source, digest.hexdigest()))

    def _read_words(self, begin: int, end: int, digest: hashlib._Hash | None) -> torch.Tensor:
        """Words `begin` to `end` of each line of the file: [lines, end - begin] int32."""
        source = self._part.values
        lines, width = source.shape
        at_once = max(1, part_reader.CHUNK_BYTES // (4 * width))
        block = torch.empty(lines, end - begin, dtype=torch.int32)
        buffer = memoryview(bytearray(4 * width * min(at_once, lines)))
        for line in range(0, lines, at_once):
            count = min(at_once, lines - line)
            chunk = buffer[: 4 * width * count]
            read(self._files, source, 4 * width * line, chunk)
            if digest is not None:
                digest.update(chunk)
            words = torch.frombuffer(chunk, dtype=torch.int32).view(count, width)
            block[line : line + count] = words[:, begin:end]
        return block

    def _read_whole(self, source: TensorSource) -> torch.Tensor:
        data = bytearray(source.nbytes)
        read(self._files, source, 0, memoryview(data))
        self.digests.append(digest_entry(source, hashlib.sha256(data).hexdigest()))
        return torch.frombuffer(data, dtype=TORCH_DTYPES[source.dtype]).view(source.shape)


def _rows_at_once(columns: int, multiple: int) -> int:
    """Rows whose values fill a chunk, a byte each."""
    return max(1, part_reader.CHUNK_BYTES // max(columns, 1) // multiple) * multiple


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] int32 -> [..., n * 32 / bits] uint8, the lowest bits of a word first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def _in_awq_order(numbers: torch.Tensor) -> torch.Tensor:
    """[n, rows] as they come from the words, in the order of the rows."""
    return numbers.view(len(numbers), -1, 8)[..., _AWQ_PLACES].flatten(1)


def _rows_of_words(words: torch.Tensor) -> torch.Tensor:
    """[columns, n] words of eight rows each -> [8 n, columns]."""
    # Whole words are turned over, which is eight times less work than their numbers.
    by_row = words.t().contiguous()
    numbers = [
        by_row.bitwise_right_shift(4 * place).bitwise_and_(15).to(torch.uint8) for place in _AWQ_PLACES
    ]
    return torch.stack(numbers, 1).flatten(0, 1)
