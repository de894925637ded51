"""Draws from a row's likeliest tokens are those of the whole row, to the bit."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from service.engine.distribution import RowSoftmax, draw
from service.engine.likeliest import likeliest
from service.engine.narrowed import draw_narrowed
from service.engine.request import SamplingParams
from service.engine.sampling_state import SamplingState

FILTERS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 150, "temperature": 0.3},
    {"top_k": 100_000, "top_p": 0.9},
    {"top_p": 0.9, "temperature": 0.8},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-12},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.1},
    {"top_p": 0.95, "min_p": 0.02, "temperature": 1.3},
    {"top_k": 20, "min_p": 0.2, "temperature": 5.0},
]


def make_states(seed: int) -> list[SamplingState]:
    return [
        SamplingState(SamplingParams(max_tokens=9, seed=seed + place, **params), (), 0, 1_000_000, [])
        for place, params in enumerate(FILTERS)
    ]


def shaped(shape: str, rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator)
    if shape == "peaked":
        return logits.exp() * 3
    if shape == "ties":
        return (logits * 4).round() / 2
    if shape == "cut":
        return torch.where(logits > 1.5, logits * 4, -math.inf)
    return logits * 4


def drawn_from_the_whole_row(row: torch.Tensor, state: SamplingState) -> int:
    scores = row.numpy()
    candidates = RowSoftmax(len(row)).filtered(scores, float(row.max()), state.filters)
    return candidates.token_id(draw(candidates.weights, state.uniform()))


@pytest.mark.parametrize("vocab_size", [7, 200, 5003, 20_000, 49_152])
@pytest.mark.parametrize("shape", ["wide", "peaked", "ties", "cut"])
def test_draws_are_those_of_the_whole_row(shape: str, vocab_size: int) -> None:
    told = 0
    for seed in range(5):
        states = make_states(100 * seed)
        logits = shaped(shape, len(states), vocab_size, seed)
        logits[:, 3] = 2.0
        highest, tokens = draw_narrowed(logits, states, RowSoftmax(vocab_size))
        assert highest == logits.max(dim=1).values.tolist()
        for row, token_id in enumerate(tokens):
            if token_id >= 0:
                told += 1
                assert token_id == drawn_from_the_whole_row(logits[row], states[row]), FILTERS[row]
    if vocab_size >= 20_000 and shape in ("wide", "peaked"):
        assert told > 5 * len(FILTERS) * 0.6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_maximum_tells_nothing_and_harms_no_other(bad: float) -> None:
    states, vocab_size = make_states(1), 20_000
    logits = shaped("peaked", len(states), vocab_size, 3)
    good = draw_narrowed(logits, states, RowSoftmax(vocab_size))
    for row in (0, 5, len(states) - 1):
        if bad == -math.inf:
            logits[row] = bad
        logits[row, 777] = bad
    highest, tokens = draw_narrowed(logits, states, RowSoftmax(vocab_size))
    for row in range(len(states)):
        if row in (0, 5, len(states) - 1):
            assert not math.isfinite(highest[row])
            assert tokens[row] == -1
        else:
            assert (highest[row], tokens[row]) == (good[0][row], good[1][row])


def test_draws_do_not_depend_on_the_rows_beside_them() -> None:
    states, vocab_size = make_states(5), 20_000
    logits = shaped("wide", len(states), vocab_size, 8)
    alone = [
        draw_narrowed(logits[row : row + 1], [state], RowSoftmax(vocab_size))[1][0]
        for row, state in enumerate(states)
    ]
    order = random.Random(2).sample(range(len(states)), len(states))
    together = draw_narrowed(logits[order], [states[row] for row in order], RowSoftmax(vocab_size))[1]
    assert together == [alone[row] for row in order]


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 129, 5003, 49_152])
def test_likeliest_are_all_tokens_above_the_bound(vocab_size: int) -> None:
    logits = shaped("ties", 6, vocab_size, 4)
    found = likeliest(logits)
    for row in range(6):
        start, end = found.starts[row], found.starts[row + 1]
        scores = logits[row].numpy()
        expected = np.flatnonzero(scores > found.bounds[row])
        assert found.ids[start:end].tolist() == expected.tolist()
        assert found.scores[start:end].tolist() == scores[expected].tolist()
        assert set(found.row_of[start:end].tolist()) <= {row}
        assert found.highest[row] == scores.max()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 50.0])
@pytest.mark.parametrize("vocab_size", [1, 129, 49_152, 262_144])
def test_the_total_weight_is_the_exact_sum(vocab_size: int, temperature: float) -> None:
    softmax = RowSoftmax(vocab_size)
    for row in (
        *shaped("wide", 3, vocab_size, 1),
        *shaped("ties", 2, vocab_size, 1),
        torch.zeros(vocab_size),
    ):
        weights = softmax.weights(row.numpy(), float(row.max()), temperature).astype(object)
        assert softmax.total(row.numpy(), float(row.max()), temperature) == weights.sum()
