"""Filters and draws for many rows at once, where a row's likeliest tokens are enough to know the outcome.

It is the outcome of `RowSoftmax.filtered` and `draw`, to the bit; a row for which that is not certain is left to
them. Comparisons, elementwise functions and sums of integers alone are used, so a row's outcome is its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from service.engine.distribution import (
    WEIGHT_OF_LIKELIEST,
    Filters,
    RowSoftmax,
    rising_bits,
    softmax_weights,
)
from service.engine.likeliest import Floats, Integers, Likeliest, likeliest
from service.engine.sampling_state import SamplingState

# More than any rounding makes of a weight's relative error.
_ROUNDING = 1e-5


def draw_narrowed(
    logits: torch.Tensor, states: Sequence[SamplingState], softmax: RowSoftmax
) -> tuple[list[float], list[int]]:
    """The largest value of each row of logits [rows, vocab] fp32 on the CPU, NaN where the row holds one, and the
    token drawn in it: -1 where the row's likeliest tokens do not tell.
    """
    known = likeliest(logits)
    highest = known.highest.tolist()
    if not len(known.ids):
        return highest, [-1] * len(states)
    rows = _Rows(known, [state.filters for state in states], highest, logits.numpy(), softmax)
    return highest, rows.draw([state.uniform() for state in states])


class _Rows:
    """The likeliest tokens of some rows, and their weights, by rising id; `_order` puts them by falling score."""

    def __init__(
        self,
        known: Likeliest,
        filters: Sequence[Filters],
        highest: Sequence[float],
        logits: Floats,
        softmax: RowSoftmax,
    ) -> None:
        self._known = known
        self._filters = filters
        self._highest = highest
        self._logits = logits
        self._softmax = softmax
        self._vocab_size = logits.shape[1]
        row_of, temperatures = known.row_of, np.array([each.temperature for each in filters])
        usable = np.isfinite(known.highest)
        self._unknown = (~usable).tolist()
        with np.errstate(invalid="ignore"):
            weights = softmax_weights(known.scores, known.highest[row_of], temperatures[row_of])
        self._weights = np.where(usable[row_of], weights, 0).astype(np.int64)
        self._order = _order(row_of, known.scores)

    def draw(self, uniforms: Sequence[int]) -> list[int]:
        """The token of each row for integers in [0, 2**64), or -1."""
        known, order = self._known, self._order
        row_of, scores, weights = known.row_of, known.scores[order], self._weights[order]
        through = weights.cumsum()
        through -= np.concatenate(([0], through))[known.starts[:-1]][row_of]
        lowest, wanted = self._limits(scores, through)
        least = np.array([each.min_p for each in self._filters]) * WEIGHT_OF_LIKELIEST
        kept = (scores >= lowest[row_of]) & (through - weights < wanted[row_of]) & (weights >= least[row_of])
        drawable = np.zeros(len(weights), dtype=np.int64)
        drawable[order[kept]] = weights[kept]
        # By inverse CDF over each row's weights by rising id, all rows on one line.
        line = np.concatenate(([0], drawable.cumsum()))
        ends = line[known.starts].tolist()
        points = [
            first + (uniform * (last - first) >> 64)
            for first, last, uniform in zip(ends, ends[1:], uniforms, strict=False)
        ]
        places = np.minimum(line[1:].searchsorted(points, side="right"), len(weights) - 1)
        return [
            -1 if unknown else token_id
            for token_id, unknown in zip(known.ids[places].tolist(), self._unknown, strict=True)
        ]

    def _limits(self, scores: Floats, through: Integers) -> tuple[Floats, npt.NDArray[np.float64]]:
        """For each row the lowest score that top_k keeps and the weight that top_p wants; notes where more than
        the known tokens may be kept. `scores` and the sum of weights `through` go by falling score.
        """
        lowest = np.full(len(self._filters), -np.inf, dtype=np.float32)
        wanted = np.full(len(self._filters), np.inf)
        starts = self._known.starts.tolist()
        for row, filters in enumerate(self._filters):
            start, end = starts[row], starts[row + 1]
            if self._unknown[row] or self._may_keep_more(row, end - start):
                self._unknown[row] = True
                continue
            limits_count = 0 < filters.top_k < self._vocab_size
            if limits_count:
                lowest[row] = scores[start + filters.top_k - 1]
            if filters.top_p < 1.0:
                if limits_count:
                    # Scores fall, and all that equal the last one are kept.
                    end = start + int((-scores[start:end]).searchsorted(-lowest[row], side="right"))
                    total = int(through[end - 1])
                else:
                    total = self._softmax.total(self._logits[row], self._highest[row], filters.temperature)
                wanted[row] = filters.top_p * total
                self._unknown[row] = bool(through[end - 1] < wanted[row])
        return lowest, wanted

    def _may_keep_more(self, row: int, count: int) -> bool:
        """Whether top_k or, where no other filter comes before it, min_p may keep more than the known tokens."""
        filters = self._filters[row]
        if 0 < filters.top_k < self._vocab_size:
            return count < filters.top_k
        if filters.top_p < 1.0:
            return count == 0
        others = math.exp((float(self._known.bounds[row]) - self._highest[row]) / filters.temperature)
        return others * (1 + _ROUNDING) + 1 / WEIGHT_OF_LIKELIEST >= filters.min_p


def _order(row_of: Integers, scores: Floats) -> Integers:
    """Places by row, falling score and rising place."""
    falling = (~rising_bits(scores)).astype(np.int64)
    if len(scores) >> 20 or row_of[-1] >> 11:
        return np.lexsort((falling, row_of))
    keys = (row_of << 52) + ((falling + (1 << 31)) << 20) + np.arange(len(scores))
    keys.sort()
    order: Integers = keys & ((1 << 20) - 1)
    return order
