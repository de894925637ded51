"""Loads the native CPU kernels and calls them on torch tensors.

One call runs one operation, or a list of them, made by the functions of service.kernels.operations. Tensors are passed by
address; an operation holds those that it was made with.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from service.kernels.build import LIBRARY
from service.kernels.layout import ABI, why_unusable
from service.kernels.operations import Operation
from service.kernels.packed import FORMATS, PackedWeight
from service.kernels.structures import DTYPES, Array, OperationEntry, Weight

logger = logging.getLogger(__name__)

ISA_VARIABLE = "NUMASERVE_CPU_ISA"


class KernelError(RuntimeError):
    """The native library refused a call; the message names what was wrong."""


@cache
def load(path: Path = LIBRARY) -> KernelLibrary | None:
    """The library, or None (said once in the log) where it was not built or does not fit this package."""
    problem = why_unusable(path)
    if problem is not None:
        logger.warning("%s; using torch's", problem)
        return None
    return KernelLibrary(path)


class KernelLibrary:
    """The functions of the shared library at `path`; raises OSError or KernelError where it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.native = ctypes.CDLL(str(path))
        _declare(self.native)
        if self.native.numaserve_abi() != ABI:
            raise KernelError(f"{path} was built from other sources: run python -m service.kernels.build")

    def supports(self, isa: str) -> bool:
        """Whether this machine can run "generic", "avx2", "avx512" or "amx" as built."""
        return bool(self.native.numaserve_isa_supported(isa.encode()))

    def last_error(self) -> str:
        """Why the last call on this thread failed."""
        text: bytes = self.native.numaserve_last_error()
        return text.decode()

    def packed_bytes(self, format: str, rows: int, columns: int, group: int = 0) -> int:
        """Bytes that a weight [rows, columns] takes once packed; raises KernelError for sizes that do not go together."""
        size: int = self.native.numaserve_packed_bytes(_format(format), group, rows, columns)
        if size < 0:
            raise KernelError(self.last_error())
        return size


