"""A mixture of experts over packed weights: each expert's rows are computed together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from service.kernels import operations
from service.kernels.library import KernelPool
from service.kernels.packed import PackedWeight
from service.models.config import ExpertsConfig


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
    shares, chosen = torch.topk(torch.softmax(scores, -1), experts.per_token, dim=-1)
    chosen, order = chosen.sort(dim=-1)
    shares = shares.gather(-1, order)
    if experts.normalize:
        # A running sum is taken strictly in order, whatever the number of rows.
        shares = shares / shares.cumsum(-1)[:, -1:]
    pairs = chosen.view(-1).argsort(stable=True)
    counts = torch.bincount(chosen.view(-1), minlength=len(gate_up)).tolist()
    gathered = x.index_select(0, pairs // experts.per_token)
    joined = torch.empty(len(pairs), 2 * experts.intermediate_size)
    gated = torch.empty(len(pairs), experts.intermediate_size)
    sorted_out = torch.empty_like(gathered)
    work, start = [], 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        if count:
            work.append(operations.linear(gathered[rows], gate_up[expert], joined[rows]))
            work.append(operations.activation(joined[rows], gated[rows], activation))
            work.append(operations.linear(gated[rows], down[expert], sorted_out[rows]))
        start += count
    pool.run(*work)
    out = torch.empty_like(sorted_out)
    out.index_copy_(0, pairs, sorted_out)
    out = out.view(len(x), experts.per_token, -1).mul_(shares[..., None])
    result = torch.zeros_like(x)
    for place in range(experts.per_token):
        result.add_(out[:, place])
    return result
