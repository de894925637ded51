"""The reference operations: plain torch on the CPU, right everywhere, and the same bits for a row whatever its batch.

Activations and sums are float32 whatever the weights are. Of functions that are not exact, only exp, tanh and erf are
used, which torch computes alike at every place of a tensor; silu and gelu as torch has them differ at its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from service.ops.attention import AttentionPlan, AttentionShape, QueryRange, attend, plan_attention
from service.ops.expert_routing import route
from service.ops.row_stable_linear import TILE_ROWS, RowStableLinear

# A matrix, or one for each expert, as a tensor; or as its parts, where a checkpoint's files keep apart what is joined
# here: matrices whose rows follow each other, and for experts a tuple of such.
Weight = torch.Tensor | tuple[Any, ...]


class TorchOps:
    """Rows are the first dimension of every activation; their number is a multiple of `tile_rows`."""

    tile_rows = TILE_ROWS

    def __init__(self) -> None:
        self._linear = RowStableLinear()

    def embedding(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """table [vocab, hidden], token_ids [rows] -> [rows, hidden] float32."""
        return table.index_select(0, token_ids).float()

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, columns], weight [n, columns], bias [n] -> [rows, n]."""
        if isinstance(weight, tuple):
            joined = torch.cat([self._linear(x, part, None) for part in weight], -1)
            return joined if bias is None else joined.add_(bias)
        return self._linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., size], weight [size] float32: x / sqrt(mean(x^2) + eps) * weight. https://arxiv.org/abs/1910.07467"""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True).add_(eps))
        return (x * scale).mul_(weight)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [rows, heads, head_dim], cos and sin [rows, 1, rotary_dim / 2]: rotates the leading rotary_dim elements."""
        half = cos.shape[-1]
        first, second = x[..., :half], x[..., half : 2 * half]
        rotated = [first * cos - second * sin, second * cos + first * sin]
        if 2 * half < x.shape[-1]:
            rotated.append(x[..., 2 * half :])
        return torch.cat(rotated, -1)

    def plan_attention(
        self,
        shape: AttentionShape,
        window: int | None,
        sequences: Sequence[QueryRange],
        block_tables: torch.Tensor,
        block_size: int,
    ) -> AttentionPlan:
        """What `attend` needs to know of a step; the same for all layers of one window."""
        return plan_attention(shape, window, sequences, block_tables, block_size)

    def write_cache(self, cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Puts x [rows, kv_heads, head_dim] into cache [blocks, block_size, kv_heads, head_dim] at slots [rows]."""
        cache.view(-1, *x.shape[1:]).index_copy_(0, slots, x.to(cache.dtype))

    def attend(
        self,
        shape: AttentionShape,
        plan: AttentionPlan,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """query [rows, heads, head_dim], keys and values [blocks, block_size, kv_heads, head_dim] -> query's shape."""
        return attend(shape, plan, query, keys, values)

    def gated_activation(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """gate_up [rows, 2 n] -> activation(first n) * last n; activation is silu, gelu, gelu_tanh or relu."""
        gate, up = gate_up.chunk(2, dim=-1)
        return _ACTIVATIONS[activation](gate.contiguous()).mul_(up)

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(x / cap), in place."""
        return x.div_(cap).tanh_().mul_(cap)

    def mixture(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        per_token: int,
        normalize: bool,
        activation: str,
    ) -> torch.Tensor:
        """x [rows, hidden], router [experts, hidden], gate_up [experts, 2 n, hidden], down [experts, hidden, n].

        Returns x's shape. Each row's experts are summed in the order of their numbers.
        """
        routing = route(self.linear(x, router), per_token, normalize)
        out = torch.empty(len(routing.pairs), x.shape[1])
        start = 0
        for expert, count in enumerate(routing.counts):
            if count:
                mine = routing.pairs[start : start + count]
                rows = torch.zeros(-(-count // TILE_ROWS) * TILE_ROWS, x.shape[1])
                torch.index_select(x, 0, mine // per_token, out=rows[:count])
                hidden = self.gated_activation(self.linear(rows, gate_up[expert]), activation)
                out.index_copy_(0, mine, self.linear(hidden, down[expert])[:count])
                start += count
        return routing.combine(out)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / torch.exp(-x).add_(1.0)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.erf(x * math.sqrt(0.5)).add_(1.0).mul_(x).mul_(0.5)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


def _relu(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0.0)


_ACTIVATIONS = {"silu": _silu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "relu": _relu}
