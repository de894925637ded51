"""The operations that the kernels know, each checked against its tensors and ready to run any number of times.

Matrices are [rows, columns], with rows that may lie apart (a stride) and columns without gaps. Each may be float32, bfloat16
or float16, whatever the others are; sums are float32. Each function raises ValueError naming the tensor that does not fit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from service.kernels import structures
from service.kernels.packed import PackedWeight
from service.kernels.structures import ACTIVATIONS, DTYPES, Array, Weight


class Operation:
    """Arguments of one operation, and the tensors that they point into."""

    def __init__(self, arguments: structures.Arguments, *keep: object) -> None:
        self.arguments = arguments
        self._keep = keep

    def entry(self) -> structures.OperationEntry:
        """For the list of a call; valid while this object lives."""
        return structures.OperationEntry(self.arguments.kind, ctypes.addressof(self.arguments))


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Operation:
    """out [rows, n] = residual + softcap(scale * (x [rows, k] . weight [n, k]^T + bias [n])); out may be the residual."""
    rows = len(x)
    arguments = structures.Matmul(
        _rows("x", x, rows, weight.columns),
        _rows("out", out, rows, weight.rows),
        _vector("bias", bias, weight.rows),
        _optional_rows("residual", residual, rows, weight.rows),
        weight.as_struct(),
        rows,
        scale,
        softcap,
    )
    return Operation(arguments, x, weight, out, bias, residual)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    scale: float = 1.0,
    residual: torch.Tensor | None = None,
    row_index: torch.Tensor | None = None,
) -> Operation:
    """out = residual + scale * (offset + weight) * x / sqrt(mean(x^2) + eps). https://arxiv.org/abs/1910.07467

    x, out and residual [rows, columns], weight [columns]; row_index [rows of out] int64: which row of x each is for.
    """
    columns = x.shape[-1]
    rows = len(x) if row_index is None else len(row_index)
    if row_index is not None:
        _indices("row_index", row_index, (rows,))
        if rows and not 0 <= int(row_index.min()) <= int(row_index.max()) < len(x):
            raise ValueError(f"row_index: names rows outside of x, which has {len(x)}")
    arguments = structures.RmsNorm(
        _rows("x", x, len(x), columns),
        _rows("out", out, rows, columns),
        _vector("weight", weight, columns),
        _optional_rows("residual", residual, rows, columns),
        None if row_index is None else row_index.data_ptr(),
        rows,
        columns,
        eps,
        offset,
        scale,
        0.0,
    )
    return Operation(arguments, x, weight, out, residual, row_index)


def rotate_and_cache(
    qkv: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    cosine: torch.Tensor | None = None,
    sine: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
) -> Operation:
    """Splits qkv [rows, (heads + 2 kv_heads) * head_dim]: norms and rotates queries into query [rows, heads * head_dim],
    norms and rotates keys into the cache, and copies values there.

    keys, values [blocks, block_size, kv_heads, head_dim] of one layer, in the order of cache.h; slots [rows] int64 as
    block * block_size + offset, where a negative one writes nothing; cosine, sine [table rows, rotary_dim / 2] float32,
    at positions [rows] int64 (None: row for row); query_norm, key_norm [head_dim]. `interleaved` pairs neighbours, otherwise
    halves are paired.
    """
    rows = len(qkv)
    blocks, block_size, kv_heads, head_dim = _cache(keys, values)
    heads = query.shape[1] // head_dim
    _indices("slots", slots, (rows,))
    half = 0
    if cosine is not None and sine is not None:
        half = cosine.shape[1]
        for name, table in (("cosine", cosine), ("sine", sine)):
            if table.shape != cosine.shape or table.dtype != torch.float32 or not table.is_contiguous():
                raise ValueError(f"{name}: must be contiguous float32 {list(cosine.shape)}")
        if positions is not None:
            _indices("positions", positions, (rows,))
    elif cosine is not None or sine is not None:
        raise ValueError("cosine, sine: give both or neither")
    arguments = structures.Rope(
        _rows("qkv", qkv, rows, (heads + 2 * kv_heads) * head_dim),
        _rows("query", query, rows, heads * head_dim),
        _vector("query_norm", query_norm, head_dim),
        _vector("key_norm", key_norm, head_dim),
        None if cosine is None else cosine.data_ptr(),
        None if sine is None else sine.data_ptr(),
        None if positions is None else positions.data_ptr(),
        slots.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        DTYPES[keys.dtype],
        block_size,
        blocks * block_size,
        0 if cosine is None else len(cosine),
        rows,
        heads,
        kv_heads,
        head_dim,
        2 * half,
        interleaved,
        eps,
        norm_offset,
    )
    return Operation(
        arguments, qkv, query, keys, values, slots, cosine, sine, positions, query_norm, key_norm
    )


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    sequences: Sequence[tuple[int, int, int]],
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
) -> Operation:
    """Causal attention of query [rows, heads * head_dim] over a paged cache, into out of the same shape.

    keys, values [blocks, block_size, kv_heads, head_dim] of one layer, in the order of cache.h;
    block_tables [sequences, most blocks] int64;
    sequences as (query_start, query_length, context_length); `window` counts the query itself. Rows of no sequence keep what
    `out` holds.
    """
    blocks, block_size, kv_heads, head_dim = _cache(keys, values)
    heads = query.shape[1] // head_dim
    if heads * head_dim != query.shape[1] or heads % kv_heads:
        raise ValueError(
            f"query: {query.shape[1]} columns are no whole groups of {kv_heads} heads of {head_dim}"
        )
    count = len(sequences)
    if block_tables.dim() != 2 or len(block_tables) < count:
        raise ValueError(f"block_tables: must have a row for each of {count} sequences")
    if block_tables.dtype != torch.int64 or block_tables.stride(1) != 1:
        raise ValueError("block_tables: must be int64, its rows without gaps")
    for start, length, context in sequences:
        if start + length > len(query):
            raise ValueError(
                f"sequences: rows {start} to {start + length} are not among {len(query)} queries"
            )
        if -(-context // block_size) > block_tables.shape[1]:
            raise ValueError(f"block_tables: {block_tables.shape[1]} blocks hold no context of {context}")
    table = (structures.Sequence * count)(*(structures.Sequence(*each) for each in sequences))
    arguments = structures.Attention(
        _rows("query", query, len(query), heads * head_dim),
        _rows("out", out, len(query), heads * head_dim),
        keys.data_ptr(),
        values.data_ptr(),
        block_tables.data_ptr(),
        ctypes.addressof(table),
        DTYPES[keys.dtype],
        blocks,
        block_size,
        block_tables.stride(0),
        count,
        heads,
        kv_heads,
        head_dim,
        window or 0,
        scale,
        softcap,
    )
    return Operation(arguments, query, keys, values, block_tables, table, out)


def activation(x: torch.Tensor, out: torch.Tensor, kind: str, *, gated: bool = True) -> Operation:
    """out [rows, n] = act(first n columns of x) * last n columns; or act(x [rows, n]) where not gated.

    `kind` is silu, gelu, gelu_tanh or relu.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"kind: {kind!r} is unknown; known are {', '.join(ACTIVATIONS)}")
    rows, columns = out.shape
    arguments = structures.Activation(
        _rows("x", x, rows, 2 * columns if gated else columns),
        _rows("out", out, rows, columns),
        rows,
        columns,
        ACTIVATIONS[kind],
        gated,
    )
    return Operation(arguments, x, out)


