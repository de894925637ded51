"""Distributions over the vocabulary in fixed point: softmax, filters and draws whose sums have no order.

A probability is held as an integer weight, 2**30 for the likeliest token of its row. Sums of integers do not
depend on the order of adding, and each row is worked on alone, so a row's outcome is its own whatever the number
of rows and threads. The filters keep the tokens that the warpers of Hugging Face transformers keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from service.engine.likeliest import Floats, Integers

WEIGHT_BITS = 30
WEIGHT_OF_LIKELIEST = float(1 << WEIGHT_BITS)
_LOG2_E = math.log2(math.e)
# The cast to integers cuts off, so that adding a half rounds.
_HALF = torch.tensor(0.5)
_GROUPS = 64
_FEW = 1024
_DRAW_BLOCK = 256
# From so many candidates on, putting them in bins first is faster than sorting them all.
_BINNED_FROM = 2048

Weights = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Filters:
    """Which tokens may be drawn in one row; the defaults keep all."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0


@dataclass(frozen=True)
class Candidates:
    """What may be drawn in one row: weights [n], and their token ids [n], ascending; None stands for all ids."""

    weights: Weights
    ids: Integers | None

    def token_id(self, place: int) -> int:
        """The token at a place among the candidates."""
        return place if self.ids is None else int(self.ids[place])


def softmax_weights(scores: Floats, highest: Floats, temperatures: npt.NDArray[np.float64]) -> Weights:
    """Weights [n] as those of `RowSoftmax`, each score having its own row's highest score and temperature."""
    factors = (_LOG2_E / temperatures).astype(np.float32)
    powers = torch.from_numpy((scores - highest) * factors).exp2_()
    result: Weights = torch.add(_HALF, powers, alpha=WEIGHT_OF_LIKELIEST).to(torch.int32).numpy()
    return result


class RowSoftmax:
    """Softmax weights of rows of at most `most` scores; what it returns is valid until the next call."""

    def __init__(self, most: int) -> None:
        self._powers = torch.empty(most)
        self._weights = torch.empty(most, dtype=torch.int32)

    def weights(self, scores: Floats, highest: float, temperature: float = 1.0) -> Weights:
        """Weights [n] of scores [n] relative to `highest`, which must be the largest score."""
        count = len(scores)
        powers, weights = self._powers[:count], self._weights[:count]
        torch.sub(torch.from_numpy(scores), highest, out=powers)
        powers.mul_(_LOG2_E / temperature).exp2_()
        torch.add(_HALF, powers, alpha=WEIGHT_OF_LIKELIEST, out=powers)
        result: Weights = weights.copy_(powers).numpy()
        return result

    def total(self, scores: Floats, highest: float, temperature: float = 1.0) -> int:
        """The sum of all weights of scores [n]."""
        return _total(self.weights(scores, highest, temperature))

    def log_normalizer(self, scores: Floats, highest: float) -> float:
        """log(sum(exp(scores)))."""
        return log_of_sum(highest, self.total(scores, highest))

    def filtered(self, scores: Floats, highest: float, filters: Filters) -> Candidates:
        """What stays of scores [vocab] after temperature, top_k, top_p, min_p and typical_p, in that order."""
        ids: Integers | None = None
        if 0 < filters.top_k < len(scores):
            ids = largest(scores, filters.top_k)
            scores = scores[ids]
        weights = self.weights(scores, highest, filters.temperature)
        if filters.top_p < 1.0:
            kept = _likeliest_share(scores, weights, filters.top_p)
            scores, weights, ids = scores[kept], weights[kept], kept if ids is None else ids[kept]
        if filters.min_p > 0.0:
            kept = np.flatnonzero(weights >= filters.min_p * WEIGHT_OF_LIKELIEST)
            scores, weights, ids = scores[kept], weights[kept], kept if ids is None else ids[kept]
        if filters.typical_p < 1.0:
            below = (scores.astype(np.float64) - highest) / filters.temperature
            kept = _typical_share(below, weights, filters.typical_p)
            weights, ids = weights[kept], kept if ids is None else ids[kept]
        return Candidates(weights, ids)


def log_of_sum(highest: float, total: int) -> float:
    """log(sum(exp(scores))) from the highest score and the sum of the weights at temperature 1."""
    return highest + math.log(total) - WEIGHT_BITS * math.log(2)


