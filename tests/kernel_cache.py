"""The order in which the native kernels keep a layer's keys and values, as service/kernels/cache.h describes it."""

from __future__ import annotations

import torch

PANEL = 16


def has_panels(block_size: int, head_dim: int) -> bool:
    """Whether keys lie in panels, and each head's numbers together."""
    return block_size % PANEL == 0 and head_dim % 2 == 0


def keys_as_kept(rows: torch.Tensor) -> torch.Tensor:
    """rows [blocks, block_size, kv_heads, head_dim] -> the same shape, with the numbers where the kernels expect them."""
    blocks, block_size, kv_heads, head_dim = rows.shape
    if not has_panels(block_size, head_dim):
        return rows
    width = 2 if rows.dtype == torch.bfloat16 else 1
    panels = rows.transpose(1, 2).reshape(blocks, kv_heads, -1, PANEL, head_dim // width, width)
    return panels.transpose(3, 4).reshape(rows.shape).contiguous()


def keys_as_rows(kept: torch.Tensor) -> torch.Tensor:
    """The inverse of `keys_as_kept`."""
    blocks, block_size, kv_heads, head_dim = kept.shape
    if not has_panels(block_size, head_dim):
        return kept
    width = 2 if kept.dtype == torch.bfloat16 else 1
    panels = kept.reshape(blocks, kv_heads, -1, head_dim // width, PANEL, width).transpose(3, 4)
    return panels.reshape(blocks, kv_heads, block_size, head_dim).transpose(1, 2).reshape(kept.shape)


def values_as_kept(rows: torch.Tensor) -> torch.Tensor:
    """As `keys_as_kept`."""
    if not has_panels(rows.shape[1], rows.shape[3]):
        return rows
    return rows.transpose(1, 2).reshape(rows.shape).contiguous()


def values_as_rows(kept: torch.Tensor) -> torch.Tensor:
    """The inverse of `values_as_kept`."""
    blocks, block_size, kv_heads, head_dim = kept.shape
    if not has_panels(block_size, head_dim):
        return kept
    return kept.reshape(blocks, kv_heads, block_size, head_dim).transpose(1, 2).reshape(kept.shape)