def add(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> Operation:
    """out = residual + scale * x, all [rows, columns]."""
    rows, columns = x.shape
    arguments = structures.Add(
        _rows("x", x, rows, columns),
        _rows("out", out, rows, columns),
        _rows("residual", residual, rows, columns),
        rows,
        columns,
        scale,
        0.0,
    )
    return Operation(arguments, x, residual, out)


def embedding(
    ids: torch.Tensor, table: PackedWeight | torch.Tensor, out: torch.Tensor, scale: float = 1.0
) -> Operation:
    """out [rows, columns] = scale * table[ids]; ids [rows] int64, table a packed weight or rows [vocabulary, columns]."""
    rows = len(ids)
    _indices("ids", ids, (rows,))
    if isinstance(table, PackedWeight):
        columns, weight, array = table.columns, table.as_struct(), Array()
    else:
        columns = table.shape[1]
        array = _rows("table", table, len(table), columns)
        weight = Weight(None, len(table), columns, 0, 0)
    arguments = structures.Embedding(
        _rows("out", out, rows, columns), array, weight, ids.data_ptr(), rows, scale, 0.0
    )
    return Operation(arguments, ids, table, out)


def sample(
    logits: torch.Tensor,
    choices: Sequence[structures.Choice] | ctypes.Array[structures.Choice],
    largest: torch.Tensor,
    tokens: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> Operation:
    """For each row of logits [rows, columns] float32 its largest number, in largest [rows] float32, and the token that its
    choice picks, in tokens [rows] int64: -1 where the largest is infinite, or NaN because the row holds one.

    An array of choices is read where it lies, whenever the operation runs.

    A token's weight is the integer nearest to 2**30 * exp((logit - largest) / temperature), computed in float32; weights
    [rows, columns] int32 gets those of the tokens that are kept, and 0 for the others.
    """
    rows, columns = logits.shape
    if len(choices) != rows:
        raise ValueError(f"choices: must be {rows}, not {len(choices)}")
    _check_logits(logits, largest)
    _indices("tokens", tokens, (rows,))
    if weights is not None and (weights.dtype != torch.int32 or weights.shape != logits.shape):
        raise ValueError(f"weights: must be int32 {list(logits.shape)}")
    if weights is not None and not weights.is_contiguous():
        raise ValueError("weights: must be contiguous")
    array = choices if isinstance(choices, ctypes.Array) else (structures.Choice * rows)(*choices)
    arguments = structures.Sample(
        _rows("logits", logits, rows, columns),
        ctypes.addressof(array),
        largest.data_ptr(),
        tokens.data_ptr(),
        None if weights is None else weights.data_ptr(),
        rows,
        columns,
    )
    return Operation(arguments, logits, array, largest, tokens, weights)


def ranking(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    top: torch.Tensor,
    largest: torch.Tensor,
    sums: torch.Tensor,
    ranks: torch.Tensor,
    likeliest: torch.Tensor,
) -> Operation:
    """What the log probabilities of logits [rows, columns] float32 are made of.

    For each row, in largest [rows] float32 its largest logit, NaN where the row holds one; in sums [rows] int64
    2**30 * sum(exp(logit - largest)), each of them rounded; in ranks [rows] int64 the rank, from 1 on, of its token in
    tokens [rows] int64, where of equal logits the lower token ranks first; in likeliest [rows, most] int64 its top[row]
    likeliest tokens (top int64, at most `most`) by rank, then -1. Sum and rank are 0 where the largest is not finite.
    """
    rows, columns = logits.shape
    _check_logits(logits, largest)
    for name, tensor in {"tokens": tokens, "top": top, "sums": sums, "ranks": ranks}.items():
        _indices(name, tensor, (rows,))
    most = likeliest.shape[-1]
    _indices("likeliest", likeliest, (rows, most))
    arguments = structures.Ranking(
        _rows("logits", logits, rows, columns),
        *(tensor.data_ptr() for tensor in (tokens, top, largest, sums, ranks, likeliest)),
        most,
        rows,
        columns,
    )
    return Operation(arguments, logits, tokens, top, largest, sums, ranks, likeliest)


def _check_logits(logits: torch.Tensor, largest: torch.Tensor) -> None:
    if logits.dtype != torch.float32:
        raise ValueError(f"logits: must be float32, not {logits.dtype}")
    if largest.dtype != torch.float32 or largest.shape != logits.shape[:1] or not largest.is_contiguous():
        raise ValueError(f"largest: must be contiguous float32 [{len(logits)}]")


def _rows(name: str, tensor: torch.Tensor, rows: int, columns: int) -> Array:
    if tensor.dim() != 2 or tensor.shape[0] != rows or tensor.shape[1] != columns:
        raise ValueError(f"{name}: must be [{rows}, {columns}], not {list(tensor.shape)}")
    if columns > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name}: must have columns without gaps, not strides {tensor.stride()}")
    return _array(name, tensor)


def _optional_rows(name: str, tensor: torch.Tensor | None, rows: int, columns: int) -> Array:
    return Array() if tensor is None else _rows(name, tensor, rows, columns)


def _vector(name: str, tensor: torch.Tensor | None, size: int) -> Array:
    if tensor is None:
        return Array()
    if tensor.shape != (size,) or not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous [{size}], not {list(tensor.shape)}")
    return _array(name, tensor)


def _array(name: str, tensor: torch.Tensor) -> Array:
    if tensor.dtype not in DTYPES or tensor.device.type != "cpu":
        raise ValueError(f"{name}: must be float32, bfloat16 or float16 on the CPU, not {tensor.dtype}")
    return Array(tensor.data_ptr(), tensor.stride(0), DTYPES[tensor.dtype])


def _indices(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.int64 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: must be contiguous int64 {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
        )


def _cache(keys: torch.Tensor, values: torch.Tensor) -> tuple[int, int, int, int]:
    if keys.dim() != 4 or keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(
            "keys, values: must be [blocks, block_size, kv_heads, head_dim], of one shape and type, "
            f"not {list(keys.shape)} and {list(values.shape)}"
        )
    if keys.dtype not in DTYPES or not keys.is_contiguous() or not values.is_contiguous():
        raise ValueError("keys, values: must be contiguous float32, bfloat16 or float16")
    blocks, block_size, kv_heads, head_dim = keys.shape
    return blocks, block_size, kv_heads, head_dim
