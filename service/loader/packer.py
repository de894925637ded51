"""Packs a tensor's rows for the native kernels, as they come."""

from __future__ import annotations

import math
import threading

import torch

from service.kernels.layout import expert_stride, packed_bytes
from service.kernels.library import KernelError, KernelPool, load
from service.loader.integer_reader import IntegerRows
from service.models.weights import WeightTensor

# Narrower ranges that are tried for each group of integers: more find no better ones.
_SEARCH = {"int8": 0, "int4": 12}
_PANEL_ROWS = 16

_own = threading.local()


class Packer:
    """Rows of one tensor [rows, columns] or [experts, rows, columns], on their way into its packed memory.

    `destination` is what service.models.packing plans for it. Raises KernelError without the native kernels.
    """

    row_multiple = _PANEL_ROWS

    def __init__(self, tensor: WeightTensor, destination: memoryview) -> None:
        self._tensor = tensor
        self._rows, self._columns = tensor.shape[-2:]
        sizes = (tensor.packing, self._rows, self._columns, tensor.group)
        self._size, self._stride = packed_bytes(*sizes), expert_stride(*sizes)
        self._memory = torch.frombuffer(destination, dtype=torch.uint8)
        self._all_rows = math.prod(tensor.shape[:-1])
        self._done = 0

    def add(self, rows: torch.Tensor | IntegerRows) -> int:
        """Packs rows [count, columns], the next ones; returns how many bytes of the plan that makes."""
        before = self._filled()
        for start, count, matrix, row in self._pieces(len(rows)):
            place = self._memory[matrix * self._stride : matrix * self._stride + self._size]
            self._pack(rows[start : start + count], row, place)
            self._done += count
        return self._filled() - before

    def _pack(self, rows: torch.Tensor | IntegerRows, first_row: int, place: torch.Tensor) -> None:
        tensor, pool = self._tensor, _pool()
        if isinstance(rows, IntegerRows):
            pool.pack_quantized(
                rows.values,
                rows.scales,
                rows.zeros,
                group=tensor.group,
                rows=self._rows,
                first_row=first_row,
                out=place,
            )
        else:
            pool.pack(
                rows,
                tensor.packing,
                group=tensor.group,
                search=_SEARCH.get(tensor.packing, 0),
                rows=self._rows,
                first_row=first_row,
                out=place,
            )

    def _pieces(self, count: int) -> list[tuple[int, int, int, int]]:
        """(first of the new rows, how many, matrix, row in it), so that none goes over a matrix's end."""
        pieces, start, done = [], 0, self._done
        while start < count:
            matrix, row = divmod(done, self._rows)
            size = min(count - start, self._rows - row)
            pieces.append((start, size, matrix, row))
            start, done = start + size, done + size
        return pieces

    def _filled(self) -> int:
        return self._tensor.nbytes * self._done // self._all_rows


def _pool() -> KernelPool:
    """This thread's own: threads of the loader are the parallelism."""
    if not hasattr(_own, "pool"):
        library = load()
        if library is None:
            raise KernelError("weights cannot be packed without the native kernels")
        _own.pool = KernelPool(library, threads=1)
    pool: KernelPool = _own.pool
    return pool
