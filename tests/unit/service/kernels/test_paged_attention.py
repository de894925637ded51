"""Attention over a paged cache: right against float64, and the same bits however a row comes to be computed."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from kernel_cache import keys_as_kept, values_as_kept

from service.kernels import operations
from service.kernels.library import KernelPool


@dataclass(frozen=True)
class Paged:
    """Keys and values in shuffled pages [blocks, block_size, kv_heads, dim], and the same in order of position for each
    sequence.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    dense: list[tuple[torch.Tensor, torch.Tensor]]


def make_cache(
    random: torch.Generator, contexts: list[int], kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> Paged:
    """Slots that hold no token are NaN, so that whoever reads one is found out."""
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts) + 3, generator=random)
    keys = torch.full((len(order), block_size, kv_heads, dim), math.nan, dtype=dtype)
    values = keys.clone()
    tables = torch.zeros(len(contexts), max(counts, default=1), dtype=torch.int64)
    dense = []
    used = 0
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        blocks = order[used : used + count]
        used += count
        tables[row, :count] = blocks
        key, value = (torch.randn(context, kv_heads, dim, generator=random).to(dtype) for _ in range(2))
        positions = torch.arange(context)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        keys.view(-1, kv_heads, dim)[slots] = key
        values.view(-1, kv_heads, dim)[slots] = value
        dense.append((key.double(), value.double()))
    return Paged(keys, values, tables, dense)


def reference(
    query: torch.Tensor,
    paged: Paged,
    index: int,
    context: int,
    scale: float,
    softcap: float,
    window: int | None,
) -> torch.Tensor:
    """query [rows, heads, dim] of one sequence -> the same shape, float64."""
    key, value = paged.dense[index]
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(context - len(query), context)[:, None]
    columns = torch.arange(len(key))[None]
    hidden = (columns > rows) | ((columns <= rows - window) if window else False)
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def attend(
    pool: KernelPool,
    query: torch.Tensor,
    paged: Paged,
    sequences: list[tuple[int, int, int]],
    **options: object,
) -> torch.Tensor:
    out = torch.full(query.shape, math.nan)
    pool.run(
        operations.paged_attention(
            query,
            keys_as_kept(paged.keys),
            values_as_kept(paged.values),
            paged.tables,
            sequences,
            out,
            **options,
        )
    )
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size"),
    [
        (3, 1, 64, 16),
        (4, 4, 32, 8),
        (9, 3, 64, 16),
        (8, 2, 80, 5),
        (2, 1, 13, 1),
        (6, 3, 128, 64),
        (70, 1, 16, 16),
        (6, 2, 24, 48),
        (4, 2, 15, 16),
    ],
)
@pytest.mark.parametrize(("softcap", "window"), [(0.0, None), (5.0, None), (0.0, 30), (4.0, 129)])
def test_mixed_batch_matches_float64(
    pool: KernelPool,
    random: torch.Generator,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    softcap: float,
    window: int | None,
) -> None:
    lengths = [(1, 1), (1, 64), (1, 65), (7, 7), (50, 200), (1, 650), (130, 130), (3, 515)]
    paged = make_cache(random, [context for _, context in lengths], kv_heads, dim, block_size, dtype)
    sequences, start = [], 0
    for length, context in lengths:
        sequences.append((start, length, context))
        start += length
    query = torch.randn(start, heads * dim, generator=random)
    out = attend(pool, query, paged, sequences, scale=dim**-0.5, softcap=softcap, window=window)
    for index, (first, length, context) in enumerate(sequences):
        part = query[first : first + length].view(length, heads, dim)
        expected = reference(part, paged, index, context, dim**-0.5, softcap, window)
        torch.testing.assert_close(
            out[first : first + length].double().view(length, heads, dim), expected, rtol=2e-5, atol=5e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_is_the_same_alone_in_chunks_and_in_company(
    make_pool: Callable[[str, int], KernelPool],
    isa: str,
    random: torch.Generator,
    dtype: torch.dtype,
    heads: int,
    window: int | None,
) -> None:
    context, dim = 1200, 32
    paged = make_cache(random, [context, 300], 2, dim, 16, dtype)
    query = torch.randn(context + 300, heads * dim, generator=random)
    options = {"scale": 0.2, "window": window}
    whole = attend(make_pool(isa, 2), query, paged, [(0, context, context), (context, 300, 300)], **options)
    for threads in (1, 3, 16):
        pool = make_pool(isa, threads)
        for begin, end in ((0, 1), (5, 70), (63, 65), (500, 530), (1023, 1200), (1199, 1200)):
            part = attend(pool, query[begin:end], paged, [(0, end - begin, end)], **options)
            assert torch.equal(part, whole[begin:end])
        together = attend(pool, query, paged, [(0, context, context), (context, 300, 300)], **options)
        assert torch.equal(together, whole)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_later_keys_never_reach_an_earlier_row(
    pool: KernelPool, random: torch.Generator, value: float
) -> None:
    paged = make_cache(random, [100], 1, 16, 16, torch.float32)
    query = torch.randn(100, 32, generator=random)
    clean = attend(pool, query, paged, [(0, 100, 100)], scale=0.25)
    slot = paged.tables[0, 90 // 16] * 16 + 90 % 16
    paged.keys.view(-1, 16)[slot] = value
    paged.values.view(-1, 16)[slot] = value
    out = attend(pool, query, paged, [(0, 100, 100)], scale=0.25)
    assert torch.equal(out[:90], clean[:90])
    assert out[90:].isnan().all()


def test_rows_of_no_sequence_are_left_alone(pool: KernelPool, random: torch.Generator) -> None:
    paged = make_cache(random, [5], 1, 16, 4, torch.float32)
    out = torch.full((4, 16), 7.0)
    query = torch.randn(4, 16, generator=random)
    pool.run(
        operations.paged_attention(
            query, paged.keys, paged.values, paged.tables, [(1, 2, 5)], out, scale=0.25
        )
    )
    assert (out[[0, 3]] == 7.0).all()
    assert (out[1:3] != 7.0).all()


def test_blocks_before_the_window_are_not_read(pool: KernelPool, random: torch.Generator) -> None:
    """A cache that gave such blocks away leaves whatever number in their place."""
    paged = make_cache(random, [100], 1, 16, 16, torch.float32)
    query = torch.randn(2, 16, generator=random)
    before = attend(pool, query, paged, [(0, 2, 100)], scale=0.25, window=20)
    paged.tables[0, :4] = -1
    assert torch.equal(attend(pool, query, paged, [(0, 2, 100)], scale=0.25, window=20), before)


def test_large_scores_neither_overflow_nor_vanish(pool: KernelPool) -> None:
    keys = torch.zeros(40, 4, 1, 16)
    values = torch.arange(160.0).view(40, 4, 1, 1).repeat(1, 1, 1, 16)
    keys.view(160, 16)[77] = 1000.0
    query = torch.full((1, 16), 1000.0)
    out = torch.empty(1, 16)
    tables = torch.arange(40)[None]
    pool.run(operations.paged_attention(query, keys, values, tables, [(0, 1, 160)], out, scale=1.0))
    assert (out == 77.0).all()
