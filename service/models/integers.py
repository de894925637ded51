"""Matrices that a checkpoint holds as whole numbers: which of its tensors make one up, and how they lie. Reads no weights.

Layouts are those of AutoGPTQ (nn_modules/qlinear), AutoAWQ (modules/linear/gemm.py) and compressed-tensors
(compressors/pack_quantized): int32 words, each with the first of its numbers in its lowest bits.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from service.loader.checkpoint import Checkpoint, CheckpointError, TensorSource
from service.models.quantization_config import IntegerScheme, StoredQuantization, kernel_group

_VALUES = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed", "int8": "weight"}
_SCALES = {"gptq": "scales", "awq": "scales", "packed": "weight_scale", "int8": "weight_scale"}
_ZEROS = {"gptq": "qzeros", "awq": "qzeros", "packed": "weight_zero_point", "int8": "weight_zero_point"}
_GROUP_INDEX = {"gptq": "g_idx", "packed": "weight_g_idx", "int8": "weight_g_idx"}


@dataclass(frozen=True)
class IntegerPart:
    """A matrix [rows, columns] of (value - zero) * scale, all of a decoder tensor or one of those that are joined in it.

    `layout` says how `values` hold it, of `bits` bits each:
      gptq    [columns / n, rows]: n columns to a word
      awq     [columns, rows / 8]: eight rows to a word, the even ones first
      packed  [rows, columns / n]: n columns to a word, where 0 stands for the lowest negative number
      int8    [rows, columns] signed, zero points all 0
    `scales` and `zeros` are [groups, rows] (gptq, awq; zeros packed as values of awq, or along the rows) or [rows, groups]
    (packed; zeros packed along the rows). Without `zeros` the zero point is the middle of the range. `scheme.group` columns
    share a scale. `described_by` are tensors that say what was checked already, and are read for the digest alone.
    """

    layout: str
    scheme: IntegerScheme
    shape: tuple[int, int]
    values: TensorSource
    scales: TensorSource
    zeros: TensorSource | None
    zeros_less_one: bool
    described_by: tuple[TensorSource, ...]

    @property
    def sources(self) -> tuple[TensorSource, ...]:
        """All tensors of the checkpoint that are read."""
        zeros = () if self.zeros is None else (self.zeros,)
        return (self.values, self.scales, *zeros, *self.described_by)

    @property
    def group(self) -> int:
        """Columns to a scale in the kernels' layout, 0: all of a row. Where they know no such groups, parts of them."""
        group = kernel_group(self.scheme.group)
        assert group is not None
        return group

    @property
    def groups(self) -> int:
        """Scales to a row in the checkpoint."""
        return -(-self.shape[1] // self.scheme.group) if self.scheme.group else 1


def integer_layout(stored: StoredQuantization | None, checkpoint: Checkpoint, module: str) -> str | None:
    """The layout in which the checkpoint holds that module's weight as whole numbers; None where it does not."""
    if stored is None or not stored.schemes:
        return None
    if stored.method in ("gptq", "awq"):
        return stored.method if f"{module}.qweight" in checkpoint.tensors else None
    weight = checkpoint.tensors.get(f"{module}.weight")
    if weight is not None and weight.dtype == "I8":
        return "int8"
    return "packed" if f"{module}.weight_packed" in checkpoint.tensors else None


def find_integers(
    stored: StoredQuantization,
    layout: str,
    take: Callable[[str], TensorSource | None],
    module: str,
    shape: tuple[int, int],
) -> IntegerPart:
    """The weight [rows, columns] of a module that the checkpoint holds in `layout`; `take` hands out its tensors by name.

    Raises CheckpointError, naming file and tensor, for what is missing or fits neither `shape` nor the schemes of `stored`.
    """
    values = take(f"{module}.{_VALUES[layout]}")
    assert values is not None
    scales = take(f"{module}.{_SCALES[layout]}")
    if scales is None:
        raise CheckpointError(values.file, f"tensor {values.name} has no {module}.{_SCALES[layout]}")
    zeros = take(f"{module}.{_ZEROS[layout]}")
    if zeros is None and layout in ("gptq", "awq"):
        raise CheckpointError(values.file, f"tensor {values.name} has no {module}.{_ZEROS[layout]}")
    index = take(f"{module}.{_GROUP_INDEX[layout]}") if layout in _GROUP_INDEX else None
    stated = take(f"{module}.weight_shape") if layout == "packed" else None
    described_by = tuple(tensor for tensor in (index, stated) if tensor is not None)
    scheme = _scheme_of(stored, layout, shape, values, scales)
    part = IntegerPart(layout, scheme, shape, values, scales, zeros, stored.zeros_less_one, described_by)
    _check_zeros(part)
    if index is not None:
        _check_group_index(part, index)
    elif stored.needs_group_index and part.groups > 1:
        raise CheckpointError(
            values.file, f"tensor {values.name} has no {module}.g_idx, and desc_act is true"
        )
    if stated is not None:
        _check_stated_shape(part, stated)
    return part


def _scheme_of(
    stored: StoredQuantization,
    layout: str,
    shape: tuple[int, int],
    values: TensorSource,
    scales: TensorSource,
) -> IntegerScheme:
    """The scheme by which both shapes can be explained."""
    _check_dtype(values, "I8" if layout == "int8" else "I32")
    _check_dtype(scales, "F16", "BF16", "F32")
    bits = [scheme for scheme in stored.schemes if values.shape == _values_shape(layout, scheme.bits, shape)]
    if not bits:
        wanted = " or ".join(
            str(list(each) if each else f"none of {count} bits")
            for count in dict.fromkeys(scheme.bits for scheme in stored.schemes)
            for each in [_values_shape(layout, count, shape)]
        )
        asked = f"of a matrix {list(shape)} config.json asks for {wanted}"
        raise CheckpointError(values.file, f"tensor {values.name} has shape {list(values.shape)}; {asked}")
    fitting = [scheme for scheme in bits if scales.shape in _scales_shapes(layout, scheme.group, shape)]
    if not fitting:
        groups = " or every ".join(f"{each.group} columns" if each.group else "row" for each in bits)
        problem = (
            f"has shape {list(scales.shape)}, which is not one scale for every {groups} of {list(shape)}"
        )
        raise CheckpointError(scales.file, f"tensor {scales.name} {problem}")
    if len(fitting) > 1:
        raise CheckpointError(scales.file, f"tensor {scales.name} fits several groups of quantization_config")
    return fitting[0]


def _values_shape(layout: str, bits: int, shape: tuple[int, int]) -> tuple[int, int] | None:
    """Of the stored values; None where they cannot be stored so."""
    rows, columns = shape
    in_word = 32 // bits
    if layout == "int8":
        return shape if bits == 8 else None
    if layout == "packed":
        return rows, -(-columns // in_word)
    if rows % in_word or (layout == "gptq" and columns % in_word):
        return None
    return (columns // in_word, rows) if layout == "gptq" else (columns, rows // in_word)


def _scales_shapes(layout: str, group: int, shape: tuple[int, int]) -> list[tuple[int, ...]]:
    rows, columns = shape
    groups = -(-columns // group) if group else 1
    if layout in ("gptq", "awq"):
        return [(groups, rows)]
    return [(rows, groups)] if group else [(rows, 1), (rows,), (1,), ()]


def _check_zeros(part: IntegerPart) -> None:
    if part.zeros is None:
        return
    rows, in_word = part.shape[0], 32 // part.scheme.bits
    if part.layout == "int8":
        _check_dtype(part.zeros, "I8")
        wanted = [part.scales.shape]
    else:
        _check_dtype(part.zeros, "I32")
        words = -(-rows // in_word)
        wanted = [(words, part.groups) if part.layout == "packed" else (part.groups, words)]
    if part.zeros.shape not in wanted:
        found = f"has shape {list(part.zeros.shape)}, {part.values.name} asks for {list(wanted[0])}"
        raise CheckpointError(part.zeros.file, f"tensor {part.zeros.name} {found}")


def _check_group_index(part: IntegerPart, index: TensorSource) -> None:
    """Each column's group: only groups of columns that lie side by side can be served."""
    _check_dtype(index, "I32")
    columns, group = part.shape[1], part.scheme.group
    if index.shape != (columns,):
        problem = f"has shape {list(index.shape)}, {part.values.name} asks for {[columns]}"
        raise CheckpointError(index.file, f"tensor {index.name} {problem}")
    if _read_all(index) != _groups_in_order(columns, group or columns):
        problem = "does not go up by one every"
        size = f"{group} columns: columns in order of activation (desc_act, actorder) are not supported"
        raise CheckpointError(index.file, f"tensor {index.name} {problem} {size}")


@lru_cache(maxsize=16)
def _groups_in_order(columns: int, group: int) -> bytes:
    return b"".join((column // group).to_bytes(4, "little") for column in range(columns))


def _check_stated_shape(part: IntegerPart, stated: TensorSource) -> None:
    _check_dtype(stated, "I64", "I32")
    numbers = array("q" if stated.dtype == "I64" else "i", _read_all(stated))
    if tuple(numbers) != part.shape:
        problem = f"says {list(numbers)}, config.json asks for {list(part.shape)}"
        raise CheckpointError(stated.file, f"tensor {stated.name} {problem}")


def _check_dtype(source: TensorSource, *known: str) -> None:
    if source.dtype not in known:
        problem = f"has dtype {source.dtype}, which is not {' or '.join(known)}"
        raise CheckpointError(source.file, f"tensor {source.name} {problem}")


def _read_all(source: TensorSource) -> bytes:
    """The bytes of a small tensor."""
    try:
        with source.file.open("rb") as file:
            data = os.pread(file.fileno(), source.nbytes, source.offset)
    except OSError as error:
        raise CheckpointError(source.file, f"cannot be read: {error.strerror}") from error
    if len(data) != source.nbytes:
        raise CheckpointError(source.file, f"was truncated while tensor {source.name} was read")
    return data
