"""The native decoder where inputs are rounded to bfloat16, as for tile registers. Here any instruction set computes so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoder_harness import Harness, load_decoder
from tiny_models import make_tiny_model

from service.kernels.library import KernelPool
from service.models.native_decoder import NativeDecoder
from service.models.packing import Quantization

TOKENS = [(7 * place) % 250 + 3 for place in range(70)]
FAMILIES = ["llama", "qwen3", "gemma3", "olmo2"]


@pytest.fixture
def harness_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Harness]:
    """Makes a harness for a family and a dtype of the weights, as on a machine with the instruction set that is given."""
    monkeypatch.setattr("decoder_harness.BACKEND", "cpu")

    def make(
        family: str, isa: str, dtype: str = "bfloat16", quantization: Quantization | None = None
    ) -> Harness:
        with monkeypatch.context() as patch:
            patch.setattr(KernelPool, "isa", property(lambda _: isa))
            model = make_tiny_model(tmp_path / f"{family}-{isa}", family, dtype=dtype)
            return Harness(load_decoder(model, quantization=quantization))

    return make


def input_dtype(harness: Harness) -> torch.dtype:
    assert isinstance(harness.decoder, NativeDecoder)
    return harness.decoder.input_dtype


@pytest.mark.parametrize("quantization", [None, Quantization("int8", 0)], ids=["bf16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_inputs_give_close_logits(
    harness_of: Callable[..., Harness], family: str, quantization: Quantization | None
) -> None:
    exact, rounded = (harness_of(family, isa, quantization=quantization) for isa in ("avx2", "amx"))
    assert (input_dtype(exact), input_dtype(rounded)) == (torch.float32, torch.bfloat16)
    expected = exact.prefill(exact.start(TOKENS))
    found = rounded.prefill(rounded.start(TOKENS))
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=0.05 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_with_rounded_inputs_is_its_own(harness_of: Callable[..., Harness], family: str) -> None:
    """Whole, in chunks of 7 and token by token: the same bits."""
    harness = harness_of(family, "amx")
    whole = harness.prefill(harness.start(TOKENS))
    assert torch.equal(harness.prefill(harness.start(TOKENS), chunk=7), whole)
    stream = harness.start(TOKENS[:1])
    singles = torch.cat([harness.prefill(stream), harness.decode(stream, TOKENS[1:])])
    assert torch.equal(singles, whole)


@pytest.mark.parametrize(
    ("family", "isa", "dtype", "quantization"),
    [
        ("llama", "avx512", "bfloat16", None),
        ("llama", "amx", "float32", None),
        ("mixtral", "amx", "bfloat16", None),
        ("llama", "amx", "bfloat16", Quantization("int8", 32)),
        ("llama", "amx", "bfloat16", Quantization("int4", 32)),
    ],
)
def test_other_inputs_stay_as_they_are(
    harness_of: Callable[..., Harness],
    family: str,
    isa: str,
    dtype: str,
    quantization: Quantization | None,
) -> None:
    assert input_dtype(harness_of(family, isa, dtype, quantization)) == torch.float32
