"""How large a model is, for the plan, and whether its files can be served at all. Imports neither torch nor numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from placement.file_segment import AnySegment, FileSegment
from service.backends import lay_out_for
from service.loader.as_stored import why_not_as_stored
from service.loader.checkpoint import open_checkpoint, read_configs
from service.models.config import ModelConfig, parse_config
from service.models.packing import Quantization
from service.models.weights import DTYPES, ITEM_BYTES, plan_weights


@dataclass(frozen=True)
class ModelSizes:
    """Sizes in bytes; `weights_bytes` is the sum of the decoder's tensors without padding between them.

    `shared_obstacle` says what of the files would have to be converted, empty when they can be used as they are.
    `context_length` is the longest sequence in tokens; `blocks_per_sequence` the KV blocks that one of that length takes.
    """

    model_type: str
    parameters: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_block_bytes: int
    blocks_per_sequence: int
    context_length: int
    vocab_size: int
    dtype: str
    kv_dtype: str
    tensors: int
    shared_obstacle: str = ""


def measure(
    model_dir: Path,
    dtype: str = "auto",
    kv_dtype: str = "auto",
    block_size: int = 16,
    backend: str = "torch",
    quantization: Quantization | None = None,
) -> ModelSizes:
    """Opens the checkpoint, pairs every tensor with the decoder's, and adds up. `kv_dtype` "auto" is the weights' dtype.

    Raises CheckpointError or ConfigError, naming file or key, for a model that cannot be served.
    """
    if kv_dtype != "auto" and kv_dtype not in DTYPES:
        raise ValueError(f"kv_dtype: must be auto, {', '.join(DTYPES)}, not {kv_dtype!r}")
    checkpoint = open_checkpoint(model_dir)
    config = parse_config(checkpoint.config, checkpoint.generation_config)
    plan = lay_out_for(backend, plan_weights(config, checkpoint, dtype), quantization)
    return _sizes(
        config,
        dtype=plan.dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        parameters=plan.parameters,
        weights_bytes=plan.nbytes,
        tensors=len(plan.tensors),
        shared_obstacle=why_not_as_stored(plan, dtype),
    )


def measure_segment(model_dir: Path, segment: AnySegment, kv_dtype: str, block_size: int) -> ModelSizes:
    """The same for weights that are in a segment already; no weights file is opened."""
    config = parse_config(*read_configs(model_dir))
    if isinstance(segment, FileSegment):
        sizes = [part.nbytes for tensor in segment.manifest.tensors for part in tensor.parts]
    else:
        sizes = [entry.nbytes for entry in segment.manifest.tensors]
    return _sizes(
        config,
        dtype=segment.manifest.dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        parameters=segment.parameters,
        weights_bytes=sum(sizes),
        tensors=len(segment.manifest.tensors),
    )


def _sizes(
    config: ModelConfig,
    *,
    dtype: str,
    kv_dtype: str,
    block_size: int,
    parameters: int,
    weights_bytes: int,
    tensors: int,
    shared_obstacle: str = "",
) -> ModelSizes:
    kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
    per_token = 2 * len(config.layers) * config.num_kv_heads * config.head_dim * ITEM_BYTES[kv_dtype]
    return ModelSizes(
        model_type=config.model_type,
        parameters=parameters,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=per_token,
        kv_block_bytes=per_token * block_size,
        blocks_per_sequence=-(-config.context_length // block_size),
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensors=tensors,
        shared_obstacle=shared_obstacle,
    )
