"""Picks of the kernel against a plain account of what it is to do, and its weights against the exact ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.distribution import Filters, RowSoftmax
from service.kernels import operations
from service.kernels.library import KernelError, KernelPool
from service.kernels.structures import Choice

Integers = npt.NDArray[np.int64]
MakePool = Callable[[str, int], KernelPool]

SIZES = [1, 7, 63, 64, 65, 255, 256, 257, 1000, 49_152, 151_936]
SHAPES = ["wide", "flat", "ties", "equal", "cut", "one"]
ALL = Filters()
CASES = [
    ALL,
    Filters(temperature=0.3),
    Filters(temperature=1e-5),
    Filters(temperature=1e30),
    Filters(top_k=1),
    Filters(top_k=50, temperature=0.8),
    Filters(top_k=900),
    Filters(top_k=40_000),
    Filters(top_k=1 << 40),
    Filters(top_p=0.9, temperature=0.8),
    Filters(top_p=0.5),
    Filters(top_p=1e-9),
    Filters(top_p=1 - 2**-53),
    Filters(top_p=0.9999, temperature=3.0),
    Filters(min_p=0.05),
    Filters(min_p=1.0),
    Filters(min_p=1e-12),
    Filters(typical_p=0.9, temperature=0.8),
    Filters(typical_p=0.2),
    Filters(typical_p=1e-9),
    Filters(typical_p=1 - 2**-53),
    Filters(top_k=40, top_p=0.9),
    Filters(top_k=3000, min_p=0.001),
    Filters(top_p=0.95, min_p=0.02, temperature=1.3),
    Filters(top_p=0.95, typical_p=0.5),
    Filters(min_p=0.01, typical_p=0.7),
    Filters(top_k=100, typical_p=0.6),
    Filters(top_k=40, top_p=0.9, min_p=0.1, typical_p=0.7, temperature=0.8),
]


def make_logits(shape: str, size: int, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    if shape == "wide":
        return logits * 4
    if shape == "ties":
        return (logits * 4).round() / 2
    if shape == "equal":
        return torch.full((size,), -3.25)
    if shape == "cut":
        logits[0] = 1.0
        return torch.where(logits > 0.5, logits * 4, -math.inf)
    if shape == "one":
        return torch.cat([torch.full((size - 1,), -math.inf), torch.tensor([2.0])])
    return logits


def choice(filters: Filters, uniform: int = 0) -> Choice:
    return Choice(
        filters.temperature, filters.top_p, filters.min_p, filters.typical_p, filters.top_k, uniform
    )


def run(
    pool: KernelPool, logits: torch.Tensor, choices: Sequence[Choice]
) -> tuple[list[float], list[int], torch.Tensor]:
    """The largest logits, the tokens and the weights of each row."""
    rows = len(logits)
    largest, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    weights = torch.full(logits.shape, -7, dtype=torch.int32)
    pool.run(operations.sample(logits, choices, largest, tokens, weights))
    return largest.tolist(), tokens.tolist(), weights


def expected_weights(scores: npt.NDArray[np.float32], weights: Integers, filters: Filters) -> Integers:
    """What the filters leave of a row's `weights` [columns], by plain sorting and exact sums."""
    columns, kept = len(scores), weights.copy()
    if 0 < filters.top_k < columns:
        kept[scores < np.sort(scores)[columns - filters.top_k]] = 0
    if filters.top_p < 1.0:
        order = np.lexsort((np.arange(columns), -scores.astype(np.float64)))
        through = kept[order].cumsum()
        wanted = max(1, math.ceil(filters.top_p * float(through[-1])))
        kept[order[int(through.searchsorted(wanted)) + 1 :]] = 0
    kept[kept < filters.min_p * 2**30] = 0
    if filters.typical_p < 1.0:
        factor = np.float32(math.log2(math.e) / filters.temperature)
        with np.errstate(over="ignore"):
            powers = np.maximum((scores - scores.max()) * factor, np.float32(-40))
        surprises = (powers * np.float32(-(2**20))).astype(np.int64)
        total = int(kept.sum())
        expected = np.float32(sum(map(int, kept[kept > 0] * surprises[kept > 0])) / total / 2**20)
        distances = np.abs(powers + expected)
        order = np.argsort(distances, kind="stable")
        through = kept[order].cumsum()
        wanted = max(1, math.ceil(filters.typical_p * float(total)))
        kept[distances > distances[order[int(through.searchsorted(wanted))]]] = 0
    return kept


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_kept_and_drawn(isa: str, make_pool: MakePool, size: int, shape: str) -> None:
    pool = make_pool(isa, 2)
    logits = make_logits(shape, size)
    scores = logits.numpy()
    uniforms = [0, 1, 2**63, 2**64 - 1, 0x9E37_79B9_7F4A_7C15]
    for filters in CASES if isa != "generic" or size < 2000 else CASES[::3]:
        rows = [choice(filters, uniform) for uniform in uniforms]
        unfiltered = choice(Filters(filters.temperature))
        largest, tokens, weights = run(pool, logits.repeat(len(rows) + 1, 1), [unfiltered, *rows])
        own = weights.numpy().astype(np.int64)
        assert largest == [float(scores.max())] * (len(rows) + 1)
        assert own[0].max() == 2**30
        expected = expected_weights(scores, own[0], filters)
        through = expected.cumsum()
        for row, uniform in enumerate(uniforms, start=1):
            assert np.array_equal(own[row], expected), filters
            point = uniform * int(through[-1]) >> 64
            assert tokens[row] == int(through.searchsorted(point, side="right")), filters


