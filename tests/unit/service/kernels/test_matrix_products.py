"""Products with packed weights: right against float64, and the same bits whatever is computed beside a row."""

import math
from collections.abc import Callable

import pytest
import torch

from service.kernels import operations
from service.kernels.layout import INTEGER_FORMATS
from service.kernels.library import KernelPool
from service.kernels.packed import PackedWeight

FORMATS = [
    ("float32", 0),
    ("bfloat16", 0),
    ("float16", 0),
    ("int8", 0),
    ("int8", 16),
    ("int8", 128),
    ("int4", 0),
    ("int4", 32),
    ("int4", 64),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def multiply(pool: KernelPool, x: torch.Tensor, weight: PackedWeight, **options: object) -> torch.Tensor:
    out = torch.full((len(x), weight.rows), math.nan)
    pool.run(operations.linear(x, weight, out, **options))
    return out


def bound(x: torch.Tensor, weight: torch.Tensor, format: str) -> torch.Tensor:
    """Error allowed for sums in fp32: a few roundings of the sum of magnitudes; beside integer weights also half a step of
    each input, whose steps are a 32,767th of a largest one.
    """
    x, weight = x.double().abs(), weight.double().abs()
    error = 8e-7 * math.sqrt(x.shape[1]) * (x @ weight.T) + 1e-30
    if format in INTEGER_FORMATS:
        error += x.amax(1, keepdim=True) / 65534 * weight.sum(1)
    return error


def assert_product(pool: KernelPool, x: torch.Tensor, packed: PackedWeight, out: torch.Tensor) -> None:
    weight = pool.unpack(packed).double()
    assert ((out.double() - x.double() @ weight.T).abs() <= bound(x, weight, packed.format)).all()


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 33), (40, 258), (63, 131), (128, 64), (33, 1100)])
def test_products_are_right_and_rows_independent(
    pool: KernelPool, random: torch.Generator, format: str, group: int, n: int, k: int
) -> None:
    x = torch.randn(33, k, generator=random)
    packed = pool.pack(torch.randn(n, k, generator=random), format, group=group)
    together = multiply(pool, x, packed)
    assert_product(pool, x, packed, together)
    for rows in range(1, 34):
        assert torch.equal(multiply(pool, x[:rows], packed), together[:rows])


@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_many_rows_equal_single_rows(
    pool: KernelPool, random: torch.Generator, format: str, group: int
) -> None:
    k = 4098
    x = torch.randn(230, k, generator=random)
    packed = pool.pack(torch.randn(35, k, generator=random), format, group=group)
    together = multiply(pool, x, packed)
    assert_product(pool, x, packed, together)
    for row in (0, 1, 100, 191, 192, 229):
        assert torch.equal(multiply(pool, x[row : row + 1], packed)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 50])
def test_thread_count_changes_nothing(
    make_pool: Callable[[str, int], KernelPool],
    random: torch.Generator,
    isa: str,
    dtype: torch.dtype,
    rows: int,
) -> None:
    x = torch.randn(rows, 130, generator=random).to(dtype)
    weight = torch.randn(100, 130, generator=random).bfloat16()
    results = []
    for threads in (1, 2, 3, 7):
        pool = make_pool(isa, threads)
        results.append(multiply(pool, x, pool.pack(weight)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 75])
def test_inputs_of_every_type(
    pool: KernelPool, random: torch.Generator, dtype: torch.dtype, weight_dtype: torch.dtype, k: int
) -> None:
    x = torch.randn(33, k, generator=random).to(dtype)
    packed = pool.pack(torch.randn(50, k, generator=random).to(weight_dtype))
    out = multiply(pool, x, packed)
    assert_product(pool, x, packed, out)
    for rows in (1, 2, 15, 16, 17, 32):
        assert torch.equal(multiply(pool, x[:rows], packed), out[:rows])


