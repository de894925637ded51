import pytest
import torch

from service.kernels.library import KernelError, KernelPool


@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_int8_is_symmetric_round_to_nearest(pool: KernelPool, random: torch.Generator, group: int) -> None:
    weight = torch.randn(19, 200, generator=random)
    restored = pool.unpack(pool.pack(weight, "int8", group=group))
    size = group or 200
    for begin in range(0, 200, size):
        part = weight[:, begin : begin + size]
        scale = part.abs().amax(1, keepdim=True) / 127
        expected = (part / scale).round() * scale
        torch.testing.assert_close(restored[:, begin : begin + size], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_int4_errs_by_at_most_half_a_step(pool: KernelPool, random: torch.Generator, group: int) -> None:
    weight = torch.randn(19, 200, generator=random)
    restored = pool.unpack(pool.pack(weight, "int4", group=group))
    size = group or 200
    for begin in range(0, 200, size):
        part = weight[:, begin : begin + size]
        step = (part.amax(1).clamp(min=0) - part.amin(1).clamp(max=0)) / 15
        # The zero point is rounded too, so the ends of the range may lie half a step outside.
        error = (restored[:, begin : begin + size] - part).abs().amax(1)
        assert (error <= step * 1.001).all()


def test_search_never_makes_it_worse(pool: KernelPool, random: torch.Generator) -> None:
    weight = torch.randn(30, 256, generator=random)
    plain = (pool.unpack(pool.pack(weight, "int4", group=64)) - weight).square().view(30, 4, 64).sum(-1)
    searched = (
        (pool.unpack(pool.pack(weight, "int4", group=64, search=20)) - weight)
        .square()
        .view(30, 4, 64)
        .sum(-1)
    )
    assert (searched <= plain * (1 + 1e-6)).all()
    assert searched.sum() < 0.98 * plain.sum()


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_constant_and_zero_groups(pool: KernelPool, format: str) -> None:
    weight = torch.zeros(3, 64)
    weight[1] = 5.0
    weight[2] = -5.0
    restored = pool.unpack(pool.pack(weight, format, group=32))
    torch.testing.assert_close(restored, weight)


@pytest.mark.parametrize("group", [0, 16, 32, 128])
@pytest.mark.parametrize("columns", [31, 96, 200])
def test_int4_that_is_quantised_already(
    pool: KernelPool, random: torch.Generator, group: int, columns: int
) -> None:
    groups = -(-columns // group) if group else 1
    values = torch.randint(0, 16, (21, columns), generator=random, dtype=torch.uint8)
    scales = torch.rand(21, groups, generator=random)
    zeros = torch.randint(0, 16, (21, groups), generator=random, dtype=torch.uint8)
    restored = pool.unpack(pool.pack_quantized(values, scales, zeros, group=group))
    column_group = torch.arange(columns) // (group or columns)
    expected = (values.float() - zeros.float()[:, column_group]) * scales[:, column_group]
    assert torch.equal(restored, expected)


def test_int8_that_is_quantised_already(pool: KernelPool, random: torch.Generator) -> None:
    values = torch.randint(-128, 128, (21, 50), generator=random, dtype=torch.int8)
    scales = torch.rand(21, 1, generator=random)
    assert torch.equal(pool.unpack(pool.pack_quantized(values, scales)), values.float() * scales)


@pytest.mark.parametrize(("format", "group"), [("bfloat16", 32), ("int8", 48), ("int4", 8), ("int4", -1)])
def test_groups_that_no_kernel_knows(pool: KernelPool, format: str, group: int) -> None:
    with pytest.raises(KernelError, match="group"):
        pool.pack(torch.zeros(16, 64), format, group=group)
