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
_MOST_GROUPS = 128
_ROWS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class _Part:
    """As `Likeliest`."""

    row_of: Integers
    ids: Integers
    scores: Floats
    bounds: Floats
    highest: Floats


@dataclass(frozen=True, slots=True)
class Likeliest(_Part):
    """All tokens of some rows whose scores are above their row's bound, by row and rising id.

    row_of, ids and scores [tokens]; starts [rows + 1], where each row's tokens begin; bounds and highest [rows],
    the latter being the row's largest score, NaN where the row holds one.
    """

    starts: Integers


def likeliest(logits: torch.Tensor) -> Likeliest:
    """The likeliest tokens of each row of logits [rows, vocab] fp32 on the CPU: some hundred of many."""
    logits = logits.contiguous()
    spare = -logits.shape[1] % _WIDTH
    if spare:
        logits = torch.nn.functional.pad(logits, (0, spare), value=-torch.inf)
    # What is looked into a second time is still in the cache, and short-lived memory stays small.
    parts = [_likeliest(part) for part in logits.split(_ROWS_AT_ONCE)]
    row_of = np.concatenate([part.row_of + number * _ROWS_AT_ONCE for number, part in enumerate(parts)])
    return Likeliest(
        row_of=row_of,
        ids=np.concatenate([part.ids for part in parts]),
        scores=np.concatenate([part.scores for part in parts]),
        starts=np.searchsorted(row_of, np.arange(len(logits) + 1)),
        bounds=np.concatenate([part.bounds for part in parts]),
        highest=np.concatenate([part.highest for part in parts]),
    )


def _likeliest(logits: torch.Tensor) -> _Part:
    rows, groups = logits.shape[0], logits.shape[1] // _WIDTH
    leaders: Floats = logits.view(rows, groups, _WIDTH).amax(dim=2).numpy()
    place = groups - 1 - min(_MOST_GROUPS, groups // 4)
    bounds: Floats = np.partition(leaders, place, axis=1)[:, place]
    leading = np.flatnonzero(leaders > bounds[:, None])
    row_of, group_of = np.divmod(leading, groups)
    chosen = logits.view(rows * groups, _WIDTH).numpy().take(leading, axis=0)
    above = np.flatnonzero(chosen > bounds[row_of, None])
    group, offset = np.divmod(above, _WIDTH)
    return _Part(
        row_of=row_of[group],
        ids=group_of[group] * _WIDTH + offset,
        scores=chosen.reshape(-1)[above],
        bounds=bounds,
        highest=leaders.max(axis=1),
    )
