"""Opens a model folder in Hugging Face layout and checks it, without reading any weights.

The safetensors format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_LARGEST_HEADER = 512 << 20


class CheckpointError(ValueError):
    """A file of the checkpoint cannot be used; `path` is the file at fault."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


@dataclass(frozen=True)
class TensorSource:
    """One tensor of a safetensors file.

    `dtype` is the file's own word (F32, BF16, ...); `offset` counts from the file's start.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A model folder whose files fit together: the parsed JSON files, and where each tensor lies."""

    directory: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorSource]


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Reads config.json, generation_config.json (where there is one) and the header of every shard.

    Shards are those that model.safetensors.index.json names, else model.safetensors; other files are not looked at.
    Raises CheckpointError, naming the file, for whatever is missing, cut, malformed or at odds with the index.
    """
    config, generation_config = read_configs(model_dir)
    index_path = model_dir / INDEX_FILE
    if index_path.exists():
        tensors = _open_shards(model_dir, index_path)
    else:
        tensors = _open_single(model_dir)
    if not tensors:
        raise CheckpointError(
            index_path if index_path.exists() else model_dir / SINGLE_FILE, "holds no tensor"
        )
    return Checkpoint(model_dir, config, generation_config, tensors)


def read_configs(model_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json (empty where there is none), with no look at weights.

    Raises CheckpointError, naming the file.
    """
    if not model_dir.is_dir():
        raise CheckpointError(model_dir, "is not a directory")
    config = _read_json_object(model_dir / "config.json")
    generation_path = model_dir / "generation_config.json"
    return config, _read_json_object(generation_path) if generation_path.exists() else {}


def read_header(path: Path) -> dict[str, TensorSource]:
    """The tensors of one safetensors file; raises CheckpointError unless header and length of the file agree exactly."""
    header, data_start, size = _read_header_json(path)
    tensors = {
        name: _parse_entry(path, name, entry, data_start)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            fault = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise CheckpointError(path, f"header is malformed: data of tensor {tensor.name} {fault}")
        end += tensor.nbytes
    if end > size:
        raise CheckpointError(path, f"is truncated: {size} bytes long, its header describes {end}")
    if end < size:
        raise CheckpointError(path, f"is {size} bytes long, {size - end} more than its header describes")
    return tensors


def _open_single(model_dir: Path) -> dict[str, TensorSource]:
    path = model_dir / SINGLE_FILE
    if not path.exists():
        others = sorted(
            p.name for p in model_dir.iterdir() if p.suffix in (".safetensors", ".bin", ".pth", ".gguf")
        )
        found = f"; found only {', '.join(others)}" if others else ""
        raise CheckpointError(model_dir, f"has neither {INDEX_FILE} nor {SINGLE_FILE}{found}")
    return read_header(path)


def _open_shards(model_dir: Path, index_path: Path) -> dict[str, TensorSource]:
    weight_map = _read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index_path, "has no weight_map")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(
                index_path, f"names {file_name!r} for tensor {name}, which is not a plain file name"
            )
    file_names = sorted(set(weight_map.values()))
    absent = [name for name in file_names if not (model_dir / name).is_file()]
    if absent:
        listed = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
        raise CheckpointError(
            index_path, f"names {len(absent)} of {len(file_names)} files that are not there: {listed}"
        )
    tensors: dict[str, TensorSource] = {}
    for file_name in file_names:
        for name, tensor in read_header(model_dir / file_name).items():
            if weight_map.get(name) != file_name:
                owner = weight_map.get(name, "no file")
                raise CheckpointError(
                    tensor.file, f"holds tensor {name}, for which {INDEX_FILE} names {owner}"
                )
            tensors[name] = tensor
    for name, file_name in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                model_dir / file_name, f"lacks tensor {name}, which {INDEX_FILE} expects in it"
            )
    return tensors


def _read_header_json(path: Path) -> tuple[dict[str, Any], int, int]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise CheckpointError(path, _describe_bad_start(size, prefix, length))
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    try:
        header = json.loads(raw, object_pairs_hook=_reject_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(path, "header is not a JSON object")
    return header, 8 + length, size


def _describe_bad_start(size: int, prefix: bytes, length: int) -> str:
    if size == 0:
        return "is empty"
    if size < 8:
        return f"is {size} bytes long, too short for a safetensors file"
    if prefix == b"version ":
        return "is a Git LFS pointer, not the weights themselves (git lfs pull fetches them)"
    if prefix.lstrip()[:1] == b"<":
        return "is an HTML or XML page, not a safetensors file"
    return (
        f"is truncated or no safetensors file: it claims a header of {length} bytes and is {size} bytes long"
    )


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorSource:
    def malformed(problem: str) -> CheckpointError:
        return CheckpointError(path, f"header is malformed: tensor {name} {problem}")

    if not isinstance(entry, dict):
        raise malformed("is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise malformed(f"has unknown dtype {dtype!r}")
    if shape is None:
        raise malformed(f"has shape {entry.get('shape')!r}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise malformed(f"has data_offsets {entry.get('data_offsets')!r}")
    nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise malformed(
            f"takes {offsets[1] - offsets[0]} bytes, {dtype} of shape {list(shape)} takes {nbytes}"
        )
    return TensorSource(name, path, dtype, shape, data_start + offsets[0], nbytes)


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(path, "does not exist") from None
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path, "is not a JSON object")
    return value