@pytest.mark.parametrize("temperature", [1e-5, 0.1, 0.8, 1.0, 7.0, 1e4, 1e38, 1e300])
def test_weights_are_those_of_exact_exponentials(pool: KernelPool, temperature: float) -> None:
    scores = torch.cat([make_logits("wide", 30_000), torch.linspace(-3, 20, 20_001), torch.tensor([-1e38])])
    weights = run(pool, scores[None], [choice(Filters(temperature))])[2][0].double()
    factor = np.float32(math.log2(math.e) / temperature)
    powers = (scores - scores.max()) * factor
    exact = 2.0**30 * torch.exp2(powers.double())
    # The exponential is wrong by 1.1 units in the last place, 2**-23 of its size, and the cast by half a weight.
    assert bool(((weights - exact).abs() <= exact * 1.1 * 2.0**-23 + 0.5001).all())


@pytest.mark.parametrize("shape", ["wide", "flat", "ties", "cut"])
@pytest.mark.parametrize("size", [7, 1000, 49_152])
def test_filters_keep_what_those_of_numpy_and_torch_keep(pool: KernelPool, size: int, shape: str) -> None:
    logits = make_logits(shape, size, seed=3)
    for filters in CASES:
        weights = run(pool, logits[None], [choice(filters)])[2][0].numpy().astype(np.int64)
        candidates = RowSoftmax(size).filtered(logits.numpy(), float(logits.max()), filters)
        expected = np.zeros(size, dtype=np.int64)
        expected[slice(None) if candidates.ids is None else candidates.ids] = candidates.weights
        both = (weights > 0) & (expected > 0)
        assert (np.abs(weights - expected) <= expected * 2.0**-22 + 1)[both].all(), filters
        # Where rounding moves a border, it moves it over tokens that weigh next to nothing together.
        assert np.maximum(weights, expected)[~both].sum() <= expected.sum() * 2.0**-20, filters


def test_every_instruction_set_gives_the_same_bits(kernel_isas: Sequence[str], make_pool: MakePool) -> None:
    logits = torch.stack([make_logits(shape, 5003, seed=7) for shape in SHAPES])
    logits = logits.repeat_interleave(len(CASES), 0)
    choices = [
        choice(filters, 0x1234_5678_9ABC_DEF0 * (row + 1) % 2**64) for row, filters in enumerate(CASES * 6)
    ]
    first, *others = (run(make_pool(isa, 1), logits, choices) for isa in kernel_isas)
    for other in others:
        assert other[:2] == first[:2]
        assert torch.equal(other[2], first[2])


def test_a_row_depends_neither_on_its_neighbours_nor_on_threads(isa: str, make_pool: MakePool) -> None:
    logits = torch.stack([make_logits(SHAPES[row % 6], 3001, seed=row) for row in range(len(CASES))])
    logits[4, 17] = math.nan
    choices = [choice(filters, 2**64 // 3 + row) for row, filters in enumerate(CASES)]
    alone = [
        run(make_pool(isa, 1), logits[row : row + 1], choices[row : row + 1]) for row in range(len(CASES))
    ]
    order = torch.randperm(len(CASES), generator=torch.Generator().manual_seed(4)).tolist()
    for threads in (1, 2, 3, 5):
        for part in (order, order[:7], order[::-1]):
            largest, tokens, weights = run(
                make_pool(isa, threads), logits[part], [choices[row] for row in part]
            )
            for place, row in enumerate(part):
                assert str(largest[place]) == str(alone[row][0][0])
                assert tokens[place] == alone[row][1][0]
                assert torch.equal(weights[place], alone[row][2][0])


@pytest.mark.parametrize("size", [1, 7, 64, 257, 5003])
def test_greedy_takes_the_first_of_the_largest(pool: KernelPool, size: int) -> None:
    logits = torch.stack([make_logits(shape, size, seed=2) for shape in SHAPES])
    ignored = Choice(0.0, 0.1, 1.0, 0.1, 1, 2**64 - 1)
    largest, tokens, _ = run(pool, logits, [ignored] * len(SHAPES))
    assert tokens == logits.numpy().argmax(axis=1).tolist()
    assert largest == logits.max(dim=1).values.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 64, 1000])
