"""A row's result is the same, bit for bit, whatever else is in the batch and however its sequence was cut."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoder_harness import Harness, Stream, load_decoder
from tiny_models import FAMILIES, VOCAB_SIZE, make_tiny_model

from service.models.decoder import Decoder
from service.ops.attention import AttentionShape, attend, plan_attention
from service.ops.row_stable_linear import RowStableLinear
from service.ops.torch_ops import TorchOps

LENGTH = 200
DECODED = 12


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]


def alone(decoder: Decoder, kv_dtype: torch.dtype) -> torch.Tensor:
    """Logits of all positions: the prompt at once, the rest token by token, nothing else in the batch."""
    token_ids = prompt_of(LENGTH + DECODED)
    harness = Harness(decoder, num_blocks=512, kv_dtype=kv_dtype)
    stream = harness.start(token_ids[:LENGTH])
    return torch.cat([harness.prefill(stream), harness.decode(stream, token_ids[LENGTH:])])


def in_company(decoder: Decoder, kv_dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same positions, in chunks of random size among other sequences that come, decode and go."""
    generator = random.Random(seed)
    harness = Harness(decoder, num_blocks=4096, kv_dtype=kv_dtype, seed=seed)
    stream = harness.start(prompt_of(LENGTH + DECODED))
    stream.prompt_length = LENGTH
    others: list[Stream] = []
    rows = []
    while stream.computed < len(stream.tokens):
        others = [other for other in others if other.computed < len(other.tokens)]
        while len(others) < generator.randrange(12):
            others.append(harness.start(prompt_of(generator.randrange(1, 200), generator.randrange(1000))))
        pieces = [(o, min(generator.randrange(1, 60), len(o.tokens) - o.computed)) for o in others]
        count = min(generator.choice([1, 1, 2, 5, 17, 64]), len(stream.tokens) - stream.computed)
        pieces.insert(generator.randrange(len(pieces) + 1), (stream, count))
        logits = harness.step(pieces, all_rows=True)
        parts = logits.split([count for _, count in pieces])
        rows += [part for part, (owner, _) in zip(parts, pieces, strict=True) if owner is stream]
    return torch.cat(rows)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_batch_mates_and_chunks_do_not_matter(tmp_path: Path, family: str, dtype: str) -> None:
    decoder, kv_dtype = load_decoder(make_tiny_model(tmp_path, family), dtype), getattr(torch, dtype)
    expected = alone(decoder, kv_dtype)
    assert torch.equal(in_company(decoder, kv_dtype, seed=3), expected)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ("llama", "gemma2", "qwen3_moe")]
)
def test_other_families(tmp_path: Path, family: str) -> None:
    decoder = load_decoder(make_tiny_model(tmp_path, family, num_hidden_layers=2))
    assert torch.equal(in_company(decoder, torch.float32, seed=7), alone(decoder, torch.float32))


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_ropes_that_depend_on_the_prompt(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        make_tiny_model(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    else:
        make_tiny_model(tmp_path, rope_parameters=rope, max_position_embeddings=64)
    decoder = load_decoder(tmp_path)
    assert torch.equal(in_company(decoder, torch.float32, seed=1), alone(decoder, torch.float32))


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_do_not_matter(tmp_path: Path, dtype: str) -> None:
    model_dir = make_tiny_model(tmp_path, intermediate_size=1000, num_hidden_layers=2)
    expected = alone(load_decoder(model_dir, dtype), torch.float32)
    torch.set_num_threads(2)
    harness = Harness(load_decoder(model_dir, dtype), num_blocks=512)
    assert torch.equal(harness.prefill(harness.start(prompt_of(LENGTH + DECODED)), chunk=90), expected)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
def test_recomputing_with_other_blocks_gives_the_same(tmp_path: Path, block_size: int) -> None:
    """As after preemption: what was decoded is part of the prompt, in other blocks, of another size even."""
    decoder = load_decoder(make_tiny_model(tmp_path))
    expected = alone(decoder, torch.float32)
    harness = Harness(decoder, num_blocks=1024, block_size=block_size, seed=5)
    assert torch.equal(harness.prefill(harness.start(prompt_of(LENGTH + DECODED)), chunk=101), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "columns"), [(96, 64), (1000, 333), (2500, 576), (64, 5000)])
def test_linear_rows(count: int, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    weight = (torch.randn(count, columns, generator=generator) * 0.05).to(dtype)
    x = torch.randn(156, columns, generator=generator)
    linear = RowStableLinear()
    expected = linear(x, weight, None)
    torch.testing.assert_close(expected, (x.double() @ weight.double().T).float(), atol=1e-4, rtol=1e-4)
    for rows in (1, 4, 8, 16, 20, 64, 101):
        chosen = torch.randperm(156, generator=generator)[:rows]
        assert torch.equal(linear(x[chosen], weight, None), expected[chosen])
    torch.set_num_threads(2)
    assert torch.equal(RowStableLinear()(x[:75], weight, None), expected[:75])


class FickleBlas:
    """A torch.mm that sums in one order, but products that `differs` picks come out different in the last bits."""

    def __init__(self, differs: Callable[[int, bool], bool]) -> None:
        self._differs = differs
        self.heights: set[tuple[int, bool]] = set()

    def __call__(
        self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        transposed = left.shape[0] == FICKLE_COUNT
        height = right.shape[1] if transposed else left.shape[0]
        result = torch.zeros(left.shape[0], right.shape[1])
        for column, row in zip(left.t(), right, strict=True):
            result += column[:, None] * row
        result *= 1 + 1e-6 if self._differs(height, transposed) else 1
        self.heights.add((height, transposed))
        return result if out is None else out.copy_(result)


FICKLE_COUNT = 99
FICKLE: dict[str, tuple[Callable[[int, bool], bool], set[tuple[int, bool]]]] = {
    "nothing": (lambda *_: False, {(64, False), (16, False), (4, False)}),
    "few rows in one layout": (
        lambda height, transposed: height < 16 and not transposed,
        {(64, True), (16, True), (4, True)},
    ),
    "few rows": (lambda height, _: height < 16, {(64, False), (16, False)}),
    "every height": (lambda height, _: height in (4, 64), {(4, False)}),
    "64 rows with threads": (
        lambda height, _: height == 64 and torch.get_num_threads() > 1,
        {(16, False), (4, False)},
    ),
    "all with threads": (lambda *_: torch.get_num_threads() > 1, {(64, False), (16, False), (4, False)}),
}


@pytest.mark.parametrize(("differs", "used"), FICKLE.values(), ids=FICKLE)
def test_heights_that_differ_are_not_used(
    monkeypatch: pytest.MonkeyPatch, differs: Callable[[int, bool], bool], used: set[tuple[int, bool]]
) -> None:
    weight = torch.randn(FICKLE_COUNT, 40, generator=torch.Generator().manual_seed(0))
    x = torch.randn(156, 40, generator=torch.Generator().manual_seed(1))
    blas = FickleBlas(differs)
    monkeypatch.setattr(torch, "mm", blas)
    alone = RowStableLinear()(x, weight, None)
    torch.set_num_threads(2)
    linear = RowStableLinear()
    linear(x, weight, None)
    blas.heights.clear()
    results = torch.cat(
        [linear(x[:1], weight, None), linear(x[1:21], weight, None), linear(x[21:], weight, None)]
    )
    assert blas.heights == used
    assert torch.equal(results, alone)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activation_is_that_of_torch_and_the_same_everywhere(activation: str) -> None:
    reference = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.nn.functional.relu,
    }[activation]
    ops = TorchOps()
    x = torch.randn(64, 2 * 37, generator=torch.Generator().manual_seed(0)) * 4
    x[0, :4] = torch.tensor([-200.0, 200.0, -0.0, 0.0])
    result = ops.gated_activation(x, activation)
    torch.testing.assert_close(result, reference(x[:, :37]) * x[:, 37:], atol=1e-5, rtol=1e-5)
    for first, last in ((0, 1), (3, 7), (10, 61)):
        assert torch.equal(ops.gated_activation(x[first:last], activation), result[first:last])


class Rows:
    """One sequence's rows, as the plan wants them."""

    def __init__(self, query_start: int, query_length: int, context_length: int) -> None:
        self.query_start, self.query_length, self.context_length = query_start, query_length, context_length


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1), (40, 2)])
@pytest.mark.parametrize("window", [None, 1, 50, 64, 100])
def test_attention_is_softmax_attention(heads: int, kv_heads: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(heads)
    length, size, block_size = 200, 16, 16
    shape = AttentionShape(heads, kv_heads, size, scale=0.25)
    keys, values = (torch.randn(16, block_size, kv_heads, size, generator=generator) for _ in range(2))
    table = torch.randperm(16, generator=generator)[None, :13]
    query = torch.randn(length, heads, size, generator=generator)
    plan = plan_attention(shape, window, [Rows(0, length, length)], table, block_size)
    result = attend(shape, plan, query, keys, values)
    mine, theirs = (cache[table[0]].flatten(0, 1)[:length].transpose(0, 1) for cache in (keys, values))
    mine, theirs = (tensor.repeat_interleave(heads // kv_heads, 0).double() for tensor in (mine, theirs))
    scores = query.transpose(0, 1).double() @ mine.transpose(1, 2) * 0.25
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ theirs
    torch.testing.assert_close(result.double(), expected.transpose(0, 1), atol=1e-5, rtol=1e-5)
    for position in (0, 63, 64, 137, length - 1):
        single = plan_attention(shape, window, [Rows(0, 1, position + 1)], table, block_size)
        assert torch.equal(
            attend(shape, single, query[position : position + 1], keys, values)[0], result[position]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_in_parts_is_the_joined_one_and_keeps_rows_apart(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = tuple(torch.randn(rows, 64, generator=generator).to(dtype) for rows in (640, 40, 40))
    x, bias = torch.randn(68, 64, generator=generator), torch.randn(720, generator=generator)
    ops = TorchOps()
    whole = ops.linear(x, parts, bias)
    torch.testing.assert_close(whole, ops.linear(x, torch.cat(parts), bias))
    for first in range(0, 68, 4):
        assert torch.equal(ops.linear(x[first : first + 4], parts, bias), whole[first : first + 4])
