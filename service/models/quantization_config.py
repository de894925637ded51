"""What config.json says of a checkpoint whose matrices are rounded already: `quantization_config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from service.kernels.layout import GROUPS
from service.models.config_reader import ConfigError, ConfigReader

_KEY = "quantization_config"
_READ = "fp8, gptq, awq and compressed-tensors are"
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
_INTEGER_FORMATS = ("int-quantized", "naive-quantized")
_READ_FORMATS = "pack-quantized, int-quantized, float-quantized and naive-quantized are"


@dataclass(frozen=True)
class IntegerScheme:
    """Whole numbers of `bits` bits; `group` columns of a row share a scale, 0: all of them."""

    bits: int
    group: int


@dataclass(frozen=True)
class StoredQuantization:
    """How a checkpoint holds the matrices that it holds rounded; which ones those are, its tensors say.

    `method` is "fp8", "gptq", "awq" or "compressed-tensors"; `schemes` are those that its integers may have.
    `zeros_less_one` is true where each zero point is stored as one less; `needs_group_index` where columns may be in order
    of activation, so that which group each belongs to must be stated. `scale_block` is the block that shares one scale in
    fp8, as rows and columns; None where scales are per tensor or row.
    """

    method: str
    schemes: tuple[IntegerScheme, ...] = ()
    zeros_less_one: bool = False
    needs_group_index: bool = False
    scale_block: tuple[int, int] | None = None


def read_quantization(reader: ConfigReader) -> StoredQuantization | None:
    """None for weights that are not rounded; raises ConfigError naming the key for a format that is not read."""
    values = reader.raw(_KEY)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise ConfigError(_KEY, f"must be an object, not {values!r}")
    section = _Section(values)
    method = section.values.get("quant_method")
    if method == "fp8":
        return StoredQuantization("fp8", scale_block=section.block("weight_block_size"))
    if method == "gptq":
        return _read_gptq(section)
    if method == "awq":
        return _read_awq(section)
    if method == "compressed-tensors":
        return _read_compressed_tensors(section)
    raise section.error("quant_method", f"{method!r} is not supported; {_READ}")


def kernel_group(group: int) -> int | None:
    """The most columns to a scale that the kernels know and that divide `group`; None where there are none."""
    if group == 0:
        return 0
    return max((known for known in GROUPS if known and group % known == 0), default=None)


@dataclass(frozen=True)
class _Section:
    """An object of config.json; `path` leads to it."""

    values: Mapping[str, Any]
    path: str = _KEY
    inherited: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key, self.inherited.get(key))
        return default if value is None else value

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}.{key}", problem)

    def inside(self, key: str, inherited: Mapping[str, Any] | None = None) -> _Section:
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {value!r}")
        return _Section(value, f"{self.path}.{key}", inherited or {})

    def block(self, key: str) -> tuple[int, int] | None:
        block = self.values.get(key)
        if block is None:
            return None
        whole = isinstance(block, list) and all(type(item) is int and item > 0 for item in block)
        if not whole or len(block) != 2:
            raise self.error(key, f"must be two whole numbers, not {block!r}")
        return block[0], block[1]

    def scheme(self, bits_key: str, bits: tuple[int, ...], default_group: int | None = None) -> IntegerScheme:
        """Bits that are among `bits`, and columns to a scale that the kernels can have."""
        count, group = self.get(bits_key), self.get("group_size", default_group)
        for key, value in ((bits_key, count), ("group_size", group)):
            if value is None:
                raise self.error(key, "is missing")
        if count not in bits:
            raise self.error(
                bits_key, f"{count!r} is not supported; {' and '.join(map(str, bits))} {_are(bits)}"
            )
        if group == -1:
            return IntegerScheme(count, 0)
        if type(group) is not int or group < 1 or kernel_group(group) is None:
            raise self.error("group_size", f"must be -1 (a whole row) or a multiple of 16, not {group!r}")
        return IntegerScheme(count, group)


def _are(items: tuple[int, ...]) -> str:
    return "are" if len(items) > 1 else "is"


def _read_gptq(section: _Section) -> StoredQuantization:
    """AutoGPTQ's and GPTQModel's keys. Their first format stores zero points less one, "gptq_v2" stores them as they are."""
    packing = section.get("checkpoint_format", section.get("format", "gptq"))
    if section.get("is_marlin_format"):
        raise section.error("is_marlin_format", "is not supported; checkpoint_format gptq and gptq_v2 are")
    if packing not in ("gptq", "gptq_v2"):
        raise section.error("checkpoint_format", f"{packing!r} is not supported; gptq and gptq_v2 are")
    if section.get("pack_dtype", "int32") != "int32":
        raise section.error("pack_dtype", f"{section.get('pack_dtype')!r} is not supported; int32 is")
    schemes = dict.fromkeys(_gptq_scheme(each) for each in [section, *_gptq_overrides(section)])
    by_activation = section.get("desc_act", False) is not False
    return StoredQuantization("gptq", tuple(schemes), packing == "gptq", needs_group_index=by_activation)


def _gptq_overrides(section: _Section) -> Iterator[_Section]:
    """What GPTQModel's `dynamic` says of some layers; a pattern that begins with "-:" leaves its layers as they were."""
    if section.get("dynamic") is None:
        return
    dynamic = section.inside("dynamic")
    for pattern in dynamic.values:
        if not pattern.startswith("-:"):
            yield dynamic.inside(pattern, inherited=section.values)


