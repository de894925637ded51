"""Whether weights can be used where the checkpoint's files have them, for `--placement shared`. Imports no torch."""

from __future__ import annotations

from service.models.integers import IntegerPart
from service.models.weights import ITEM_BYTES, WeightPart, WeightPlan, WeightTensor

# As safetensors spells the types that the decoder computes with.
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# The descriptor of every file is open at once while it is loaded, and each is mapped by every process.
_MOST_FILES = 500


def why_not_as_stored(plan: WeightPlan, asked_dtype: str) -> str:
    """What of the checkpoint would have to be converted or moved, naming tensor, file and flag; empty when nothing."""
    for tensor in plan.tensors:
        for part in tensor.parts:
            if isinstance(part, IntegerPart):
                return f"{part.values.file}: tensor {part.values.name} is of integers, which must be packed"
            problem = _problem(tensor, part, asked_dtype)
            if problem:
                return f"{part.source.file}: tensor {part.source.name} {problem}"
    files = {part.source.file for tensor in plan.tensors for part in stored_parts(tensor)}
    if len(files) > _MOST_FILES:
        return f"the checkpoint has {len(files)} files, at most {_MOST_FILES} can be mapped"
    return ""


def stored_parts(tensor: WeightTensor) -> tuple[WeightPart, ...]:
    """The tensor's parts, none of which is of integers once `why_not_as_stored` found nothing."""
    return tuple(part for part in tensor.parts if isinstance(part, WeightPart))


def _problem(tensor: WeightTensor, part: WeightPart, asked_dtype: str) -> str:
    source = part.source
    stored = STORED_DTYPES.get(source.dtype)
    if part.scale is not None or stored is None:
        return f"is {source.dtype}, which must be converted"
    if stored != tensor.dtype:
        why = f"--dtype {asked_dtype}" if asked_dtype != "auto" else f"{tensor.name} with other parts"
        return f"is {stored} and would be converted to {tensor.dtype} for {why}"
    if source.offset % ITEM_BYTES[tensor.dtype]:
        return f"starts at byte {source.offset}, which is no multiple of {ITEM_BYTES[tensor.dtype]}"
    return ""
