"""Greedy answers over checkpoints of integers, through the engine: those of transformers over the weights they stand for."""

from collections.abc import Iterator
from pathlib import Path

import decoder_harness
import pytest
import torch
import transformers
from decoder_engine import Served, generate
from engine_fakes import Collector
from quantized_checkpoints import FORMATS, make_quantized_model

PROMPTS = [list(range(3, 3 + length)) for length in (1, 9, 33, 70)]


@pytest.fixture(autouse=True)
def native_backend() -> Iterator[None]:
    before, decoder_harness.BACKEND = decoder_harness.BACKEND, "cpu"
    yield
    decoder_harness.BACKEND = before


@pytest.mark.parametrize("format", ["gptq 4 asym", "awq", "packed 4", "w8a8"])
def test_greedy_answers(tmp_path: Path, format: str) -> None:
    quantized, plain, _ = make_quantized_model(tmp_path, FORMATS[format], num_hidden_layers=2)
    served = Served.load(quantized)
    engine = served.engine(max_batch_tokens=48)
    requests = [generate(f"r{number}", prompt, 12) for number, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    collector = Collector(engine).run()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    )
    for request, prompt in zip(requests, PROMPTS, strict=True):
        options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
        expected = model.generate(torch.tensor([prompt]), eos_token_id=None, **options)
        found = collector.answers[request.request_id, 0].token_ids
        assert found == expected[0, len(prompt) :].tolist()
        assert len(set(found)) > 2
        assert served.alone(request) == [found]