def _gptq_scheme(section: _Section) -> IntegerScheme:
    scheme = section.scheme("bits", (4, 8))
    if scheme.bits == 8 and section.get("sym", True) is not True:
        raise section.error("sym", "must be true for 8 bits: the kernels have no zero points for them")
    return scheme


def _read_awq(section: _Section) -> StoredQuantization:
    """AutoAWQ's keys."""
    key = next((key for key in ("version", "checkpoint_format", "format") if section.get(key)), "version")
    version = section.get(key, "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise section.error(key, f"{version!r} is not supported; gemm is")
    return StoredQuantization("awq", (section.scheme("bits", (4,)),))


def _read_compressed_tensors(section: _Section) -> StoredQuantization:
    """The keys of https://github.com/vllm-project/compressed-tensors; what they say of activations is not followed."""
    for key, problem in _REFUSED_SECTIONS.items():
        value = section.get(key)
        if value and not (key == "sparsity_config" and value.get("format") == "dense"):
            raise section.error(key, problem)
    if section.values.get("config_groups") is None and section.get("format") in _FLOAT_FORMATS:
        return StoredQuantization("compressed-tensors", scale_block=section.block("weight_block_size"))
    groups = section.inside("config_groups")
    schemes: dict[IntegerScheme, None] = {}
    blocks = {section.block("weight_block_size")} - {None}
    for name in groups.values:
        group = groups.inside(name)
        packing = group.get("format", section.get("format"))
        if group.get("weights") is None:
            raise group.error("weights", "is missing: a scheme without rounded weights is not supported")
        weights = group.inside("weights")
        if weights.get("type") == "float":
            blocks |= _float_block(section, weights, packing)
        else:
            schemes[_integer_scheme(section, weights, packing)] = None
    if len(blocks) > 1:
        raise section.error("config_groups", "blocks of different sizes are not supported")
    return StoredQuantization(
        "compressed-tensors", tuple(schemes), scale_block=blocks.pop() if blocks else None
    )


_REFUSED_SECTIONS = {
    "sparsity_config": "is not supported: sparse weights are not read",
    "transform_config": "is not supported: rotated weights are not read",
}


def _float_block(section: _Section, weights: _Section, packing: Any) -> set[tuple[int, int] | None]:
    if packing not in _FLOAT_FORMATS:
        raise section.error(
            "format", f"{packing!r} is not supported for weights of type float; {_READ_FORMATS}"
        )
    if weights.get("num_bits") != 8:
        raise weights.error("num_bits", f"{weights.get('num_bits')!r} is not supported for type float; 8 is")
    return {weights.block("block_structure")} - {None}


def _integer_scheme(section: _Section, weights: _Section, packing: Any) -> IntegerScheme:
    strategy = weights.get("strategy", "group" if weights.get("group_size") else "tensor")
    if packing != "pack-quantized" and packing not in _INTEGER_FORMATS:
        raise section.error("format", f"{packing!r} is not supported; {_READ_FORMATS}")
    if weights.get("type", "int") != "int":
        raise weights.error("type", f"{weights.get('type')!r} is not supported; int and float are")
    if strategy not in ("group", "channel", "tensor"):
        raise weights.error("strategy", f"{strategy!r} is not supported; group, channel and tensor are")
    bits = weights.scheme("num_bits", (4, 8), None if strategy == "group" else -1)
    scheme = IntegerScheme(
        bits.bits if packing == "pack-quantized" else 8, bits.group if strategy == "group" else 0
    )
    if scheme.bits == 8 and weights.get("symmetric", True) is not True:
        raise weights.error("symmetric", "must be true for 8 bits: the kernels have no zero points for them")
    return scheme
