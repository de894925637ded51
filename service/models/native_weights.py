"""The native decoder's weights over the memory that the loader filled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from service.kernels.layout import expert_stride, packed_bytes
from service.kernels.packed import PackedWeight
from service.models.native_step import NativeWeights


class StoredTensor(Protocol):
    """A tensor that was laid out: of a segment's manifest, or of a plan. See placement.segment.TensorSpec."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def packing(self) -> str: ...

    @property
    def group(self) -> int: ...


def native_weights(tensors: Iterable[StoredTensor], views: Mapping[str, memoryview]) -> NativeWeights:
    """Hands out the tensors' memory, `views` by name; nothing is copied."""
    matrices: dict[str, PackedWeight] = {}
    experts: dict[str, tuple[PackedWeight, ...]] = {}
    vectors: dict[str, torch.Tensor] = {}
    for tensor in tensors:
        view = views[tensor.name]
        if not tensor.packing:
            dtype = getattr(torch, tensor.dtype)
            vectors[tensor.name] = torch.frombuffer(view, dtype=dtype).view(tensor.shape)
        elif len(tensor.shape) == 2:
            matrices[tensor.name] = _packed(tensor, view, 0)
        else:
            experts[tensor.name] = tuple(_packed(tensor, view, index) for index in range(tensor.shape[0]))
    return NativeWeights(matrices, experts, vectors)


def _packed(tensor: StoredTensor, view: memoryview, index: int) -> PackedWeight:
    rows, columns = tensor.shape[-2:]
    sizes = (tensor.packing, rows, columns, tensor.group)
    start, size = index * expert_stride(*sizes), packed_bytes(*sizes)
    data = torch.frombuffer(view[start : start + size], dtype=torch.uint8)
    return PackedWeight(data, rows, columns, tensor.packing, tensor.group, size)
