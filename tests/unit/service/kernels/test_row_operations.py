"""Norms, rotation and cache writes, activations, sums and look-ups against torch in float64."""

import math

import pytest
import torch
from kernel_cache import keys_as_rows, values_as_rows

from service.kernels import operations
from service.kernels.library import KernelPool

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {
    torch.float32: {"rtol": 3e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-6},
    torch.float16: {"rtol": 1e-3, "atol": 1e-6},
}


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 15, 16, 33, 576])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(
    pool: KernelPool, random: torch.Generator, dtype: torch.dtype, columns: int, offset: float
) -> None:
    x = torch.randn(5, columns + 3, generator=random).to(dtype)[:, 2 : 2 + columns]
    weight = torch.randn(columns, generator=random).to(dtype)
    out = torch.empty(5, columns, dtype=dtype)
    pool.run(operations.rms_norm(x, weight, out, 1e-5, offset=offset))
    torch.testing.assert_close(out.double(), norm(x, weight, 1e-5, offset), **TOLERANCE[dtype])
    single = torch.empty(1, columns, dtype=dtype)
    pool.run(operations.rms_norm(x[3:4], weight, single, 1e-5, offset=offset))
    assert torch.equal(single[0], out[3])


def test_rms_norm_of_chosen_rows_added_to_a_residual(pool: KernelPool, random: torch.Generator) -> None:
    x, weight = torch.randn(9, 20, generator=random), torch.randn(20, generator=random)
    residual = torch.randn(3, 20, generator=random)
    chosen = torch.tensor([8, 0, 8])
    out = torch.empty(3, 20)
    pool.run(operations.rms_norm(x, weight, out, 1e-6, scale=0.5, residual=residual, row_index=chosen))
    expected = residual.double() + 0.5 * norm(x[chosen], weight, 1e-6, 0.0)
    torch.testing.assert_close(out.double(), expected, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 32), (13, 6), (16, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_rotation_and_cache_write(
    pool: KernelPool,
    random: torch.Generator,
    dtype: torch.dtype,
    dim: int,
    rotary: int,
    interleaved: bool,
    normed: bool,
    block_size: int,
) -> None:
    rows, heads, kv_heads = 7, 4, 2
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=random)
    keys = torch.full((5, block_size, kv_heads, dim), 9.0, dtype=dtype)
    values = keys.clone()
    slots = torch.randperm(5 * block_size, generator=random)[:rows]
    slots[2] = -1
    positions = torch.randint(0, 30, (rows,), generator=random)
    angles = torch.rand(30, rotary // 2, generator=random) * 6
    cosine, sine = angles.cos(), angles.sin()
    weights = [torch.randn(dim, generator=random) for _ in range(2)]
    query = torch.empty(rows, heads * dim)
    pool.run(
        operations.rotate_and_cache(
            qkv,
            query,
            keys,
            values,
            slots,
            cosine=cosine if rotary else None,
            sine=sine if rotary else None,
            positions=positions,
            interleaved=interleaved,
            query_norm=weights[0] if normed else None,
            key_norm=weights[1] if normed else None,
            eps=1e-6,
            norm_offset=1.0,
        )
    )
    q, k, v = qkv.double().view(rows, -1, dim).split([heads, kv_heads, kv_heads], 1)
    if normed:
        q, k = norm(q, weights[0], 1e-6, 1.0), norm(k, weights[1], 1e-6, 1.0)
    q, k = (
        rotate(x, cosine.double()[positions], sine.double()[positions], rotary, interleaved) for x in (q, k)
    )
    torch.testing.assert_close(query.double().view(rows, heads, dim), q, rtol=1e-5, atol=1e-5)
    written = slots >= 0
    at = slots[written]
    keys, values = keys_as_rows(keys).contiguous(), values_as_rows(values).contiguous()
    tolerance = {"rtol": TOLERANCE[dtype]["rtol"], "atol": 1e-5}
    torch.testing.assert_close(keys.view(-1, kv_heads, dim)[at].double(), k[written], **tolerance)
    assert torch.equal(values.view(-1, kv_heads, dim)[at], v[written].to(dtype))
    untouched = torch.ones(5 * block_size, dtype=torch.bool)
    untouched[at] = False
    assert (keys.view(-1, kv_heads, dim)[untouched] == 9.0).all()
    assert (values.view(-1, kv_heads, dim)[untouched] == 9.0).all()


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int, interleaved: bool
) -> torch.Tensor:
    if not rotary:
        return x
    out = x.clone()
    half = rotary // 2
    first = slice(0, rotary, 2) if interleaved else slice(0, half)
    second = slice(1, rotary, 2) if interleaved else slice(half, rotary)
    a, b, cos, sin = x[..., first], x[..., second], cos[:, None], sin[:, None]
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


FUNCTIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}


@pytest.mark.parametrize("kind", list(FUNCTIONS))
@pytest.mark.parametrize("columns", [1, 17, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(
    pool: KernelPool, random: torch.Generator, kind: str, columns: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(3, 2 * columns, generator=random) * 4).to(dtype)
    out = torch.empty(3, columns, dtype=dtype)
    pool.run(operations.activation(x, out, kind))
    gate, up = x.double().chunk(2, 1)
    tolerance = {"rtol": max(1e-5, TOLERANCE[dtype]["rtol"]), "atol": 3e-6}
    torch.testing.assert_close(out.double(), FUNCTIONS[kind](gate) * up, **tolerance)


@pytest.mark.parametrize("kind", list(FUNCTIONS))
def test_activation_over_all_magnitudes(pool: KernelPool, kind: str) -> None:
    size = torch.logspace(-38, 38, 1001)
    x = torch.cat([size, -size, torch.zeros(6)])[None]
    out = torch.empty_like(x)
    pool.run(operations.activation(x, out, kind, gated=False))
    torch.testing.assert_close(out.double(), FUNCTIONS[kind](x.double()), rtol=2e-6, atol=4e-7)


def test_activations_of_what_is_not_finite(pool: KernelPool) -> None:
    x = torch.tensor([[math.inf, math.nan]])
    for kind in FUNCTIONS:
        out = torch.empty(1, 2)
        pool.run(operations.activation(x, out, kind, gated=False))
        assert out[0, 0] == math.inf
        assert out[0, 1].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_with_scale(pool: KernelPool, random: torch.Generator, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(4, 700, generator=random).to(dtype) for _ in range(2))
    out = torch.empty(4, 700)
    pool.run(operations.add(x, residual, out, 0.25))
    torch.testing.assert_close(out, residual.float() + 0.25 * x.float())


@pytest.mark.parametrize(
    ("format", "group"), [("float32", 0), ("bfloat16", 0), ("float16", 0), ("int8", 32), ("int4", 32)]
)
def test_look_up_in_packed_weights(
    pool: KernelPool, random: torch.Generator, format: str, group: int
) -> None:
    packed = pool.pack(torch.randn(50, 37, generator=random), format, group=group)
    ids = torch.tensor([49, 0, 16, 15, 49])
    out = torch.empty(5, 37)
    pool.run(operations.embedding(ids, packed, out, 2.0))
    assert torch.equal(out, 2.0 * pool.unpack(packed)[ids])


@pytest.mark.parametrize("dtype", DTYPES)
def test_look_up_in_rows(pool: KernelPool, random: torch.Generator, dtype: torch.dtype) -> None:
    table = torch.randn(50, 37, generator=random).to(dtype)
    ids = torch.tensor([49, 0, 3])
    out = torch.empty(3, 37, dtype=dtype)
    pool.run(operations.embedding(ids, table, out))
    assert torch.equal(out, table[ids])


def test_operations_of_a_program_see_what_came_before(pool: KernelPool, random: torch.Generator) -> None:
    x = torch.randn(8, 64, generator=random)
    first, second = (torch.randn(64, 64, generator=random) for _ in range(2))
    hidden, out = torch.empty(8, 64), torch.empty(8, 64)
    normed, ones = torch.empty(8, 64), torch.ones(64)
    pool.run(
        operations.linear(x, pool.pack(first), hidden),
        operations.rms_norm(hidden, ones, normed, 1e-6),
        operations.linear(normed, pool.pack(second), out, residual=x),
    )
    expected = x + norm(x @ first.T, ones, 1e-6, 0.0).float() @ second.T
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
