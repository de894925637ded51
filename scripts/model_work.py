"""What a model has to read and to compute for a token, counted from its layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from service.loader.checkpoint import open_checkpoint
from service.models.config import parse_config
from service.models.packing import pack_plan, parse_quantization
from service.models.weights import plan_weights


@dataclass(frozen=True)
class ModelWork:
    """Counted for dense models.

    `weight_bytes`: weights that one token reads. `cache_bytes`: keys and values of one token. `layer_operations`: of a
    token in the matrix products of the layers; `head_operations`: of one token's logits; `pair_operations`: of attention
    for each pair of a query and a key.
    """

    weight_bytes: int
    cache_bytes: int
    layer_operations: int
    head_operations: int
    pair_operations: int

    def token_bytes(self, context: int) -> int:
        """What one token alone reads beside so many others."""
        return self.weight_bytes + self.cache_bytes * context

    def prompt_operations(self, length: int) -> int:
        """Of a prompt whose last token's logits are wanted."""
        pairs = length * (length + 1) // 2
        return length * self.layer_operations + pairs * self.pair_operations + self.head_operations


def model_work(model: Path, format: str) -> ModelWork:
    """`format` is bf16, int8 or int4, as a server of ours keeps it, with a bf16 cache."""
    checkpoint = open_checkpoint(model)
    config = parse_config(checkpoint.config, checkpoint.generation_config)
    plan = plan_weights(config, checkpoint, "bfloat16")
    packed = pack_plan(plan, parse_quantization(None if format == "bf16" else format, None))
    names = {tensor.name for tensor in plan.tensors}
    # Of an embedding a token reads one row, unless the head is the same matrix.
    unread = "embed_tokens.weight" if "lm_head.weight" in names else None
    tables = ("embed_tokens.weight", "lm_head.weight")
    layers = sum(
        math.prod(tensor.shape)
        for tensor in plan.tensors
        if len(tensor.shape) > 1 and tensor.name not in tables
    )
    return ModelWork(
        weight_bytes=sum(tensor.nbytes for tensor in packed.tensors if tensor.name != unread),
        cache_bytes=2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim,
        layer_operations=2 * layers,
        head_operations=2 * config.vocab_size * config.hidden_size,
        pair_operations=4 * config.num_layers * config.num_heads * config.head_dim,
    )
