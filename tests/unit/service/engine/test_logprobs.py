from __future__ import annotations

import math

import pytest
import torch

from service.engine.picker import Picker, ReferencePicker
from service.engine.request import SamplingParams
from service.engine.sampler import SamplingState, prompt_logprobs, sample


def test_logprobs_are_those_of_the_raw_logits(picker: Picker) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2)) * 3
    params = SamplingParams(
        max_tokens=9, temperature=0.2, top_k=3, logit_bias={7: 100.0}, repetition_penalty=1.5, logprobs=4
    )
    token = sample(logits, [SamplingState(params, [1, 2], 0, 300, [])], picker)[0]
    expected = logits[0].double().log_softmax(0)
    assert token.logprobs is not None
    assert token.logprobs.chosen is not None
    assert token.token_id == token.logprobs.chosen.token_id == 7
    assert token.logprobs.chosen.logprob == pytest.approx(float(expected[7]), abs=1e-6)
    assert token.logprobs.chosen.rank == int((logits[0] > logits[0, 7]).sum()) + 1
    best = expected.topk(4)
    assert [entry.token_id for entry in token.logprobs.top] == best.indices.tolist()
    assert [entry.logprob for entry in token.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert [entry.rank for entry in token.logprobs.top] == [1, 2, 3, 4]


def test_zero_logprobs_are_the_chosen_token_alone(picker: Picker) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=0)
    token = sample(torch.tensor([[0.0, 1.0]]), [SamplingState(params, [], 0, 2, [])], picker)[0]
    assert token.logprobs is not None
    assert token.logprobs.chosen is not None
    assert token.logprobs.top == ()
    assert token.logprobs.chosen.rank == 1


def test_equals_rank_by_id(picker: Picker) -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    for token_id, rank in enumerate([3, 1, 4, 2, 5, 6]):
        position = prompt_logprobs(logits, [token_id], 4, picker)[0]
        assert position.chosen is not None
        assert position.chosen.rank == rank
        assert [entry.token_id for entry in position.top] == [1, 3, 0, 2]


def test_prompt_logprobs_of_many_rows(picker: Picker) -> None:
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(3))
    next_ids = [(7 * i) % 200 for i in range(50)]
    positions = prompt_logprobs(logits, next_ids, 2, picker)
    expected = logits.double().log_softmax(1)
    assert [position.chosen.logprob for position in positions if position.chosen] == pytest.approx(
        [float(expected[i, token_id]) for i, token_id in enumerate(next_ids)], abs=1e-6
    )
    for i in (0, 17, 49):
        assert prompt_logprobs(logits[i : i + 1], next_ids[i : i + 1], 2, picker) == [positions[i]]


def test_more_asked_for_than_there_are_tokens(picker: Picker) -> None:
    position = prompt_logprobs(torch.tensor([[0.0, 1.0, -math.inf]]), [2], 20, picker)[0]
    assert [entry.token_id for entry in position.top] == [1, 0, 2]
    assert position.chosen is not None
    assert position.chosen.logprob == -math.inf


def test_probabilities_sum_to_one_over_a_large_vocabulary(picker: Picker) -> None:
    logits = torch.zeros(1, 262_144)
    position = prompt_logprobs(logits, [5], 0, picker)[0]
    assert position.chosen is not None
    assert position.chosen.logprob == pytest.approx(-math.log(262_144), abs=1e-9)


def test_bad_logits_raise(picker: Picker) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        prompt_logprobs(torch.tensor([[0.0, math.nan]]), [0], 1, picker)


@pytest.mark.parametrize("size", [1, 2, 63, 256, 300, 5003, 49_152])
@pytest.mark.parametrize("shape", ["wide", "ties", "equal", "cut"])
def test_the_kernel_says_what_numpy_and_torch_say(kernel_picker: Picker, shape: str, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(6, size, generator=generator) * 4
    if shape == "ties":
        logits = (logits / 2).round()
    elif shape == "equal":
        logits = torch.full((6, size), 1.5)
    elif shape == "cut":
        logits = torch.where(logits > 5, logits, -math.inf)
        logits[:, size // 2] = 1.0
    ids = torch.randint(size, (6,), generator=generator).tolist()
    top = [0, 1, 5, 20, 1, 400]
    found = kernel_picker.logprobs(logits, ids, top)
    for position, expected in zip(found, ReferencePicker().logprobs(logits, ids, top), strict=True):
        assert position.chosen is not None
        assert expected.chosen is not None
        entries, wanted = [position.chosen, *position.top], [expected.chosen, *expected.top]
        assert [(e.token_id, e.rank) for e in entries] == [(e.token_id, e.rank) for e in wanted]
        assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in wanted], abs=1e-6)
