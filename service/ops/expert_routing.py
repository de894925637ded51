"""Which experts a row goes to, and how their answers become one: the same for every backend.

A row's experts are taken, and summed, in the order of their numbers, so that it does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """What each row's experts count, and the pairs of a row and one of its experts in the order of the experts.

    shares [rows, per_token] float32; pairs [rows * per_token] int64, of which pair // per_token is the row; `counts[i]`
    of the pairs are of expert i.
    """

    shares: torch.Tensor
    pairs: torch.Tensor
    counts: list[int]

    def combine(self, answers: torch.Tensor) -> torch.Tensor:
        """answers [rows * per_token, size] by number of the pair, which are overwritten -> [rows, size]."""
        rows, per_token = self.shares.shape
        weighed = answers.view(rows, per_token, -1).mul_(self.shares[..., None])
        result = torch.zeros(rows, weighed.shape[-1])
        for place in range(per_token):
            result.add_(weighed[:, place])
        return result


def route(scores: torch.Tensor, per_token: int, normalize: bool) -> Routing:
    """The router's scores [rows, experts] -> `per_token` experts for each row; `normalize` makes their shares sum to 1."""
    shares, chosen = torch.topk(torch.softmax(scores, -1), per_token, dim=-1)
    chosen, order = chosen.sort(dim=-1)
    shares = shares.gather(-1, order)
    if normalize:
        shares = shares / _sum_columns(shares)
    pairs = chosen.view(-1).argsort(stable=True)
    counts = torch.bincount(chosen.view(-1), minlength=scores.shape[1]).tolist()
    return Routing(shares, pairs, counts)


def _sum_columns(x: torch.Tensor) -> torch.Tensor:
    total = x[:, :1].clone()
    for column in range(1, x.shape[1]):
        total.add_(x[:, column : column + 1])
    return total
