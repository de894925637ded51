"""Which of the decoder's tensors the native kernels want packed, and as what. Imports no torch: the launcher uses it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from service.kernels import layout
from service.kernels.layout import GROUPS, INTEGER_FORMATS
from service.models.weights import WeightPlan, WeightTensor

QUANTIZATIONS = INTEGER_FORMATS
# Fewer columns to a scale cost more memory and time; these are what llama.cpp and GPTQ checkpoints commonly have.
DEFAULT_GROUPS = {"int8": 0, "int4": 32}
# What the rounding of a router or of a head does to an answer is out of proportion to their size.
_KEPT = (".experts.router.weight",)
_HEADS = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Quantization:
    """How weights are rounded: "int8" or "int4", and how many columns share a scale (0: all of a row)."""

    format: str
    group: int

    @property
    def name(self) -> str:
        """As in logs and answers: int8, int4-g32."""
        return f"{self.format}-g{self.group}" if self.group else self.format


def parse_quantization(name: str | None, group: int | None) -> Quantization | None:
    """What `--quantize` and `--quantize-group-size` ask for; raises ValueError naming the flag."""
    if name is None or name == "none":
        if group is not None:
            raise ValueError("--quantize-group-size: needs --quantize int8 or int4")
        return None
    if name not in QUANTIZATIONS:
        raise ValueError(f"--quantize must be {' or '.join(QUANTIZATIONS)}, not {name!r}")
    group = DEFAULT_GROUPS[name] if group is None else group
    if group not in GROUPS:
        known = ", ".join(map(str, GROUPS))
        raise ValueError(f"--quantize-group-size must be one of {known} (0: a whole row), not {group}")
    return Quantization(name, group)


def pack_plan(plan: WeightPlan, quantization: Quantization | None = None) -> WeightPlan:
    """The plan with every matrix packed for the native kernels; vectors stay as they are.

    `quantization` rounds the matrices that the checkpoint holds as floating-point numbers; its integers stay what they are.
    """
    tensors = tuple(_pack(tensor, quantization) for tensor in plan.tensors)
    return replace(plan, tensors=tensors, nbytes=sum(tensor.nbytes for tensor in tensors))


def _pack(tensor: WeightTensor, quantization: Quantization | None) -> WeightTensor:
    if len(tensor.shape) < 2:
        return tensor
    format, group = tensor.dtype, 0
    if tensor.packing:
        format, group = tensor.packing, tensor.group
    elif quantization is not None and not tensor.name.endswith(_KEPT):
        format, group = quantization.format, quantization.group
        if tensor.name in _HEADS:
            format, group = "int8", 0 if quantization.format == "int4" else group
    rows, columns = tensor.shape[-2:]
    matrices = math.prod(tensor.shape[:-2])
    size = layout.packed_bytes(format, rows, columns, group)
    stride = layout.expert_stride(format, rows, columns, group)
    return replace(tensor, packing=format, group=group, nbytes=(matrices - 1) * stride + size)
