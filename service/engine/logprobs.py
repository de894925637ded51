"""Log probabilities of tokens as they are reported: from the raw logits, with ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from service.engine.distribution import RowSoftmax, by_score, largest
from service.engine.likeliest import Floats
from service.engine.request import PositionLogprobs, TokenLogprob


def position_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], top: Sequence[int]
) -> list[PositionLogprobs]:
    """For each row of logits [rows, vocab] fp32 the log probability of its token and of the `top` likeliest
    ones.

    Among equal logits the lower token id ranks first. Raises ValueError for a row without finite maximum.
    """
    softmax = RowSoftmax(logits.shape[1])
    rows = zip(logits.cpu().numpy(), token_ids, top, strict=True)
    return [_row_logprobs(softmax, *row) for row in rows]


def _row_logprobs(softmax: RowSoftmax, logits: Floats, token_id: int, top: int) -> PositionLogprobs:
    highest = float(logits.max())
    if not math.isfinite(highest):
        raise ValueError("the model's logits hold NaN or infinity")
    normalizer = softmax.log_normalizer(logits, highest)
    chosen = logits[token_id]
    rank = 1 + np.count_nonzero(logits > chosen) + np.count_nonzero(logits[:token_id] == chosen)
    likeliest = by_score(logits, largest(logits, top))[:top].tolist() if top else []
    return PositionLogprobs(
        chosen=TokenLogprob(token_id, float(chosen) - normalizer, int(rank)),
        top=tuple(
            TokenLogprob(top_id, float(logits[top_id]) - normalizer, place + 1)
            for place, top_id in enumerate(likeliest)
        ),
    )