@pytest.mark.parametrize(("format", "group"), [("bfloat16", 0), ("int8", 0), ("int8", 32), ("int4", 32)])
@pytest.mark.parametrize(("n", "k"), [(17, 33), (40, 258), (63, 131), (48, 64), (33, 1100)])
def test_rounded_inputs_give_right_products_in_any_number_of_rows(
    pool: KernelPool, random: torch.Generator, format: str, group: int, n: int, k: int
) -> None:
    x = torch.randn(103, k, generator=random).bfloat16()
    packed = pool.pack(torch.randn(n, k, generator=random), format, group=group)
    together = multiply(pool, x, packed)
    assert_product(pool, x, packed, together)
    for rows in (*range(1, 34), 47, 64, 96, 102):
        assert torch.equal(multiply(pool, x[:rows], packed), together[:rows])


@pytest.mark.parametrize(("format", "group"), [("bfloat16", 0), ("int8", 0), ("int4", 32)])
@pytest.mark.parametrize("rows", [2, 9, 250])
def test_more_threads_than_cpus_share_large_products_out(
    make_pool: Callable[[str, int], KernelPool],
    random: torch.Generator,
    isa: str,
    format: str,
    group: int,
    rows: int,
) -> None:
    x = torch.randn(rows, 512, generator=random)
    alone, many = make_pool(isa, 1), make_pool(isa, 16)
    packed = alone.pack(torch.randn(2000, 512, generator=random), format, group=group)
    expected = multiply(alone, x, packed)
    for _ in range(5):
        assert torch.equal(multiply(many, x, packed), expected)


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_thread_count_changes_nothing_of_integer_products(
    make_pool: Callable[[str, int], KernelPool], random: torch.Generator, isa: str, threads: int
) -> None:
    x = torch.randn(75, 130, generator=random).bfloat16()
    weight = torch.randn(100, 130, generator=random)
    results = []
    for count in (2, threads):
        pool = make_pool(isa, count)
        results.append(multiply(pool, x, pool.pack(weight, "int8")))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_bias_residual_scale_and_softcap(
    pool: KernelPool, random: torch.Generator, dtype: torch.dtype
) -> None:
    rows, n, k = 9, 37, 50
    x = torch.randn(rows, 80, generator=random)[:, 11 : 11 + k]
    weight = torch.randn(n, k, generator=random)
    packed = pool.pack(weight)
    bias = torch.randn(n, generator=random).to(dtype)
    room = torch.zeros(rows, 90, dtype=dtype)
    out = room[:, 5 : 5 + n]
    residual = torch.randn(rows, n, generator=random).to(dtype)
    pool.run(operations.linear(x, packed, out, bias=bias, residual=residual, scale=0.5, softcap=3.0))
    value = (x.double() @ weight.double().T + bias.double()) * 0.5
    expected = residual.double() + 3 * torch.tanh(value / 3)
    torch.testing.assert_close(
        out.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=2e-5
    )
    assert room[:, :5].count_nonzero() == room[:, 5 + n :].count_nonzero() == 0


