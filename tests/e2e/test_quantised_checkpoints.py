"""A server over a checkpoint of integers answers as transformers does over the weights they stand for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from quantized_checkpoints import FORMATS, make_quantized_model
from served import Server

PROMPTS = ["The capital of France is", "Numbers such as 1, 2, 3", "naïve café"]


@pytest.mark.parametrize("format", ["gptq 4 asym", "awq"])
def test_greedy_answers(tmp_path: Path, format: str) -> None:
    quantized, plain, _ = make_quantized_model(tmp_path, FORMATS[format], num_hidden_layers=2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    flags = ("--backend=cpu", "--kv-cache-dtype=float32", "--kv-cache-memory=16MiB")
    with Server(quantized, tmp_path / "r", *flags) as server, server.client() as client:
        answers = [client.infer(p, max_tokens=16, temperature=0, ignore_eos=True) for p in PROMPTS]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "eos_token_id": None}
        expected = model.generate(ids, **options)[0, ids.shape[1] :].tolist()
        assert list(answer.token_ids) == expected


def test_the_torch_backend_says_which_flag_to_give(tmp_path: Path) -> None:
    quantized, _, _ = make_quantized_model(tmp_path, FORMATS["gptq 4 sym"], num_hidden_layers=1)
    command = [sys.executable, "-m", "service.cli.main", "serve", f"--model={quantized}", "--port=0"]
    done = subprocess.run(
        [*command, f"--runtime-dir={tmp_path / 'r'}", "--backend=torch"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "'gptq' weights of integers are read by --backend cpu alone, not by torch" in done.stderr