def draw(weights: Weights, uniform: int) -> int:
    """A place in weights [n] by inverse CDF; `uniform` is an integer in [0, 2**64)."""
    if len(weights) <= _FEW:
        through = weights.cumsum(dtype=np.int64)
        return int(through.searchsorted((uniform * int(through[-1])) >> 64, side="right"))
    whole = len(weights) // _DRAW_BLOCK * _DRAW_BLOCK
    blocks = weights[:whole].reshape(-1, _DRAW_BLOCK).sum(axis=1, dtype=np.int64)
    through = np.append(blocks, _total(weights[whole:])).cumsum()
    point = (uniform * int(through[-1])) >> 64
    block = int(through.searchsorted(point, side="right"))
    start = block * _DRAW_BLOCK
    before = int(through[block - 1]) if block else 0
    inside = weights[start : start + _DRAW_BLOCK].cumsum(dtype=np.int64)
    return start + int(inside.searchsorted(point - before, side="right"))


def largest(scores: Floats, count: int) -> Integers:
    """The ids, ascending, of the `count` largest of scores [n] and of all that equal the last of these."""
    width = len(scores) // _GROUPS
    candidates: Integers | None = None
    if count <= width:
        # At least `count` groups reach the bound, so at least `count` scores do.
        highest = scores[: width * _GROUPS].reshape(_GROUPS, width).max(axis=0)
        bound = np.partition(highest, width - count)[width - count]
        candidates = np.flatnonzero(scores >= bound)
        scores = scores[candidates]
    if count >= len(scores):
        return np.arange(len(scores)) if candidates is None else candidates
    last = np.partition(scores, len(scores) - count)[len(scores) - count]
    kept = np.flatnonzero(scores >= last)
    return kept if candidates is None else candidates[kept]


def by_score(scores: Floats, ids: Integers) -> Integers:
    """`ids`, by falling score; equals by rising id."""
    keys = (~rising_bits(scores[ids])).astype(np.int64) << 32 | ids
    keys.sort()
    return keys & 0xFFFF_FFFF


def rising_bits(scores: Floats) -> Weights:
    """Integers [n] in the order of scores [n]."""
    # Adding zero makes a negative zero positive.
    bits = (scores + np.float32(0.0)).view(np.int32)
    rising: Weights = bits ^ ((bits >> 31) & 0x7FFF_FFFF)
    return rising


def _total(weights: Weights) -> int:
    return int(np.add.reduce(weights, dtype=np.int64))


def _likeliest_share(scores: Floats, weights: Weights, share: float) -> Integers:
    """Places of the fewest likeliest tokens whose share reaches `share`; of equals at the end, those with the lowest ids."""
    total = _total(weights)
    wanted = share * total
    spare = (1.0 - share) * total
    # Few tokens are enough as a rule; all below the last bound together do not reach what may be left out.
    for divisor in (_FEW, len(weights)):
        places = np.flatnonzero(weights >= max(1, int(spare / divisor)))
        if _total(weights[places]) >= wanted:
            break
    above, before = places[:0], 0
    if len(places) > _BINNED_FROM:
        above, places, before = _bin_of_share(weights, places, wanted)
    places = by_score(scores, places)
    through = weights[places].cumsum(dtype=np.int64)
    count = int((before + through).searchsorted(wanted)) + 1
    kept = np.concatenate((above, places[:count]))
    kept.sort()
    return kept


def _bin_of_share(weights: Weights, places: Integers, wanted: float) -> tuple[Integers, Integers, int]:
    """Splits places by weight: those above the bin in which the sum reaches `wanted`, those in it, and the sum above it."""
    chosen = weights[places]
    # The exponent and three bits of the mantissa: eight bins for each doubling.
    bins = chosen.astype(np.float32).view(np.int32) >> 20
    bins -= bins.min()
    # These sums are of integers below 2**53, hence exact.
    through = np.bincount(bins, weights=chosen)[::-1].cumsum()
    place = min(int(through.searchsorted(wanted)), len(through) - 1)
    last = len(through) - 1 - place
    return places[bins > last], places[bins == last], int(through[place - 1]) if place else 0


def _typical_share(below: npt.NDArray[np.float64], weights: Weights, mass: float) -> Integers:
    """Places of the tokens whose surprise is nearest the expected one until their share reaches the mass.

    `below` are the log probabilities relative to the likeliest. Locally typical sampling, Meister et al. 2022
    (arXiv:2202.00666).
    """
    possible = np.flatnonzero(weights)
    below, weights = below[possible], weights[possible]
    total = _total(weights)
    # The products lie within the weights' own range, so they are summed as integers too.
    expected = -int((weights * below).astype(np.int64).sum()) / total
    distances = np.abs(below + expected)
    order = distances.argsort()
    through = weights[order].cumsum(dtype=np.int64)
    last = min(int(through.searchsorted(mass * total)), len(order) - 1)
    return possible[distances <= distances[order[last]]]
