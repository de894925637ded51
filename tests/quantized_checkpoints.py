"""Tiny checkpoints of integers in the formats that public quantisers write, made from known numbers.

Packed by the formulas of their repositories, word by word with numbers of numpy: AutoGPTQ
auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py and GPTQModel gptqmodel/utils/model.py (zero points less one), AutoAWQ
awq/modules/linear/gemm.py, compressed-tensors compressors/pack_quantized/helpers.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Integers:
    """A weight (values - zeros) * scales: values [rows, columns] from 0 on, zeros and scales [rows, groups]."""

    values: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    bits: int
    group: int

    @property
    def weight(self) -> torch.Tensor:
        """The weight itself: [rows, columns] float32, exact for scales of float16."""
        columns = self.values.shape[1]
        of_column = torch.arange(columns) // (self.group or columns)
        return (self.values - self.zeros[:, of_column]).float() * self.scales.float()[:, of_column]


@dataclass(frozen=True)
class Format:
    """One way to store integers: its `quantization_config`, and the tensors that hold a module's weight."""

    config: dict[str, Any]
    bits: int
    group: int
    symmetric: bool
    store: Callable[[str, Integers], Tensors]


def draw(shape: tuple[int, ...], bits: int, group: int, symmetric: bool, seed: int) -> Integers:
    """Random integers over the whole range, their scales such that weights are as those of a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    groups = -(-columns // group) if group else 1
    values = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    zeros = torch.randint(0, 1 << bits, (rows, groups), generator=generator)
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) * 0.6 / (1 << bits)
    return Integers(values, zeros, scales.half(), bits, group)


def to_words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """[n, m] -> [n, m * bits / 32] uint32: number `order[i]` of each word's goes to its bits i * bits and up."""
    in_word = 32 // bits
    array = numbers.numpy().astype(np.uint32)
    words = np.zeros((array.shape[0], array.shape[1] // in_word), np.uint32)
    for word in range(words.shape[1]):
        for place in range(in_word):
            source = place if order is None else order[place]
            words[:, word] |= array[:, word * in_word + source] << np.uint32(bits * place)
    return words


def as_int32(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32).copy())


def gptq(module: str, integers: Integers, less_one: bool = True) -> Tensors:
    bits, columns = integers.bits, integers.values.shape[1]
    zeros = to_words(integers.zeros.t(), bits)
    if less_one:
        ones = sum(1 << place for place in range(0, 32, bits))
        zeros = zeros - np.uint32(ones)
    return {
        f"{module}.qweight": as_int32(to_words(integers.values, bits).T),
        f"{module}.qzeros": as_int32(zeros),
        f"{module}.scales": integers.scales.t().contiguous(),
        f"{module}.g_idx": torch.arange(columns, dtype=torch.int32) // (integers.group or columns),
    }


def awq(module: str, integers: Integers) -> Tensors:
    return {
        f"{module}.qweight": as_int32(to_words(integers.values.t(), 4, AWQ_ORDER)),
        f"{module}.qzeros": as_int32(to_words(integers.zeros.t(), 4, AWQ_ORDER)),
        f"{module}.scales": integers.scales.t().contiguous(),
    }


def padded(numbers: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % multiple))


def pack_quantized(module: str, integers: Integers, symmetric: bool = True) -> Tensors:
    """Of signed numbers, which are packed with the lowest of them as 0: `values` as they are."""
    bits, in_word = integers.bits, 32 // integers.bits
    tensors = {
        f"{module}.weight_packed": as_int32(to_words(padded(integers.values, in_word), bits)),
        f"{module}.weight_scale": integers.scales,
        f"{module}.weight_shape": torch.tensor(integers.values.shape),
    }
    if not symmetric:
        words = to_words(padded(integers.zeros.t(), in_word), bits)
        tensors[f"{module}.weight_zero_point"] = as_int32(words.T)
    return tensors


def int_quantized(module: str, integers: Integers) -> Tensors:
    return {
        f"{module}.weight": (integers.values - 128).to(torch.int8),
        f"{module}.weight_scale": integers.scales,
    }


def gptq_format(bits: int, group: int, sym: bool, **more: Any) -> Format:
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": sym, "desc_act": False}
    less_one = more.get("checkpoint_format", "gptq") == "gptq"
    return Format({**config, **more}, bits, group, sym, lambda m, i: gptq(m, i, less_one))


def awq_format(group: int) -> Format:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return Format(config, 4, group, False, awq)


def compressed_format(
    packing: str, bits: int, group: int, symmetric: bool = True, activations: dict[str, Any] | None = None
) -> Format:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "dynamic": False,
    }
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = {
        "quant_method": "compressed-tensors",
        "format": packing,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }
    if packing == "int-quantized":
        return Format(config, bits, group, symmetric, int_quantized)
    return Format(config, bits, group, symmetric, lambda m, i: pack_quantized(m, i, symmetric))


FORMATS = {
    "gptq 4 sym": gptq_format(4, 32, True),
    "gptq 4 asym": gptq_format(4, 16, False),
    "gptq 4 group past the columns": gptq_format(4, 128, True),
    "gptq 4 group of three": gptq_format(4, 48, False),
    "gptq 4 row": gptq_format(4, 0, False),
    "gptq 4 v2": gptq_format(4, 32, False, checkpoint_format="gptq_v2"),
    "gptq 8": gptq_format(8, 32, True),
    "awq": awq_format(32),
    "packed 4": compressed_format("pack-quantized", 4, 32),
    "packed 4 asym": compressed_format("pack-quantized", 4, 16, symmetric=False),
    "packed 4 channel": compressed_format("pack-quantized", 4, 0),
    "packed 8": compressed_format("pack-quantized", 8, 0),
    "w8a8": compressed_format("int-quantized", 8, 0, activations={"num_bits": 8, "dynamic": True}),
}


def is_rounded(name: str) -> bool:
    """Which weights quantisers round: those of the layers but for routers."""
    return (
        name.startswith("model.layers.")
        and name.endswith(".weight")
        and "norm" not in name
        and "gate.weight" not in name
    )


def make_quantized_model(
    directory: Path,
    format: Format,
    family: str = "llama",
    rounded: Callable[[str], bool] = is_rounded,
    shards: int = 1,
    **overrides: Any,
) -> tuple[Path, Path, dict[str, Integers]]:
    """A tiny model in that format, the same with the weights it stands for in float32, and its integers by module."""
    plain = make_tiny_model(directory / "plain", family, dtype="float16", **overrides)
    weights = load_file(plain / "model.safetensors")
    tensors: Tensors = {}
    floats: Tensors = {}
    integers: dict[str, Integers] = {}
    for seed, (name, weight) in enumerate(weights.items()):
        floats[name] = weight.float()
        if not rounded(name):
            tensors[name] = weight
            continue
        module = name.removesuffix(".weight")
        each = draw(tuple(weight.shape), format.bits, format.group, format.symmetric, seed)
        integers[module], floats[name] = each, each.weight
        tensors.update(format.store(module, each))
    quantized = directory / "quantized"
    shutil.copytree(plain, quantized)
    save_file(floats, plain / "model.safetensors")
    write_tensors(quantized, tensors, shards)
    edit_config(quantized, quantization_config=format.config)
    return quantized, plain, integers


def write_tensors(directory: Path, tensors: Tensors, shards: int = 1) -> None:
    """Writes the weights, over `shards` files that take the tensors in turn."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    weight_map = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def edit_config(directory: Path, **values: Any) -> None:
    """Sets keys of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
