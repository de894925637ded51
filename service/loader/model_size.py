"""How large a model is, for the plan, and whether its files can be served at all. Imports neither torch nor numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from placement.segment import Manifest
from service.loader.checkpoint import open_checkpoint, read_configs
from service.models.config import ModelConfig, parse_config
from service.models.weights import DTYPES, ITEM_BYTES, plan_weights


@dataclass(frozen=True)
class ModelSizes:
    """Sizes in bytes; `weights_bytes` is the sum of the decoder's tensors without padding between them.

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


def measure(model_dir: Path, dtype: str = "auto", kv_dtype: str = "auto", block_size: int = 16) -> ModelSizes:
    """Opens the checkpoint, pairs every tensor with the decoder's, and adds up. `kv_dtype` "auto" is the weights' dtype.

    Raises CheckpointError or ConfigError, naming file or key, for a model that cannot be served.
    """
    if kv_dtype != "auto" and kv_dtype not in DTYPES:
        raise ValueError(f"kv_dtype: must be auto, {', '.join(DTYPES)}, not {kv_dtype!r}")
    checkpoint = open_checkpoint(model_dir)
    config = parse_config(checkpoint.config, checkpoint.generation_config)
    plan = plan_weights(config, checkpoint, dtype)
    return _sizes(
        config,
        dtype=plan.dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        parameters=plan.parameters,
        weights_bytes=plan.nbytes,
        tensors=len(plan.tensors),
    )


def measure_segment(model_dir: Path, manifest: Manifest, kv_dtype: str, block_size: int) -> ModelSizes:
    """The same for weights that are in a segment already; no weights file is opened."""
    config = parse_config(*read_configs(model_dir))
    return _sizes(
        config,
        dtype=manifest.dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        parameters=sum(math.prod(entry.shape) for entry in manifest.tensors),
        weights_bytes=sum(entry.nbytes for entry in manifest.tensors),
        tensors=len(manifest.tensors),
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
    )
