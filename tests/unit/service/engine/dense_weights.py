"""The weight of every token of a row, 0 for what the filters drop, as each picker draws from them."""

from __future__ import annotations

import numpy as np
import torch

from service.engine.distribution import Filters, RowSoftmax
from service.engine.picker import KernelPicker, Picker
from service.kernels import operations
from service.kernels.library import KernelPool
from service.kernels.structures import Choice


def reference_weights(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Weights [vocab] int64 of one row of logits by numpy and torch."""
    candidates = RowSoftmax(len(logits)).filtered(logits.numpy(), float(logits.max()), filters)
    ids = np.arange(len(logits)) if candidates.ids is None else candidates.ids
    dense = torch.zeros(len(logits), dtype=torch.int64)
    dense[torch.from_numpy(ids)] = torch.from_numpy(candidates.weights.astype(np.int64))
    return dense


def kernel_weights(logits: torch.Tensor, filters: Filters, pool: KernelPool) -> torch.Tensor:
    """The same by the kernel."""
    choice = Choice(filters.temperature, filters.top_p, filters.min_p, filters.typical_p, filters.top_k, 0)
    weights = torch.empty(1, len(logits), dtype=torch.int32)
    largest, tokens = torch.empty(1), torch.empty(1, dtype=torch.int64)
    pool.run(operations.sample(logits[None].contiguous(), [choice], largest, tokens, weights))
    return weights[0].long()


def dense_weights(logits: torch.Tensor, filters: Filters, picker: Picker) -> torch.Tensor:
    """The same by a picker's way."""
    if isinstance(picker, KernelPicker):
        return kernel_weights(logits, filters, picker.pool)
    return reference_weights(logits, filters)
