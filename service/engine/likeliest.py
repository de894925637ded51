"""The likeliest tokens of many rows, found in one pass over the logits.

A row is cut into groups of neighbouring tokens. The pass takes the highest score of each group; then only the
groups that lead are looked into. Nothing but comparisons is done, so a row's outcome is its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

_WIDTH = 64
_MOST_GROUPS = 96


@dataclass(frozen=True, slots=True)
class Likeliest:
    """All tokens of one row whose score is above `bound`: their ids [n], ascending, and their scores [n]."""

    ids: Integers
    scores: Floats
    bound: float
    highest: float


def likeliest(logits: torch.Tensor) -> list[Likeliest]:
    """The likeliest tokens of each row of logits [rows, vocab] fp32 on the CPU, about a hundred of many.

    `highest` is the row's largest score, NaN where the row holds one.
    """
    spare = -logits.shape[1] % _WIDTH
    if spare:
        logits = torch.nn.functional.pad(logits, (0, spare), value=-torch.inf)
    rows, groups = logits.shape[0], logits.shape[1] // _WIDTH
    leaders: Floats = logits.view(rows, groups, _WIDTH).amax(dim=2).numpy()
    place = groups - 1 - min(_MOST_GROUPS, groups // 4)
    bounds: Floats = np.partition(leaders, place, axis=1)[:, place]
    row_of, group_of = np.nonzero(leaders > bounds[:, None])
    chosen = logits.view(rows * groups, _WIDTH).numpy()[row_of * groups + group_of]
    above = np.flatnonzero(chosen > bounds[row_of, None])
    scores = chosen.reshape(-1)[above]
    group, offset = np.divmod(above, _WIDTH)
    ids = group_of[group] * _WIDTH + offset
    ends = np.searchsorted(row_of[group], np.arange(rows), side="right").tolist()
    starts = [0, *ends]
    return [
        Likeliest(ids[start:end], scores[start:end], bound, highest)
        for start, end, bound, highest in zip(
            starts, ends, bounds.tolist(), leaders.max(axis=1).tolist(), strict=False
        )
    ]
