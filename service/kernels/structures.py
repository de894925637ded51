"""The structs of numaserve_kernels.h, field for field."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}

_pointer, _number, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Array(ctypes.Structure):
    """numaserve_array."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("data", _pointer), ("stride", _number), ("dtype", _number)]


class Weight(ctypes.Structure):
    """numaserve_weight."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("data", _pointer),
        ("rows", _number),
        ("columns", _number),
        ("format", _number),
        ("group", _number),
    ]


class Matmul(ctypes.Structure):
    """numaserve_matmul."""

    kind = 0
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("x", Array),
        ("y", Array),
        ("bias", Array),
        ("residual", Array),
        ("weight", Weight),
        ("rows", _number),
        ("scale", _float),
        ("softcap", _float),
    ]


class RmsNorm(ctypes.Structure):
    """numaserve_rms_norm."""

    kind = 1
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("x", Array),
        ("y", Array),
        ("weight", Array),
        ("residual", Array),
        ("row_index", _pointer),
        ("rows", _number),
        ("columns", _number),
        ("eps", _float),
        ("offset", _float),
        ("scale", _float),
        ("unused", _float),
    ]


class Rope(ctypes.Structure):
    """numaserve_rope."""

    kind = 2
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("qkv", Array),
        ("query", Array),
        ("query_norm", Array),
        ("key_norm", Array),
        ("cosine", _pointer),
        ("sine", _pointer),
        ("positions", _pointer),
        ("slots", _pointer),
        ("keys", _pointer),
        ("values", _pointer),
        ("cache_dtype", _number),
        ("block_size", _number),
        ("cache_slots", _number),
        ("table_rows", _number),
        ("rows", _number),
        ("heads", _number),
        ("kv_heads", _number),
        ("head_dim", _number),
        ("rotary_dim", _number),
        ("interleaved", _number),
        ("eps", _float),
        ("norm_offset", _float),
    ]


class Sequence(ctypes.Structure):
    """numaserve_sequence."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("query_start", _number),
        ("query_length", _number),
        ("context_length", _number),
    ]


class Attention(ctypes.Structure):
    """numaserve_attention."""

    kind = 3
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("query", Array),
        ("y", Array),
        ("keys", _pointer),
        ("values", _pointer),
        ("block_tables", _pointer),
        ("sequences", _pointer),
        ("cache_dtype", _number),
        ("blocks", _number),
        ("block_size", _number),
        ("table_stride", _number),
        ("sequence_count", _number),
        ("heads", _number),
        ("kv_heads", _number),
        ("head_dim", _number),
        ("window", _number),
        ("scale", _float),
        ("softcap", _float),
    ]


class Activation(ctypes.Structure):
    """numaserve_activation."""

    kind = 4
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("x", Array),
        ("y", Array),
        ("rows", _number),
        ("columns", _number),
        ("kind_of", _number),
        ("gated", _number),
    ]


class Add(ctypes.Structure):
    """numaserve_add."""

    kind = 5
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("x", Array),
        ("y", Array),
        ("residual", Array),
        ("rows", _number),
        ("columns", _number),
        ("scale", _float),
        ("unused", _float),
    ]


class Embedding(ctypes.Structure):
    """numaserve_embedding."""

    kind = 6
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("y", Array),
        ("table", Array),
        ("weight", Weight),
        ("ids", _pointer),
        ("rows", _number),
        ("scale", _float),
        ("unused", _float),
    ]


class Choice(ctypes.Structure):
    """numaserve_choice: how the token of one row is drawn; the default is the likeliest one."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("typical_p", ctypes.c_double),
        ("top_k", _number),
        ("uniform", ctypes.c_uint64),
    ]


class Sample(ctypes.Structure):
    """numaserve_sample."""

    kind = 7
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("logits", Array),
        ("choices", _pointer),
        ("largest", _pointer),
        ("tokens", _pointer),
        ("weights", _pointer),
        ("rows", _number),
        ("columns", _number),
    ]


class Ranking(ctypes.Structure):
    """numaserve_ranking."""

    kind = 8
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("logits", Array),
        ("tokens", _pointer),
        ("top", _pointer),
        ("largest", _pointer),
        ("sums", _pointer),
        ("ranks", _pointer),
        ("likeliest", _pointer),
        ("most", _number),
        ("rows", _number),
        ("columns", _number),
    ]


class OperationEntry(ctypes.Structure):
    """numaserve_operation."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [("kind", _number), ("arguments", _pointer)]


Arguments = Matmul | RmsNorm | Rope | Attention | Activation | Add | Embedding | Sample | Ranking
