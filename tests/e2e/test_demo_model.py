"""The demo model against transformers: the same text in float32, the same logits within rounding in bfloat16."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from served import Server

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "Once upon a time, in a small village,",
    "The three primary colours are",
    "In 1969, the first humans",
    "To make a cup of tea, first",
    "The opposite of hot is",
    "Photosynthesis is the process by which",
    "A list of fruits: apple, banana,",
    "She opened the door and saw",
    "The quick brown fox",
    "Roses are red, violets are",
    "The largest planet in the solar system",
    "import numpy as np\n",
    "Dear Sir or Madam,",
    "1, 2, 3, 4, 5,",
    "The meaning of life is",
    "Q: What is the tallest mountain?\nA:",
    "Machine learning is a field of",
]


@pytest.fixture(scope="module")
def reference(demo_model: Path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    return tokenizer, model


def test_greedy_text_of_twenty_prompts_is_that_of_transformers(
    demo_model: Path, reference, tmp_path: Path
) -> None:
    tokenizer, model = reference
    flags = ("--dtype=float32", "--kv-cache-memory=256MiB")
    with (
        Server(demo_model, tmp_path / "r", *flags) as server,
        server.client() as client,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        answers = list(pool.map(partial(client.infer, max_tokens=64, temperature=0), PROMPTS))
    for text, answer in zip(PROMPTS, answers, strict=True):
        prompt, generated = tokenizer(text)["input_ids"], list(answer.token_ids)
        # Where the reference's own choice after each of our tokens is our next token, its greedy text is ours.
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == generated, text
        assert answer.text == tokenizer.decode(generated, skip_special_tokens=True)
        assert len(generated) == 64 or generated[-1] == model.generation_config.eos_token_id


def test_bfloat16_logprobs_are_those_of_transformers_within_rounding(
    demo_model: Path, reference, tmp_path: Path
) -> None:
    tokenizer, model = reference
    flags = ("--dtype=bfloat16", "--kv-cache-memory=256MiB")
    with Server(demo_model, tmp_path / "r", *flags) as server, server.client() as client:
        answer = client.infer(prompt=PROMPTS[3], max_tokens=1, temperature=0, prompt_logprobs=0)
    token_ids = tokenizer(PROMPTS[3], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected = torch.log_softmax(model(token_ids).logits[0], dim=-1)
    ours = [position.chosen.logprob for position in answer.prompt_logprobs[1:]]
    theirs = [expected[row, token_ids[0, row + 1]].item() for row in range(token_ids.shape[1] - 1)]
    # bfloat16 has 8 bits of mantissa; the logits of this model are below 32, so 0.25 is two units in the last place.
    assert ours == pytest.approx(theirs, abs=0.25)
    assert tokenizer.decode(list(answer.token_ids)) == tokenizer.decode([int(expected[-1].argmax())])
