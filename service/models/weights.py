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
from service.models.integers import IntegerPart, find_integers, integer_layout

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
# Scales of activations and of the KV cache in quantised checkpoints: neither is rounded here.
_IGNORED_SCALES = (
    ".input_scale",
    ".output_scale",
    ".input_zero_point",
    ".output_zero_point",
    ".k_scale",
    ".v_scale",
)


@dataclass(frozen=True)
class WeightPart:
    """One checkpoint tensor's share of a decoder tensor, all of it.

    `scale` is what fp8 values are multiplied by: one number, one for each row, or one for each `scale_block` of
    rows and columns.
    """

    source: TensorSource
    scale: TensorSource | None = None
    scale_block: tuple[int, int] | None = None

    @property
    def sources(self) -> tuple[TensorSource, ...]:
        """All tensors of the checkpoint that are read."""
        return (self.source,) if self.scale is None else (self.source, self.scale)


@dataclass(frozen=True)
class WeightTensor:
    """One tensor of the decoder: its parts, converted to `dtype` (a torch dtype's name), lie one after the other.

    `packing` is the format of the native kernels that it is packed in, `group` its columns to a scale; "" is not packed.
    Whole numbers are planned as packed; `dtype` is then only what else is computed with, as the KV cache.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    parts: tuple[WeightPart | IntegerPart, ...]
    packing: str = ""
    group: int = 0


@dataclass(frozen=True)
class WeightPlan:
    """All tensors of the decoder. `dtype` is that of most of their bytes; `nbytes` their sum without padding.

    `integers` is the quant_method of a checkpoint that holds matrices as whole numbers, "" for others.
    """

    tensors: tuple[WeightTensor, ...]
    dtype: str
    nbytes: int
    parameters: int
    tied: bool
    integers: str = ""


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
        stored = self._config.quantization
        integers = stored.method if stored and any(tensor.packing for tensor in tensors) else ""
        return WeightPlan(tuple(tensors), most, sum(by_dtype.values()), parameters, tied, integers)

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
        wanted = self._expected_shapes(name, shape, len(sources))
        parts = tuple(
            self._part(source, kind, expected) for source, expected in zip(sources, wanted, strict=True)
        )
        packing, group = self._common_scheme(name, parts)
        if self._dtype != "auto":
            dtype = self._dtype
        elif packing:
            dtype = self._embedding_dtype()
        else:
            stored = {_STORED_AS[part.source.dtype] for part in parts if isinstance(part, WeightPart)}
            dtype = stored.pop() if len(stored) == 1 else "float32"
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        return WeightTensor(name, shape, dtype, nbytes, parts, packing, group)

    def _common_scheme(self, name: str, parts: tuple[WeightPart | IntegerPart, ...]) -> tuple[str, int]:
        """The kernels' format of a tensor whose parts are whole numbers, and its columns to a scale; "" for others."""
        first = parts[0]
        for part in parts:
            if _scheme_of(part) != _scheme_of(first):
                problem = f"{_describe(part)} and {_describe(first)} are joined in {name}: they must agree"
                raise CheckpointError(part.sources[0].file, problem)
        return (f"int{first.scheme.bits}", first.group) if isinstance(first, IntegerPart) else ("", 0)

    def _embedding_dtype(self) -> str:
        embedding = self._checkpoint.tensors.get(f"{self._prefix}embed_tokens.weight")
        return _STORED_AS.get(embedding.dtype, "float32") if embedding else "float32"

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

    def _part(self, module: str, kind: str, shape: tuple[int, ...]) -> WeightPart | IntegerPart:
        stored = self._config.quantization
        layout = integer_layout(stored, self._checkpoint, module)
        if stored is not None and layout is not None and kind == "weight" and len(shape) == 2:
            return find_integers(stored, layout, self._take, module, (shape[0], shape[1]))
        part = self._float_part(module, f"{module}.{kind}")
        if part.source.shape != shape:
            found = f"has shape {list(part.source.shape)}"
            problem = f"tensor {part.source.name} {found}, config.json asks for {list(shape)}"
            raise CheckpointError(part.source.file, problem)
        return part

    def _float_part(self, module: str, name: str) -> WeightPart:
        source = self._take(name)
        if source is None:
            raise CheckpointError(
                self._checkpoint.directory, f"tensor {name} is missing{self._why_missing(module)}"
            )
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

    def _why_missing(self, module: str) -> str:
        for values in ("qweight", "weight_packed"):
            if f"{module}.{values}" in self._checkpoint.tensors:
                return f"; {module}.{values} is there, but config.json has no quantization_config for it"
        return ", and tie_word_embeddings is false" if module == "lm_head" else ""

    def _check_scale(self, source: TensorSource, scale: TensorSource) -> tuple[int, int] | None:
        stored = self._config.quantization
        block = stored.scale_block if stored else None
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
        if self._config.quantization or any(t.dtype in _FP8 for t in self._checkpoint.tensors.values()):
            unexpected = [name for name in unexpected if not name.endswith(_IGNORED_SCALES)]
        unexpected = [name for name in unexpected if not self._is_idle_bias(name)]
        if unexpected:
            names = ", ".join(unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
            problem = (
                f"holds {len(unexpected)} unexpected tensors for a {self._config.model_type} model: {names}"
            )
            raise CheckpointError(self._unused[unexpected[0]].file, problem)

    def _is_idle_bias(self, name: str) -> bool:
        """AutoGPTQ gives every matrix that it rounds a bias, of zeros where the model has none."""
        module, _, kind = name.rpartition(".")
        if kind != "bias" or integer_layout(self._config.quantization, self._checkpoint, module) is None:
            return False
        return _is_zero(self._unused[name])

    def _head_equals_embedding(self) -> bool:
        """Whether a tied head can do without a tensor of its own; a head in the file that is equal counts as used."""
        if integer_layout(self._config.quantization, self._checkpoint, "lm_head") is not None:
            return False
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


def _scheme_of(part: WeightPart | IntegerPart) -> tuple[int, int] | None:
    return (part.scheme.bits, part.group) if isinstance(part, IntegerPart) else None


def _describe(part: WeightPart | IntegerPart) -> str:
    if isinstance(part, WeightPart):
        return f"tensor {part.source.name} ({part.source.dtype})"
    group = part.scheme.group or "all"
    return f"tensor {part.values.name} ({part.scheme.bits} bits, {group} columns to a scale)"


def _is_zero(tensor: TensorSource, chunk: int = 1 << 20) -> bool:
    with tensor.file.open("rb") as file:
        starts = range(0, tensor.nbytes, chunk)
        sizes = ((start, min(chunk, tensor.nbytes - start)) for start in starts)
        return not any(any(_read_exactly(file.fileno(), tensor, start, size)) for start, size in sizes)


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