def test_rows_without_a_finite_largest_logit_pick_nothing(
    pool: KernelPool, size: int, temperature: float
) -> None:
    good = make_logits("wide", size)
    rows = [good, *(good.clone() for _ in range(4)), torch.full((size,), -math.inf), good]
    for row, (place, value) in enumerate(
        [(0, math.nan), (size - 1, math.nan), (size // 2, math.inf), (0, -math.nan)]
    ):
        rows[row + 1][place] = value
    choices = [choice(Filters(temperature, top_k=3, top_p=0.9, typical_p=0.9), 5)] * len(rows)
    largest, tokens, weights = run(pool, torch.stack(rows), choices)
    assert [str(value) for value in largest[1:6]] == ["nan", "nan", "inf", "nan", "-inf"]
    assert tokens[1:6] == [-1] * 5
    assert not weights[1:6].any()
    assert tokens[0] == tokens[6] >= 0


def test_zeros_of_either_sign_are_equal(pool: KernelPool) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]] * 4)
    cases = [Filters(top_k=2), Filters(top_p=0.3), Filters(top_p=0.6), Filters(min_p=1.0)]
    weights = run(pool, logits, [choice(filters) for filters in cases])[2]
    assert [row.nonzero().flatten().tolist() for row in weights] == [
        [1, 2, 3, 4],
        [1, 2],
        [1, 2, 3],
        [1, 2, 3, 4],
    ]
    assert run(pool, logits[:1], [Choice()])[1] == [1]


def test_rows_may_lie_apart(pool: KernelPool) -> None:
    wide = make_logits("wide", 4 * 700).reshape(4, 700)
    choices = [choice(Filters(top_p=0.8), row << 60) for row in range(4)]
    assert run(pool, wide[:, 3:503], choices)[1] == run(pool, wide[:, 3:503].contiguous(), choices)[1]


scores = st.floats(-60, 60, width=32) | st.sampled_from([-math.inf, -0.0, 0.0, 1.0, 1e-38, -1e38])
shares = st.floats(1e-12, 1.0) | st.just(1.0)


@given(
    st.lists(scores, min_size=1, max_size=300).filter(lambda row: max(row) > -math.inf),
    st.builds(
        Filters,
        temperature=st.floats(1e-5, 1e5),
        top_k=st.integers(0, 320),
        top_p=shares,
        min_p=st.floats(0, 1),
        typical_p=shares,
    ),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=400, deadline=None)
def test_any_row_with_any_filters(
    kernel_library_pool: KernelPool, row: list[float], filters: Filters, uniform: int
) -> None:
    logits = torch.tensor([row, row])
    choices = [choice(Filters(filters.temperature)), choice(filters, uniform)]
    _, tokens, weights = run(kernel_library_pool, logits, choices)
    own = weights.numpy().astype(np.int64)
    expected = expected_weights(logits[0].numpy(), own[0], filters)
    assert np.array_equal(own[1], expected)
    through = expected.cumsum()
    assert tokens[1] == int(through.searchsorted(uniform * int(through[-1]) >> 64, side="right"))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": math.nan}, "top_p"),
        ({"typical_p": -0.5}, "typical_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
    ],
)
def test_nonsense_is_refused(kernel_library_pool: KernelPool, wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(KernelError, match=word):
        run(kernel_library_pool, torch.zeros(1, 8), [choice(Filters(**wrong))])


def test_tensors_are_checked() -> None:
    largest, tokens = torch.empty(2), torch.empty(2, dtype=torch.int64)
    logits = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="choices"):
        operations.sample(logits, [Choice()], largest, tokens)
    with pytest.raises(ValueError, match="logits"):
        operations.sample(logits.bfloat16(), [Choice()] * 2, largest, tokens)
    with pytest.raises(ValueError, match="tokens"):
        operations.sample(logits, [Choice()] * 2, largest, tokens[:1])
    with pytest.raises(ValueError, match="largest"):
        operations.sample(logits, [Choice()] * 2, largest.double(), tokens)
    with pytest.raises(ValueError, match="weights"):
        operations.sample(logits, [Choice()] * 2, largest, tokens, torch.zeros(2, 7, dtype=torch.int32))
