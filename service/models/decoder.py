"""The one decoder of all families: a ModelConfig says what it does, a backend's operations how it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from service.models.batch import ForwardBatch, PagedKVCache, nothing, rope_lengths
from service.models.config import LayerConfig, ModelConfig, RopeConfig
from service.models.rope import RotaryTable
from service.ops.attention import AttentionPlan, AttentionShape
from service.ops.torch_ops import TorchOps, Weight


@dataclass(frozen=True)
class _Layer:
    """One layer's weights, by the names of service.models.weights without their prefix.

    Norms are float32 and hold the offset.
    """

    config: LayerConfig
    norms: Mapping[str, torch.Tensor]
    weights: Mapping[str, Weight]
    biases: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Step:
    """What is worked out once for a step: padded token ids, and plans and rotations for each kind of layer."""

    batch: ForwardBatch
    token_ids: torch.Tensor
    rows: int
    plans: Mapping[int | None, AttentionPlan]
    rotations: Mapping[RopeConfig, tuple[torch.Tensor, torch.Tensor]]


class Decoder:
    """A model over weights that it only reads; `weights` are those that service.models.weights plans, by name.

    Of the weights nothing is copied but the norms' vectors, when they are not float32 or have an offset.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], ops: TorchOps) -> None:
        self.config = config
        self._ops = ops
        self._embedding = _whole(weights["embed_tokens.weight"])
        self._head = weights.get("lm_head.weight", self._embedding)
        self._final_norm = self._norm_weight(weights["final_norm.weight"])
        self._layers = [self._layer(index, layer, weights) for index, layer in enumerate(config.layers)]
        self._shape = AttentionShape(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.attention_scale,
            config.attention_softcap,
        )
        self._windows = {layer.window for layer in config.layers}
        self._rotary = {
            layer.rope: RotaryTable(layer.rope) for layer in config.layers if layer.rope is not None
        }

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, cache: PagedKVCache, before_computing: Callable[[], None] = nothing
    ) -> torch.Tensor:
        """Computes the batch and writes its keys and values to the cache.

        Returns the logits of `batch.logit_rows`: [samples, vocab] float32. `before_computing` is called at first.
        """
        before_computing()
        hidden = self._run(batch, cache).index_select(0, batch.logit_rows)
        samples = len(hidden)
        hidden = self._final(self._pad_rows(hidden))
        logits = self._ops.linear(hidden, self._head)[:samples]
        if self.config.logits_scale != 1.0:
            logits = logits.mul_(self.config.logits_scale)
        return (
            self._ops.soft_cap(logits, self.config.logits_softcap) if self.config.logits_softcap else logits
        )

    @torch.inference_mode()
    def hidden_states(
        self, batch: ForwardBatch, cache: PagedKVCache, before_computing: Callable[[], None] = nothing
    ) -> torch.Tensor:
        """As `forward`, but returns what the head would get of every row: the normalised last state [rows, hidden]."""
        before_computing()
        rows = len(batch.token_ids)
        return self._final(self._run(batch, cache))[:rows]

    def _run(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        step = self._plan(batch, cache)
        x = self._ops.embedding(self._embedding, step.token_ids)
        if self.config.embedding_scale != 1.0:
            x.mul_(self.config.embedding_scale)
        for index, layer in enumerate(self._layers):
            attended = self._attention(layer, step, self._norm(layer, "attention_norm", x), cache, index)
            x = self._add(x, self._norm(layer, "attention_post_norm", attended))
            mixed = self._mlp(layer, self._norm(layer, "mlp_norm", x))
            x = self._add(x, self._norm(layer, "mlp_post_norm", mixed))
        return x

    def _plan(self, batch: ForwardBatch, cache: PagedKVCache) -> _Step:
        rows = len(batch.token_ids)
        padding = -rows % self._ops.tile_rows
        positions = torch.nn.functional.pad(batch.positions, (0, padding))
        lengths = torch.nn.functional.pad(
            rope_lengths(batch, self.config.length_dependent_from is not None), (0, padding), value=1
        )
        plans = {
            window: self._ops.plan_attention(
                self._shape, window, batch.sequences, batch.block_tables, cache.block_size
            )
            for window in self._windows
        }
        rotations = {rope: table.rows(positions, lengths) for rope, table in self._rotary.items()}
        return _Step(batch, torch.nn.functional.pad(batch.token_ids, (0, padding)), rows, plans, rotations)

    def _attention(
        self, layer: _Layer, step: _Step, x: torch.Tensor, cache: PagedKVCache, index: int
    ) -> torch.Tensor:
        config, ops = self.config, self._ops
        rows, heads, kv_heads = len(x), config.num_heads, config.num_kv_heads
        joined = ops.linear(x, layer.weights["attention.qkv"], layer.biases.get("attention.qkv"))
        query_size, kv_size = heads * config.head_dim, kv_heads * config.head_dim
        if config.qk_norm == "full":
            query = self._norm(layer, "attention.query_norm", joined[:, :query_size])
            key = self._norm(layer, "attention.key_norm", joined[:, query_size : query_size + kv_size])
            both = torch.cat([query, key], -1).view(rows, heads + kv_heads, config.head_dim)
        else:
            both = joined[:, : query_size + kv_size].view(rows, heads + kv_heads, config.head_dim)
        if config.qk_norm == "head":
            query = self._norm(layer, "attention.query_norm", both[:, :heads])
            both = torch.cat([query, self._norm(layer, "attention.key_norm", both[:, heads:])], 1)
        if layer.config.rope is not None:
            both = ops.rotate(both, *step.rotations[layer.config.rope])
        value = joined[:, query_size + kv_size :].view(rows, kv_heads, config.head_dim)
        keys, values = cache.keys[index], cache.values[index]
        ops.write_cache(keys, step.batch.slot_mapping, both[: step.rows, heads:])
        ops.write_cache(values, step.batch.slot_mapping, value[: step.rows])
        plan = step.plans[layer.config.window]
        attended = ops.attend(self._shape, plan, both[:, :heads], keys, values).view(rows, query_size)
        return ops.linear(attended, layer.weights["attention.output"], layer.biases.get("attention.output"))

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        config, weights, biases = self.config, layer.weights, layer.biases
        if layer.config.experts and config.experts is not None:
            return self._ops.mixture(
                x,
                _whole(weights["experts.router"]),
                weights["experts.gate_up"],
                weights["experts.down"],
                config.experts.per_token,
                config.experts.normalize,
                config.activation,
            )
        gate_up = self._ops.linear(x, weights["mlp.gate_up"], biases.get("mlp.gate_up"))
        hidden = self._ops.gated_activation(gate_up, config.activation)
        return self._ops.linear(hidden, weights["mlp.down"], biases.get("mlp.down"))

    def _norm(self, layer: _Layer, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = layer.norms.get(name)
        return x if weight is None else self._ops.rms_norm(x, weight, self.config.norm_eps)

    def _final(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self._final_norm, self.config.norm_eps)

    def _add(self, x: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        scale = self.config.residual_scale
        return x + change if scale == 1.0 else x + change * scale

    def _pad_rows(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % self._ops.tile_rows))

    def _norm_weight(self, weight: Weight) -> torch.Tensor:
        weight = _whole(weight).float()
        return weight + self.config.norm_offset if self.config.norm_offset else weight

    def _layer(self, index: int, layer: LayerConfig, weights: Mapping[str, Weight]) -> _Layer:
        prefix = f"layers.{index}."
        own = {
            name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)
        }
        named = {name.removesuffix(".weight"): t for name, t in own.items() if name.endswith(".weight")}
        return _Layer(
            layer,
            {name: self._norm_weight(t) for name, t in named.items() if _is_vector(t)},
            {name: t for name, t in named.items() if not _is_vector(t)},
            {name.removesuffix(".bias"): _whole(t) for name, t in own.items() if name.endswith(".bias")},
        )


def _is_vector(weight: Weight) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dim() == 1


def _whole(weight: Weight) -> torch.Tensor:
    """A weight that never comes in parts."""
    assert isinstance(weight, torch.Tensor)
    return weight
