"""Checkpoints of integers become what the kernels pack from the same numbers, and compute what those stand for."""

from pathlib import Path

import decoder_harness
import pytest
import torch
from decoder_harness import Harness, fill_memory, load_decoder
from quantized_checkpoints import (
    FORMATS,
    Format,
    Integers,
    compressed_format,
    edit_config,
    gptq_format,
    make_quantized_model,
    write_tensors,
)
from safetensors.torch import load_file

from service.kernels.library import KernelPool, load
from service.loader import integer_reader, part_reader
from service.loader.checkpoint import open_checkpoint
from service.loader.fill import fill
from service.models.config import parse_config
from service.models.native_weights import native_weights
from service.models.packing import pack_plan
from service.models.weights import WeightPlan, plan_weights

# Rows of q, k and v whose parts share a panel of sixteen, and columns of k that are no multiple of it.
SIZES = {"head_dim": 12, "intermediate_size": 96, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every tensor comes in several pieces, and every file by columns is read several times."""
    monkeypatch.setattr(part_reader, "CHUNK_BYTES", 900)
    monkeypatch.setattr(integer_reader, "_CHUNKS_AT_ONCE", 1)


def packed_plan(model_dir: Path) -> WeightPlan:
    checkpoint = open_checkpoint(model_dir)
    return pack_plan(plan_weights(parse_config(checkpoint.config), checkpoint))


def pack_joined(pool: KernelPool, parts: list[Integers], group: int) -> torch.Tensor:
    """The parts one after the other as the kernels pack them in one call, groups of the checkpoint cut into theirs."""
    values = torch.cat([part.values for part in parts])
    columns = values.shape[1]
    of_group = torch.arange(0, columns, group or columns) // (parts[0].group or columns)
    scales = torch.cat([part.scales.float()[:, of_group] for part in parts])
    if parts[0].bits == 8:
        return pool.pack_quantized((values - 128).to(torch.int8), scales, group=group).data
    zeros = torch.cat([part.zeros[:, of_group] for part in parts]).to(torch.uint8)
    return pool.pack_quantized(values.to(torch.uint8), scales, zeros, group=group).data


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_packed_as_the_kernels_pack_the_same_integers(tmp_path: Path, format: Format) -> None:
    model_dir, _, integers = make_quantized_model(tmp_path, format, **SIZES)
    plan = packed_plan(model_dir)
    views = {tensor.name: memoryview(bytearray(tensor.nbytes)) for tensor in plan.tensors}
    seen: list[int] = []
    fill(plan, views, 3, seen.append)
    packed = native_weights(plan.tensors, views).matrices
    library = load()
    assert library is not None
    pool = KernelPool(library, threads=1)
    group = {48: 16}.get(format.group, format.group)
    for layer in range(2):
        own, file = f"layers.{layer}", f"model.layers.{layer}"
        joined = {
            "attention.qkv": [f"self_attn.{name}_proj" for name in "qkv"],
            "attention.output": ["self_attn.o_proj"],
            "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "mlp.down": ["mlp.down_proj"],
        }
        for name, modules in joined.items():
            expected = pack_joined(pool, [integers[f"{file}.{module}"] for module in modules], group)
            assert torch.equal(packed[f"{own}.{name}.weight"].data, expected), name
    assert sum(seen) == plan.nbytes
    assert packed["embed_tokens.weight"].format == packed["lm_head.weight"].format == "float16"
    assert plan.dtype == "float16"
    assert plan.integers == format.config["quant_method"]


def logits_of(model_dir: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Of a prompt and five decode steps."""
    monkeypatch.setattr(decoder_harness, "BACKEND", backend)
    harness = Harness(load_decoder(model_dir))
    stream = harness.start(range(3, 40))
    return torch.cat([harness.prefill(stream, chunk=17), harness.decode(stream, range(40, 45))])


@pytest.mark.parametrize(
    ("format", "family"),
    [
        *((name, "llama") for name in FORMATS),
        ("gptq 4 asym", "phi3"),
        ("awq", "mixtral"),
        ("gptq 4 sym", "qwen3_moe"),
        ("packed 4 asym", "qwen3_moe"),
        ("gptq 8", "qwen2"),
        ("awq", "gemma2"),
    ],
)
def test_logits_are_those_of_the_weights_it_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, family: str
) -> None:
    quantized, plain, _ = make_quantized_model(tmp_path, FORMATS[format], family, num_hidden_layers=2)
    expected = logits_of(plain, "torch", monkeypatch)
    found = logits_of(quantized, "cpu", monkeypatch)
    # Beside integer weights inputs are rounded to 16 bits, and every layer's error goes through the next one.
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=6e-4 * expected.abs().max().item())


