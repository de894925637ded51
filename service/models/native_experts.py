"""A mixture of experts over packed weights: each expert's rows are computed together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from service.kernels import operations
from service.kernels.library import KernelPool
from service.kernels.packed import PackedWeight
from service.models.config import ExpertsConfig
from service.ops.expert_routing import route


def mix_experts(
    pool: KernelPool,
    x: torch.Tensor,
    router: PackedWeight,
    gate_up: Sequence[PackedWeight],
    down: Sequence[PackedWeight],
    experts: ExpertsConfig,
    activation: str,
) -> torch.Tensor:
    """x [rows, hidden] -> [rows, hidden]; router [experts, hidden], gate_up [2 n, hidden] and down [hidden, n] of each.

    A row's experts are summed in the order of their numbers, so that it does not depend on the other rows.
    """
    scores = torch.empty(len(x), router.rows)
    pool.run(operations.linear(x, router, scores))
    routing = route(scores, experts.per_token, experts.normalize)
    pairs = routing.pairs
    gathered = x.index_select(0, pairs // experts.per_token)
    joined = torch.empty(len(pairs), 2 * experts.intermediate_size)
    gated = torch.empty(len(pairs), experts.intermediate_size)
    sorted_out = torch.empty_like(gathered)
    work, start = [], 0
    for expert, count in enumerate(routing.counts):
        rows = slice(start, start + count)
        if count:
            work.append(operations.linear(gathered[rows], gate_up[expert], joined[rows]))
            work.append(operations.activation(joined[rows], gated[rows], activation))
            work.append(operations.linear(gated[rows], down[expert], sorted_out[rows]))
        start += count
    pool.run(*work)
    out = torch.empty_like(sorted_out)
    out.index_copy_(0, pairs, sorted_out)
    return routing.combine(out)
