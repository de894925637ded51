"""From a checkpoint's tensors to the decoder's: what is joined, converted or left out. Reads no weights.

The decoder's tensors, all row-major: `embed_tokens.weight` and `lm_head.weight` (unless tied) [vocab, hidden],
`final_norm.weight` [hidden], and for each layer under `layers.N.`: `attention_norm`, `attention_post_norm`, `mlp_norm`,
`mlp_post_norm` [hidden] as the family has them; `attention.qkv` [(heads + 2 kv_heads) * head_dim, hidden],
`attention.output` [hidden, heads * head_dim], `attention.query_norm`, `attention.key_norm`; `mlp.gate_up`
[2 intermediate, hidden], `mlp.down` [hidden, intermediate]; or `experts.router` [experts, hidden], `experts.gate_up`
[experts, 2 intermediate, hidden], `experts.down` [experts, hidden, intermediate].
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from service.loader.checkpoint import Checkpoint, CheckpointError, TensorSource
from service.models.config import ModelConfig
from service.models.families import family_of

DTYPES = ("float32", "bfloat16", "float16")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED_AS = {
    "F64": "float32",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "bfloat16",
    "F8_E5M2": "bfloat16",
}
_FP8 = ("F8_E4M3", "F8_E5M2")
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
# Scales of activations and of the KV cache in fp8 checkpoints: neither is quantised here.
_IGNORED_SCALES = (".input_scale", ".k_scale", ".v_scale", ".output_scale")


@dataclass(frozen=True)
class WeightPart:
    """One checkpoint tensor's share of a decoder tensor, all of it.

    `scale` is what fp8 values are multiplied by: one number, one for each row, or one for each `scale_block` of
    rows and columns.
    """

    source: TensorSource
    scale: TensorSource | None = None
    scale_block: tuple[int, int] | None = None


@dataclass(frozen=True)
class WeightTensor:
    """One tensor of the decoder: its parts, converted to `dtype` (a torch dtype's name), lie one after the other.

    `packing` is the format of the native kernels that it is packed in, `group` its columns to a scale; "" is not packed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    parts: tuple[WeightPart, ...]
    packing: str = ""
    group: int = 0


@dataclass(frozen=True)
class WeightPlan:
    """All tensors of the decoder. `dtype` is that of most of their bytes; `nbytes` their sum without padding."""

    tensors: tuple[WeightTensor, ...]
    dtype: str
    nbytes: int
    parameters: int
    tied: bool


def plan_weights(config: ModelConfig, checkpoint: Checkpoint, dtype: str = "auto") -> WeightPlan:
    """Pairs each tensor that the decoder needs with those of the checkpoint.

    `dtype` is "auto" (as stored; fp8 becomes bfloat16), "float32", "bfloat16" or "float16". A tied head is not stored
    twice: where config.json ties it and the file still holds one, it is left out if it equals the embedding and used
    if it differs.
    Raises CheckpointError for tensors that are missing, unexpected, or of another shape or type than config.json says.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype: must be auto, {', '.join(DTYPES)}, not {dtype!r}")
    planner = _Planner(config, checkpoint, dtype)
    return planner.plan()


class _Planner:
    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, dtype: str) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._names = family_of(config.model_type).names
        self._prefix = "" if "embed_tokens.weight" in checkpoint.tensors else "model."
        self._unused = {
            name: t for name, t in checkpoint.tensors.items() if not name.endswith(_IGNORED_ENDINGS)
        }

    def plan(self) -> WeightPlan:
        config = self._config
        head_shape = (config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings and self._head_equals_embedding()
        tensors = [self._tensor("embed_tokens.weight", head_shape, [f"{self._prefix}embed_tokens"], "weight")]
        for index in range(len(config.layers)):
            tensors.extend(self._layer(index))
        norm = self._tensor("final_norm.weight", (config.hidden_size,), [f"{self._prefix}norm"], "weight")
        tensors.append(norm)
        if not tied:
            tensors.append(self._tensor("lm_head.weight", head_shape, ["lm_head"], "weight"))
        self._refuse_unexpected()
        by_dtype = {name: sum(t.nbytes for t in tensors if t.dtype == name) for name in DTYPES}
        parameters = sum(math.prod(tensor.shape) for tensor in tensors)
        most = max(by_dtype, key=lambda name: by_dtype[name])
        return WeightPlan(tuple(tensors), most, sum(by_dtype.values()), parameters, tied)

    def _layer(self, index: int) -> Iterator[WeightTensor]:
        config = self._config
        for name, shape, has_bias in _layer_tensors(config, config.layers[index].experts):
            sources = [f"{self._prefix}layers.{index}.{source}" for source in self._names[name]]
            if len(shape) == 3:
                sources = [source.format(expert=expert) for expert in range(shape[0]) for source in sources]
            yield self._tensor(f"layers.{index}.{name}.weight", shape, sources, "weight")
            if has_bias:
                yield self._tensor(f"layers.{index}.{name}.bias", shape[:1], sources, "bias")

    def _tensor(self, name: str, shape: tuple[int, ...], sources: list[str], kind: str) -> WeightTensor:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        parts = tuple(self._part(f"{source}.{kind}") for source in sources)
        expected = self._expected_shapes(name, shape, len(parts))
        for part, wanted in zip(parts, expected, strict=True):
            if part.source.shape != wanted:
                found = f"has shape {list(part.source.shape)}"
                problem = f"tensor {part.source.name} {found}, config.json asks for {list(wanted)}"
                raise CheckpointError(part.source.file, problem)
        if self._dtype != "auto":
            dtype = self._dtype
        else:
            stored = {_STORED_AS[part.source.dtype] for part in parts}
            dtype = stored.pop() if len(stored) == 1 else "float32"
        return WeightTensor(name, shape, dtype, rows * columns * ITEM_BYTES[dtype], parts)

    def _expected_shapes(self, name: str, shape: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
        config = self._config
        if parts == 1:
            return [shape]
        if ".attention.qkv." in name:
            rows = [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2
        elif len(shape) == 3:
            rows = [shape[0] * shape[1] // parts] * parts
        else:
            rows = [shape[0] // parts] * parts
        return [(count, *shape[-1:]) if len(shape) > 1 else (count,) for count in rows]

    def _part(self, name: str) -> WeightPart:
        source = self._take(name)
        if source is None:
            hint = ", and tie_word_embeddings is false" if name == "lm_head.weight" else ""
            raise CheckpointError(self._checkpoint.directory, f"tensor {name} is missing{hint}")
        if source.dtype not in _STORED_AS:
            raise CheckpointError(
                source.file, f"tensor {name} has dtype {source.dtype}, which cannot be served"
            )
        if source.dtype not in _FP8:
            return WeightPart(source)
        scale = self._take(f"{name}_scale_inv") or self._take(f"{name}_scale")
        if scale is None:
            raise CheckpointError(source.file, f"tensor {name} is {source.dtype} and has no {name}_scale")
        return WeightPart(source, scale, self._check_scale(source, scale))

    def _check_scale(self, source: TensorSource, scale: TensorSource) -> tuple[int, int] | None:
        block = self._config.scale_block
        if scale.dtype not in ("F32", "F16", "BF16"):
            raise CheckpointError(scale.file, f"tensor {scale.name} has dtype {scale.dtype}")
        rows, columns = source.shape[0], source.shape[-1]
        if math.prod(scale.shape) == 1 or scale.shape in ((rows,), (rows, 1)):
            return None
        if block and scale.shape == (math.ceil(rows / block[0]), math.ceil(columns / block[1])):
            return block
        problem = f"tensor {scale.name} has shape {list(scale.shape)}, which fits no scale of {source.name}"
        raise CheckpointError(scale.file, problem)

    def _take(self, name: str) -> TensorSource | None:
        self._unused.pop(name, None)
        return self._checkpoint.tensors.get(name)

    def _refuse_unexpected(self) -> None:
        unexpected = sorted(self._unused)
        if any(tensor.dtype in _FP8 for tensor in self._checkpoint.tensors.values()):
            unexpected = [name for name in unexpected if not name.endswith(_IGNORED_SCALES)]
        if unexpected:
            names = ", ".join(unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
            problem = (
                f"holds {len(unexpected)} unexpected tensors for a {self._config.model_type} model: {names}"
            )
            raise CheckpointError(self._unused[unexpected[0]].file, problem)

    def _head_equals_embedding(self) -> bool:
        """Whether a tied head can do without a tensor of its own; a head in the file that is equal counts as used."""
        head = self._checkpoint.tensors.get("lm_head.weight")
        embedding = self._checkpoint.tensors.get(f"{self._prefix}embed_tokens.weight")
        if head is None or embedding is None:
            return True
        if (head.dtype, head.shape) != (embedding.dtype, embedding.shape) or not _same_bytes(head, embedding):
            return False
        self._take("lm_head.weight")
        return True


def _layer_tensors(config: ModelConfig, experts: bool) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, shape and whether it has a bias, for each tensor of a layer."""
    hidden = config.hidden_size
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.pre_norm:
        yield "attention_norm", (hidden,), False
    yield "attention.qkv", (query_size + 2 * kv_size, hidden), config.qkv_bias
    if config.qk_norm == "head":
        yield "attention.query_norm", (config.head_dim,), False
        yield "attention.key_norm", (config.head_dim,), False
    elif config.qk_norm == "full":
        yield "attention.query_norm", (query_size,), False
        yield "attention.key_norm", (kv_size,), False
    yield "attention.output", (hidden, query_size), config.output_bias
    if config.post_norm:
        yield "attention_post_norm", (hidden,), False
    if config.pre_norm:
        yield "mlp_norm", (hidden,), False
    if experts and config.experts:
        count, width = config.experts.count, config.experts.intermediate_size
        yield "experts.router", (count, hidden), False
        yield "experts.gate_up", (count, 2 * width, hidden), False
        yield "experts.down", (count, hidden, width), False
    else:
        yield "mlp.gate_up", (2 * config.intermediate_size, hidden), config.mlp_bias
        yield "mlp.down", (hidden, config.intermediate_size), config.mlp_bias
    if config.post_norm:
        yield "mlp_post_norm", (hidden,), False


def _same_bytes(first: TensorSource, second: TensorSource, chunk: int = 1 << 20) -> bool:
    with first.file.open("rb") as left, second.file.open("rb") as right:
        for start in range(0, first.nbytes, chunk):
            size = min(chunk, first.nbytes - start)
            if _read_exactly(left.fileno(), first, start, size) != _read_exactly(
                right.fileno(), second, start, size
            ):
                return False
    return True


def _read_exactly(descriptor: int, tensor: TensorSource, start: int, size: int) -> bytes:
    data = os.pread(descriptor, size, tensor.offset + start)
    if len(data) != size:
        raise CheckpointError(Path(tensor.file), f"was truncated while tensor {tensor.name} was read")
    return data