@pytest.mark.parametrize("format", ["gptq 4 asym", "packed 4 asym"])
def test_shards_do_not_show_and_every_tensor_counts(tmp_path: Path, format: str) -> None:
    whole, _, _ = make_quantized_model(tmp_path / "whole", FORMATS[format], num_hidden_layers=1)
    parts, _, _ = make_quantized_model(tmp_path / "parts", FORMATS[format], num_hidden_layers=1, shards=3)
    memory, digest = fill_memory(packed_plan(whole))
    assert len(list(parts.glob("model-*.safetensors"))) == 3
    assert fill_memory(packed_plan(parts), threads=3) == (memory, digest)
    tensors = load_file(whole / "model.safetensors")
    for kind in ("scales", "qzeros", "qweight", "weight_packed", "weight_scale", "weight_zero_point"):
        name = f"model.layers.0.mlp.down_proj.{kind}"
        if name in tensors:
            changed = {**tensors, name: tensors[name].clone()}
            changed[name].view(-1).view(torch.uint8)[-1] ^= 1
            write_tensors(whole, changed)
            assert fill_memory(packed_plan(whole))[1] != digest, name


@pytest.mark.parametrize("format", ["gptq 4 sym", "packed 4"])
def test_a_head_of_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """Used as it is, also where config.json ties it."""
    quantized, plain, _ = make_quantized_model(
        tmp_path,
        FORMATS[format],
        num_hidden_layers=1,
        rounded=lambda name: name == "lm_head.weight",
    )
    edit_config(quantized, tie_word_embeddings=True)
    expected = logits_of(plain, "torch", monkeypatch)
    found = logits_of(quantized, "cpu", monkeypatch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_layers_that_are_left_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    format = gptq_format(4, 32, True, dynamic={r"-:model\.layers\.0\..*": {}})
    quantized, plain, integers = make_quantized_model(
        tmp_path, format, num_hidden_layers=2, rounded=lambda name: ".1." in name and "_proj" in name
    )
    assert len(integers) == 7
    packed = {tensor.name: tensor.packing for tensor in packed_plan(quantized).tensors}
    assert packed["layers.0.mlp.down.weight"] == "float16"
    assert packed["layers.1.mlp.down.weight"] == "int4"
    expected = logits_of(plain, "torch", monkeypatch)
    torch.testing.assert_close(logits_of(quantized, "cpu", monkeypatch), expected, rtol=1e-4, atol=1e-3)


def test_two_schemes_in_one_checkpoint(tmp_path: Path) -> None:
    eight = compressed_format("pack-quantized", 8, 0)
    both = compressed_format("pack-quantized", 4, 32)
    both.config["config_groups"]["group_1"] = eight.config["config_groups"]["group_0"]
    quantized, _, _ = make_quantized_model(tmp_path, both, num_hidden_layers=2)
    other, _, _ = make_quantized_model(tmp_path / "other", eight, num_hidden_layers=2)
    tensors = load_file(quantized / "model.safetensors")
    second = load_file(other / "model.safetensors")
    layer = {name for name in tensors if ".layers.1." in name}
    write_tensors(quantized, {name: (second if name in layer else tensors)[name] for name in tensors})
    packing = {tensor.name: (tensor.packing, tensor.group) for tensor in packed_plan(quantized).tensors}
    assert packing["layers.0.attention.qkv.weight"] == ("int4", 32)
    assert packing["layers.1.attention.qkv.weight"] == ("int8", 0)


def test_biases_of_the_model_are_used_and_those_of_zeros_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, plain, integers = make_quantized_model(
        tmp_path, FORMATS["gptq 4 sym"], "qwen2", num_hidden_layers=1
    )
    tensors = load_file(quantized / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.bias"].any()
    for module, each in integers.items():
        tensors.setdefault(f"{module}.bias", torch.zeros(len(each.values), dtype=torch.float16))
    write_tensors(quantized, tensors)
    expected = logits_of(plain, "torch", monkeypatch)
    torch.testing.assert_close(logits_of(quantized, "cpu", monkeypatch), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(), (1,), (64,), (64, 1)])
def test_one_scale_for_a_matrix_or_a_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    quantized, _, integers = make_quantized_model(tmp_path, FORMATS["w8a8"], num_hidden_layers=1)
    tensors = load_file(quantized / "model.safetensors")
    module = "model.layers.0.mlp.down_proj"
    scale = torch.rand(shape) + 0.5
    write_tensors(quantized, {**tensors, f"{module}.weight_scale": scale})
    plan = packed_plan(quantized)
    packed = native_weights(plan.tensors, fill_memory(plan)[0]).matrices["layers.0.mlp.down.weight"]
    library = load()
    assert library is not None
    found = KernelPool(library, threads=1).unpack(packed)
    assert torch.equal(found, (integers[module].values - 128).float() * scale.reshape(-1, 1))
