"""The converted demo model is a working checkpoint to the reference implementation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_greedy_answer_names_paris(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=24)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert answer[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("12345", ["1", "2", "3", "4", "5"]),
        ("Hello, world", ["Hello", ",", "Ġworld"]),
        ("<|im_start|>user\nhi<|im_end|>", ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"]),
    ],
)
def test_tokens_are_those_of_the_published_tokenizer(demo_model: Path, text: str, tokens: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
