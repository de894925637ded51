"""What `quantization_config` may say: formats that are read, and the key by which others are refused."""

import copy
from typing import Any

import pytest

from service.models.config_reader import ConfigError, ConfigReader
from service.models.quantization_config import (
    IntegerScheme,
    StoredQuantization,
    kernel_group,
    read_quantization,
)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def read(values: Any) -> StoredQuantization | None:
    return read_quantization(ConfigReader({"quantization_config": values}, {}))


def compressed(weights: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    own = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    groups = {"group_0": {"targets": ["Linear"], "weights": {**own, **(weights or {})}}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return {**config, **values}


FLOAT8 = {"type": "float", "num_bits": 8, "strategy": "channel", "group_size": None}
BLOCKS = {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 64]}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (None, None),
        ({"quant_method": "fp8"}, StoredQuantization("fp8")),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 64]},
            StoredQuantization("fp8", scale_block=(128, 64)),
        ),
        (GPTQ, StoredQuantization("gptq", (IntegerScheme(4, 128),), zeros_less_one=True)),
        ({**GPTQ, "group_size": -1}, StoredQuantization("gptq", (IntegerScheme(4, 0),), zeros_less_one=True)),
        (
            {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
            StoredQuantization("gptq", (IntegerScheme(8, 128),)),
        ),
        (
            {**GPTQ, "format": "gptq_v2", "pack_dtype": "int32"},
            StoredQuantization("gptq", (IntegerScheme(4, 128),)),
        ),
        (
            {
                **GPTQ,
                "dynamic": {"-:.*\\.0\\..*": {}, "+:.*down.*": {"bits": 8}, ".*up.*": {"group_size": 32}},
            },
            StoredQuantization(
                "gptq",
                (IntegerScheme(4, 128), IntegerScheme(8, 128), IntegerScheme(4, 32)),
                zeros_less_one=True,
            ),
        ),
        (AWQ, StoredQuantization("awq", (IntegerScheme(4, 128),))),
        ({**AWQ, "version": "GEMM"}, StoredQuantization("awq", (IntegerScheme(4, 128),))),
        (compressed(), StoredQuantization("compressed-tensors", (IntegerScheme(4, 128),))),
        (
            compressed({"strategy": "channel", "group_size": None, "symmetric": False}),
            StoredQuantization("compressed-tensors", (IntegerScheme(4, 0),)),
        ),
        (
            compressed({"num_bits": 8, "strategy": "channel", "group_size": None}, format="int-quantized"),
            StoredQuantization("compressed-tensors", (IntegerScheme(8, 0),)),
        ),
        (compressed(FLOAT8, format="float-quantized"), StoredQuantization("compressed-tensors")),
        (
            compressed(BLOCKS, format="naive-quantized"),
            StoredQuantization("compressed-tensors", scale_block=(128, 64)),
        ),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            StoredQuantization("compressed-tensors"),
        ),
        (
            compressed(sparsity_config={"format": "dense"}, transform_config={}),
            StoredQuantization("compressed-tensors", (IntegerScheme(4, 128),)),
        ),
    ],
)
def test_what_is_read(values: Any, expected: StoredQuantization | None) -> None:
    assert read(values) == expected


@pytest.mark.parametrize(
    ("values", "key", "problem"),
    [
        ("int8", "", "must be an object, not 'int8'"),
        ({}, "quant_method", "None is not supported; fp8, gptq, awq and compressed-tensors are"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quant_method",
            "'bitsandbytes' is not supported",
        ),
        ({"quant_method": "auto-round"}, "quant_method", "'auto-round' is not supported"),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 1]},
            "weight_block_size",
            "must be two whole numbers",
        ),
        ({**GPTQ, "bits": 3}, "bits", "3 is not supported; 4 and 8 are"),
        ({**GPTQ, "bits": 2}, "bits", "2 is not supported; 4 and 8 are"),
        ({**GPTQ, "bits": "4"}, "bits", "'4' is not supported; 4 and 8 are"),
        ({"quant_method": "gptq", "group_size": 128}, "bits", "is missing"),
        ({"quant_method": "gptq", "bits": 4}, "group_size", "is missing"),
        ({**GPTQ, "group_size": 24}, "group_size", r"must be -1 \(a whole row\) or a multiple of 16, not 24"),
        ({**GPTQ, "group_size": 0}, "group_size", "must be -1 .*, not 0"),
        ({**GPTQ, "bits": 8, "sym": False}, "sym", "must be true for 8 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format", "'marlin' is not supported; gptq and"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format", "is not supported"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype", "'int16' is not supported; int32 is"),
        (
            {**GPTQ, "dynamic": {"+:x": {"bits": 2}}},
            r"dynamic\.\+:x\.bits",
            "2 is not supported; 4 and 8 are",
        ),
        ({**AWQ, "version": "gemv"}, "version", "'gemv' is not supported; gemm is"),
        ({**AWQ, "bits": 8}, "bits", "8 is not supported; 4 is"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "config_groups",
            "must be an object",
        ),
        (
            compressed(format="marlin-24"),
            "format",
            "'marlin-24' is not supported; pack-quantized, int-quantized",
        ),
        (
            compressed(FLOAT8, format="pack-quantized"),
            "format",
            "'pack-quantized' is not supported for .* float",
        ),
        (
            compressed({**FLOAT8, "num_bits": 4}, format="float-quantized"),
            r"config_groups\.group_0\.weights\.num_bits",
            "4 is not supported for type float; 8 is",
        ),
        (
            compressed({"num_bits": 3}),
            r"config_groups\.group_0\.weights\.num_bits",
            "3 is not supported; 4 and 8",
        ),
        (compressed({"type": "uint"}), r"config_groups\.group_0\.weights\.type", "'uint' is not supported"),
        (
            compressed({"strategy": "token"}),
            r"config_groups\.group_0\.weights\.strategy",
            "'token' is not supported; group, channel and tensor are",
        ),
        (
            compressed({"num_bits": 8, "symmetric": False}),
            r"config_groups\.group_0\.weights\.symmetric",
            "must be true for 8 bits",
        ),
        (
            compressed(config_groups={"group_0": {"weights": None, "input_activations": {"num_bits": 8}}}),
            r"config_groups\.group_0\.weights",
            "is missing: a scheme without rounded weights is not supported",
        ),
        (
            compressed(sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config",
            "is not supported: sparse weights",
        ),
        (
            compressed(transform_config={"config_groups": {"u": {}}}),
            "transform_config",
            "is not supported: rotated weights",
        ),
    ],
)
def test_what_is_refused(values: Any, key: str, problem: str) -> None:
    path = rf"quantization_config\.{key}" if key else "quantization_config"
    with pytest.raises(ConfigError, match=rf"^config\.json: {path}: {problem}"):
        read(values)


def test_float_blocks_of_two_sizes_are_refused() -> None:
    values = compressed(BLOCKS, format="float-quantized")
    second = copy.deepcopy(values["config_groups"]["group_0"])
    second["weights"]["block_structure"] = [64, 64]
    values["config_groups"]["group_1"] = second
    with pytest.raises(ConfigError, match="config_groups: blocks of different sizes"):
        read(values)


@pytest.mark.parametrize(
    ("stored", "kernels"),
    [
        (0, 0),
        (16, 16),
        (48, 16),
        (96, 32),
        (128, 128),
        (192, 64),
        (512, 256),
        (1024, 256),
        (8, None),
        (40, None),
    ],
)
def test_groups_are_cut_into_those_of_the_kernels(stored: int, kernels: int | None) -> None:
    assert kernel_group(stored) == kernels