class KernelPool:
    """Threads that run kernels. To be made after the last fork, and used by one thread at a time.

    `cpus` are the CPUs of the threads, the first of them the caller's own (see `pin_caller`); or give `threads`, which are
    not pinned. `isa` is the instruction set, by default that of the environment variable NUMASERVE_CPU_ISA, else the best
    here. Raises KernelError where the machine lacks it or no thread can be started.
    """

    def __init__(
        self,
        library: KernelLibrary,
        cpus: Sequence[int] | None = None,
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        if cpus is not None and threads is not None:
            raise ValueError("give cpus or threads, not both")
        count = len(cpus) if cpus is not None else threads or 1
        numbers = None if cpus is None else (ctypes.c_int * count)(*cpus)
        isa = isa or os.environ.get(ISA_VARIABLE) or None
        native = library.native
        pool = native.numaserve_pool_create(numbers, count, isa.encode() if isa else None)
        if not pool:
            raise KernelError(library.last_error())
        self.library = library
        self.cpus = None if cpus is None else tuple(cpus)
        self._native = native
        self._pool = ctypes.c_void_p(pool)
        self.close = weakref.finalize(self, native.numaserve_pool_destroy, self._pool)

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        name: bytes = self._native.numaserve_pool_isa(self._pool)
        return name.decode()

    @property
    def threads(self) -> int:
        """Threads, the caller among them."""
        count: int = self._native.numaserve_pool_threads(self._pool)
        return count

    @property
    def pinned(self) -> int:
        """How many threads are pinned to their CPU, the caller not counted."""
        count: int = self._native.numaserve_pool_pinned(self._pool)
        return count

    def pin_caller(self) -> None:
        """Pins the calling thread to the first of the CPUs."""
        self._check(self._native.numaserve_pool_pin_caller(self._pool))

    def run(self, *operations: Operation) -> None:
        """Runs the operations one after the other; each sees what those before it wrote."""
        self.run_program(Program(operations))

    def run_program(self, program: Program) -> None:
        """Runs a list that was made once, whose tensors' contents may have changed since."""
        self._check(self._native.numaserve_run(self._pool, program.entries, program.count))

    def pack(
        self,
        source: torch.Tensor,
        format: str | None = None,
        *,
        group: int = 0,
        search: int = 0,
        rows: int | None = None,
        first_row: int = 0,
        out: torch.Tensor | None = None,
    ) -> PackedWeight:
        """Packs source [n, k] (float32, bfloat16 or float16) as rows first_row ... first_row + n of a weight [rows, k].

        `format` is "float32", "bfloat16", "float16" (by default the source's own), or "int8" or "int4": rounded to integers,
        `group` columns to a scale (0: a whole row), `search` narrower ranges tried for each. `out` uint8 [packed_bytes] is
        where to write; rows of one weight may come in several calls with the same `out`.
        """
        name = format or str(source.dtype).removeprefix("torch.")
        weight = self._target(name, rows or source.shape[0], source.shape[1], group, out)
        array, target = _matrix("source", source), weight.as_struct()
        arguments = (self._pool, ctypes.byref(array), first_row, source.shape[0])
        if name in ("int8", "int4"):
            self._check(self._native.numaserve_quantize(*arguments, search, ctypes.byref(target)))
        else:
            self._check(self._native.numaserve_pack(*arguments, ctypes.byref(target)))
        return weight

    def pack_quantized(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        *,
        group: int = 0,
        rows: int | None = None,
        first_row: int = 0,
        out: torch.Tensor | None = None,
    ) -> PackedWeight:
        """Packs integers that are quantised already; a weight is (value - zero) * scale.

        values [n, k] int8, or uint8 from 0 to 15 for int4; scales [n, groups] float32; zeros [n, groups] uint8 for int4.
        """
        name = "int8" if values.dtype == torch.int8 else "int4"
        weight = self._target(name, rows or values.shape[0], values.shape[1], group, out)
        groups = -(-values.shape[1] // group) if group else 1
        expected = {"values": (values, values.shape), "scales": (scales, (len(values), groups))}
        if zeros is not None:
            expected["zeros"] = (zeros, (len(values), groups))
        wanted = {"values": (torch.int8, torch.uint8), "scales": (torch.float32,), "zeros": (torch.uint8,)}
        for label, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
                raise ValueError(f"{label}: must be contiguous and {list(shape)}, not {list(tensor.shape)}")
            if tensor.dtype not in wanted[label]:
                raise ValueError(f"{label}: cannot be {tensor.dtype}")
        target = weight.as_struct()
        zeros_at = None if zeros is None else zeros.data_ptr()
        pointers = (values.data_ptr(), scales.data_ptr(), zeros_at)
        self._check(
            self._native.numaserve_pack_quantized(
                self._pool, *pointers, first_row, len(values), ctypes.byref(target)
            )
        )
        return weight

    def unpack(self, weight: PackedWeight, first_row: int = 0, count: int | None = None) -> torch.Tensor:
        """Rows of a packed weight as float32 [count, columns]."""
        count = weight.rows - first_row if count is None else count
        result = torch.empty(count, weight.columns)
        struct = weight.as_struct()
        self._check(
            self._native.numaserve_unpack(
                self._pool, ctypes.byref(struct), first_row, count, result.data_ptr()
            )
        )
        return result

    def _target(
        self, format: str, rows: int, columns: int, group: int, out: torch.Tensor | None
    ) -> PackedWeight:
        size = self.library.packed_bytes(format, rows, columns, group)
        if out is None:
            out = torch.empty(size, dtype=torch.uint8)
        return PackedWeight(out, rows, columns, format, group, size)

    def _check(self, status: int) -> None:
        if status != 0:
            raise KernelError(self.library.last_error())


class Program:
    """A list of operations, laid out once for any number of runs."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = tuple(operations)
        self.count = len(self._operations)
        self.entries = (OperationEntry * self.count)(*(each.entry() for each in self._operations))


def _format(name: str) -> int:
    if name not in FORMATS:
        raise ValueError(f"format: {name!r} is unknown; known are {', '.join(FORMATS)}")
    return FORMATS[name]


def _matrix(name: str, tensor: torch.Tensor) -> Array:
    if tensor.dim() != 2 or tensor.dtype not in DTYPES or (tensor.shape[1] > 1 and tensor.stride(1) != 1):
        problem = "must have two dimensions, rows without gaps, and be float32, bfloat16 or float16"
        raise ValueError(
            f"{name}: {problem}, not {tensor.dtype} {list(tensor.shape)} of strides {tensor.stride()}"
        )
    return Array(tensor.data_ptr(), tensor.stride(0), DTYPES[tensor.dtype])


def _declare(native: ctypes.CDLL) -> None:
    pointer, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    array, weight = ctypes.POINTER(Array), ctypes.POINTER(Weight)
    signatures = {
        "abi": (ctypes.c_int, []),
        "last_error": (text, []),
        "isa_supported": (ctypes.c_int, [text]),
        "pool_create": (pointer, [ctypes.POINTER(ctypes.c_int), ctypes.c_int, text]),
        "pool_destroy": (None, [pointer]),
        "pool_threads": (ctypes.c_int, [pointer]),
        "pool_pinned": (ctypes.c_int, [pointer]),
        "pool_pin_caller": (ctypes.c_int, [pointer]),
        "pool_isa": (text, [pointer]),
        "run": (ctypes.c_int, [pointer, ctypes.POINTER(OperationEntry), number]),
        "packed_bytes": (number, [number] * 4),
        "pack": (ctypes.c_int, [pointer, array, number, number, weight]),
        "quantize": (ctypes.c_int, [pointer, array, number, number, number, weight]),
        "pack_quantized": (ctypes.c_int, [pointer, pointer, pointer, pointer, number, number, weight]),
        "unpack": (ctypes.c_int, [pointer, weight, number, number, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(native, f"numaserve_{name}")
        function.restype = result
        function.argtypes = arguments