def test_output_may_be_the_residual(pool: KernelPool, random: torch.Generator) -> None:
    x, weight = torch.randn(3, 20, generator=random), torch.randn(20, 20, generator=random)
    residual = torch.randn(3, 20, generator=random)
    out = residual.clone()
    pool.run(operations.linear(x, pool.pack(weight), out, residual=out))
    torch.testing.assert_close(out, residual + x @ weight.T)


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_what_is_not_finite_stays_in_its_row(
    pool: KernelPool, random: torch.Generator, format: str, group: int, value: float, rows: int
) -> None:
    weight = torch.rand(20, 40, generator=random) + 0.5
    packed = pool.pack(weight, format, group=group)
    x = torch.rand(rows, 40, generator=random)
    clean = multiply(pool, x, packed)
    x[rows // 2, 7] = value
    out = multiply(pool, x, packed)
    column = pool.unpack(packed)[:, 7]
    assert not out[rows // 2].isfinite().any()
    if value == value:
        assert (out[rows // 2][column > 0] == value).all()
    keep = torch.arange(rows) != rows // 2
    assert torch.equal(out[keep], clean[keep])


@pytest.mark.parametrize(("format", "group"), [("int8", 0), ("int8", 16), ("int4", 32), ("int4", 0)])
def test_whole_numbers_times_integers_are_exact(
    pool: KernelPool, random: torch.Generator, format: str, group: int
) -> None:
    """Inputs of 16 bits, each block of columns with a largest one, need no rounding; neither do sums this small."""
    rows, n, k = 9, 37, 264
    x = torch.randint(-40, 41, (rows, k), generator=random)
    x[:, ::16] = 32767
    values = torch.randint(0, 16, (n, k), generator=random, dtype=torch.uint8)
    groups = k // group + (k % group > 0) if group else 1
    scales = torch.ones(n, groups)
    if format == "int8":
        packed, exact = pool.pack_quantized(values.to(torch.int8) - 8, scales, group=group), values.long() - 8
    else:
        zeros = torch.full((n, groups), 8, dtype=torch.uint8)
        packed, exact = pool.pack_quantized(values, scales, zeros, group=group), values.long() - 8
    assert torch.equal(multiply(pool, x.float(), packed).long(), x @ exact.T)


@pytest.mark.parametrize(("format", "group"), [("int8", 0), ("int8", 32), ("int4", 32)])
@pytest.mark.parametrize("factor", [0.0, 1e-36, 1e-20, 1e20, 1e35])
def test_inputs_of_every_size(
    pool: KernelPool, random: torch.Generator, format: str, group: int, factor: float
) -> None:
    """A row's and a block's largest number set its steps, not its neighbours'."""
    x = torch.randn(8, 512, generator=random)
    x[3] *= factor
    x[5, :128] *= 1e4
    packed = pool.pack(torch.randn(20, 512, generator=random) / 100, format, group=group)
    out = multiply(pool, x, packed)
    assert_product(pool, x, packed, out)
    for row in range(8):
        assert torch.equal(multiply(pool, x[row : row + 1], packed)[0], out[row])
    quiet = x[5:6].clone()
    quiet[:, :128] = 0
    alone = multiply(pool, quiet, packed)
    assert_product(pool, quiet, packed, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values_survive(pool: KernelPool, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    numbers = torch.tensor(
        [info.max, info.min, info.tiny, -info.tiny, 0.0, -0.0, 1.0, math.inf, math.nan], dtype=dtype
    )
    packed = pool.pack(numbers.repeat(17, 1))
    assert torch.equal(pool.unpack(packed).nan_to_num(7.0), numbers.float().repeat(17, 1).nan_to_num(7.0))
    finite = pool.pack(numbers[None, :7].repeat(17, 1))
    out = multiply(pool, torch.eye(7), finite)
    assert torch.equal(out, numbers[:7].float()[:, None].repeat(1, 17))


def test_rounding_of_outputs_matches_torch(pool: KernelPool) -> None:
    """Identity times numbers that lie at, above and below halfway between two of the smaller type."""
    bits = torch.arange(0, 1 << 16, 97, dtype=torch.int32)
    edges = torch.cat(
        [(bits << 16) | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x2FFF, 0x3000)]
    )
    numbers = edges.view(torch.float32)
    numbers = numbers[numbers.isfinite()]
    numbers = numbers[: len(numbers) // 16 * 16].view(-1, 16)
    zero = torch.zeros_like(numbers)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.empty(numbers.shape, dtype=dtype)
        pool.run(operations.add(numbers, zero, out))
        assert torch.equal(out, numbers.to(dtype))


def test_padding_never_reaches_a_result(pool: KernelPool, random: torch.Generator) -> None:
    """Packed into memory that holds NaN everywhere, and rows in three calls of uneven size."""
    weight = torch.randn(21, 31, generator=random)
    for format, group in FORMATS:
        size = pool.library.packed_bytes(format, 21, 31, group)
        out = torch.full((size,), 255, dtype=torch.uint8)
        for first, end in ((0, 5), (5, 20), (20, 21)):
            packed = pool.pack(weight[first:end], format, group=group, rows=21, first_row=first, out=out)
        whole = pool.pack(weight, format, group=group)
        assert torch.equal(pool.unpack(packed), pool.unpack(whole))
        x = torch.randn(4, 31, generator=random)
        assert torch.equal(multiply(pool, x, packed), multiply(pool, x, whole))
        assert multiply(pool, x, packed).isfinite().all()


def test_no_rows_is_no_work(pool: KernelPool, random: torch.Generator) -> None:
    packed = pool.pack(torch.randn(5, 8, generator=random))
    assert multiply(pool, torch.empty(0, 8), packed).shape == (0, 5)
