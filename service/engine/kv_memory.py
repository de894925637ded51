"""The KV cache's memory: a mapping of the worker's own, bound to its unit's nodes, touched only as blocks are used.

An allocator would hand out heap that was touched earlier, on any node; a mapping can be bound first and verified later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from placement.binding import Binding, bind_mapping
from placement.mapping import MADV_HUGEPAGE, Mapping, round_up
from placement.plan import Policy
from service.models.batch import PagedKVCache

KV_MAPPING_NAME = "numaserve-kv"


@dataclass(frozen=True)
class KVMemory:
    """A cache, the mapping under it (which must outlive it), and whether the kernel took the binding."""

    cache: PagedKVCache
    mapping: Mapping
    binding: Binding


def allocate_kv_cache(
    total_bytes: int,
    layers: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    memory_nodes: tuple[int, ...],
    policy: Policy,
) -> KVMemory:
    """As many blocks as `total_bytes` hold. Raises ValueError when not even one fits."""
    block_bytes = 2 * layers * block_size * kv_heads * head_dim * dtype.itemsize
    blocks = total_bytes // block_bytes
    if blocks < 1:
        raise ValueError(f"--kv-cache-memory {total_bytes}: one block takes {block_bytes} bytes")
    half = round_up(blocks * block_bytes // 2, 4096)
    mapping = Mapping.anonymous(2 * half, KV_MAPPING_NAME)
    binding = bind_mapping(mapping, memory_nodes, policy)
    mapping.advise(MADV_HUGEPAGE)
    shape = (layers, blocks, block_size, kv_heads, head_dim)
    keys, values = (
        torch.frombuffer(mapping.view(offset, blocks * block_bytes // 2), dtype=dtype).view(shape)
        for offset in (0, half)
    )
    return KVMemory(PagedKVCache(keys, values), mapping, binding)
